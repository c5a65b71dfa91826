"""Tensors whose gradients are told as they pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfgpipe.cells.values import Boundary, is_continuous, structure_of


def with_gradients_told(nest: Any, tell: Callable[[int, Any], None]) -> Any:
    """The nest, with the same values and masks.

    Args:
        nest: A nest of tensors, which are run eagerly.
        tell: Called with the position of a tensor and its gradient, when that
            passes.
    """
    boundary = Boundary.of(nest)
    tensors = [
        with_gradient_told(t, functools.partial(tell, i))
        if is_continuous(t)
        else t
        for i, t in enumerate(boundary.tensors)
    ]
    return Boundary(tensors, boundary.masks).nest(structure_of(nest))


def with_gradient_told(
    tensor: tf.Tensor, tell: Callable[[Any], None]
) -> tf.Tensor:
    """The tensor; `tell` is called with its gradient."""

    @tf.custom_gradient
    def told(value: tf.Tensor) -> Any:
        def gradient(dy: Any) -> Any:
            tell(dy)
            return dy

        return tf.identity(value), gradient

    return told(tensor)
