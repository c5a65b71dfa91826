"""Nests of tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras import tree


def copied(tensor: Any) -> Any:
    """An identity of a tensor, on the current device; None of None."""
    return None if tensor is None else tf.identity(tensor)


def structure_of(nest: Any) -> Any:
    """A nest like this one, with the position of each leaf in the flat nest.

    A tensor that comes several times has the position at which it came first:
    if a layer takes off its mask, as attentions do, none of them has one.
    """
    flat = tree.flatten(nest)
    places = {id(leaf): i for i, leaf in reversed([*enumerate(flat)])}
    found = [
        places[id(leaf)] if tf.is_tensor(leaf) else i
        for i, leaf in enumerate(flat)
    ]
    return tree.pack_sequence_as(nest, found)


def is_continuous(tensor: Any) -> bool:
    """Whether something is a tensor that may have a gradient."""
    return tensor is not None and (
        tensor.dtype.is_floating or tensor.dtype.is_complex
    )
