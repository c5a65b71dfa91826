"""Tells cells that compute the same, before anything is traced.

A deep model repeats a few blocks. Cells of equal blocks need one trace, if the
layers are the same but for the values of their variables. `likeness` writes
down all that a layer's code can see: its class and its attributes, and theirs,
and so on. Two lists of layers with equal likeness run the same code on the same
data.

Code that can see more than attributes, such as names, makes a layer unlike all
others, see `code_reading.py`, and other objects are compared by identity: too
careful, never wrong. Left out are names and what else Keras notes about a layer
for itself, and initialisers, unless a user's code mentions them.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells.code_reading import Reading, own_classes

# Only these very types: a subclass may have attributes.
_VALUES = (bool, bytes, complex, float, int, str, type(None))
_FIXED = (
    enum.Enum,
    inspect.Signature,
    np.dtype,
    np.generic,
    tf.DType,
    tf.TensorShape,
)
_LOOKED_INTO = (
    keras.DTypePolicy,
    keras.Operation,  # layers among them
    keras.constraints.Constraint,
    keras.random.SeedGenerator,
    keras.regularizers.Regularizer,
)


def likeness(
    layers: Sequence[Any],
    variables: Collection[keras.Variable],
    readings: dict[int, Reading] | None = None,
) -> Hashable:
    """What layers compute, as something that can be compared.

    Args:
        layers: Built layers, maybe in nests with other values.
        variables: Those whose values do not matter.
        readings: What was read of code before, which this call reads and adds
            to. Pass the same (at first empty) dict where nothing runs between
            calls that could change what code refers to.

    Returns:
        Equal values for lists of layers that compute the same function of
        their inputs and variables.
    """
    return _Writer(variables, readings).of_all(layers)


class _Writer:
    """Writes down values; one that comes again by its number."""

    def __init__(
        self,
        variables: Collection[keras.Variable],
        readings: dict[int, Reading] | None,
    ):
        self._variables = {id(v) for v in variables}
        self._seen: dict[int, int] = {}
        self._readings = {} if readings is None else readings

    def of_all(self, values: Any) -> tuple[Hashable, ...]:
        return tuple(self.of(value) for value in values)

    def of(self, value: Any) -> Hashable:
        if type(value) in _VALUES or isinstance(value, _FIXED):
            return type(value), value
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, keras.Variable):
            return self._of_variable(value)
        if isinstance(value, (list, tuple)):
            return type(value), self.of_all(value)
        if isinstance(value, dict):
            return type(value), self.of_all(value), self.of_all(value.values())
        if type(value) is np.ndarray and value.dtype != object:
            return value.shape, value.dtype.str, value.tobytes()
        if type(value) is functools.partial and not vars(value):
            parts = value.func, value.args, value.keywords
            return "partial", self.of_all(parts)
        if isinstance(value, types.MethodType):
            return self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, _LOOKED_INTO) and not _has_slots(type(value)):
            return self._of_object(value)
        return _Same(value if self._reading(value).reason is None else object())

    def _of_variable(self, variable: keras.Variable) -> Hashable:
        if id(variable) not in self._variables:
            return _Same(variable)
        return (
            "variable",
            tuple(variable.shape),
            variable.dtype,
            variable.trainable,
            internals.autocasts(variable),
        )

    def _of_object(self, thing: Any) -> Hashable:
        reading = self._reading(type(thing))
        if reading.reason is not None:
            return _Same(object())
        parts: list[Any] = [type(thing)]
        for name, value in sorted(internals.own_attributes(thing).items()):
            is_initializer = isinstance(value, keras.initializers.Initializer)
            if is_initializer and name not in reading.mentioned:
                continue
            parts.append((name, self.of(value)))
        return tuple(parts)

    def _reading(self, thing: Any) -> Reading:
        if id(thing) not in self._readings:
            self._readings[id(thing)] = Reading(thing)
        return self._readings[id(thing)]


def _has_slots(cls: type) -> bool:
    """Whether objects have attributes that `vars` does not show."""
    return any(vars(c).get("__slots__") for c in own_classes(cls))


class _Same:
    """Equal to itself. Keeps the object, so that its id is not used again."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
