"""Tells cells that compute the same, before anything is traced.

A deep model repeats a few blocks. Cells of equal blocks need one trace, if the
layers are the same but for the values of their variables. `likeness` writes
down all that a layer's code can see: its class and its attributes, and theirs,
and so on. Two lists of layers with equal likeness run the same code on the same
data.

What is not understood is compared by identity: too careful, never wrong. Left
out are names, initialisers, and what Keras notes about a layer for itself.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Hashable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import internals

_VALUES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    enum.Enum,
    np.dtype,
    np.generic,
    tf.DType,
    tf.TensorShape,
    inspect.Signature,
    types.ModuleType,
)
_LOOKED_INTO = (
    keras.DTypePolicy,
    keras.constraints.Constraint,
    keras.layers.Layer,
    keras.random.SeedGenerator,
    keras.regularizers.Regularizer,
)


def likeness(layers: list[keras.layers.Layer]) -> Hashable:
    """What the layers compute, as something that can be compared.

    Args:
        layers: Built layers.

    Returns:
        Equal values for lists of layers that compute the same function of
        their inputs and variables.
    """
    seen: dict[int, int] = {}
    return tuple(_of(layer, seen) for layer in layers)


def _of(value: Any, seen: dict[int, int]) -> Hashable:
    if isinstance(value, _VALUES):
        return type(value), value
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, keras.Variable):
        return (
            "variable",
            tuple(value.shape),
            value.dtype,
            value.trainable,
            internals.autocasts(value),
        )
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_of(v, seen) for v in value)
    if isinstance(value, dict):
        items = tuple((_of(k, seen), _of(v, seen)) for k, v in value.items())
        return type(value), items
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return "partial", tuple(_of(v, seen) for v in parts)
    if isinstance(value, types.MethodType):
        return value.__func__, _of(value.__self__, seen)
    is_initializer = isinstance(value, keras.initializers.Initializer)
    if is_initializer and internals.is_keras(type(value)):
        return "initializer", type(value)
    if isinstance(value, _LOOKED_INTO):
        attributes = internals.own_attributes(value)
        return type(value), tuple(
            (name, _of(v, seen)) for name, v in sorted(attributes.items())
        )
    return _Same(value)


class _Same:
    """Equal to itself. Keeps the object, so that its id is not used again."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
