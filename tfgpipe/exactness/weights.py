"""Gradients of weights, and where the weights are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import as_tensor, is_continuous
from tfgpipe.exactness.difference import (
    largest,
    limit_of,
    of_gradients,
    without_tiny,
)
from tfgpipe.exactness.recorder import Recorded
from tfgpipe.exactness.report import Tally

# Gradients, or None, and their weights.
Gradients = Sequence[tuple[Any, keras.Variable]]


class Places:
    """Where variables are, in words, and what is rounding there.

    Args:
        model: The `GPipe`.
        recorded: Its steps.

    Attributes:
        worst: What is rounding where most is.
    """

    def __init__(self, model: Any, recorded: Recorded):
        self._names: dict[int, str] = {}
        self._limits: dict[int, float] = {}
        self._scales: dict[int, float] = {}
        for place, calls in recorded:
            limit = place.limit(calls[0].outputs.tensors)
            taken = [t for call in calls for t in call.inputs.tensors]
            scale = max(
                (largest(t) for t in taken if is_continuous(t)), default=0.0
            )
            for variable in place.own_variables:
                self._names.setdefault(id(variable), place.name)
                known = self._limits.get(id(variable), 0.0)
                self._limits[id(variable)] = max(known, limit)
                known = self._scales.get(id(variable), 0.0)
                self._scales[id(variable)] = max(known, scale)
        self.worst = max(
            place.limit(calls[0].outputs.tensors) for place, calls in recorded
        )
        for weight in model.trainable_variables:
            for optimizer in internals.with_inner(model.optimizer):
                for slot in internals.slots(optimizer, weight):
                    self._names[id(slot)] = self._names.get(id(weight), "")

    def name(self, variable: keras.Variable) -> str:
        """A variable and its layer."""
        place = self._names.get(id(variable))
        path = f"'{variable.path}'"
        return f"{path} of {place}" if place else path

    def limit(self, variable: keras.Variable) -> float:
        """From where on its gradient differs by more than rounding."""
        return self._limits.get(id(variable), limit_of([variable.dtype]))

    def scale(self, variable: keras.Variable) -> float:
        """The largest input of its layer."""
        return self._scales.get(id(variable), 0.0)


def compare_weights(
    tally: Tally,
    kind: str,
    places: Places,
    found: Gradients,
    expected: Mapping[int, Any],
    sums_in: str | None,
) -> None:
    """Compares gradients of weights.

    Args:
        tally: Takes the comparisons.
        kind: Of what, see `Finding`.
        places: Where the weights are.
        found: The gradients.
        expected: What they should be, by the id of the weight.
        sums_in: In which dtype they are summed; None: that of each weight.
    """
    pairs = [
        (as_tensor(d), as_tensor(expected.get(id(v))), v) for d, v in found
    ]
    rounded = 0.0 if sums_in is None else limit_of([sums_in])
    for d, own, variable in without_tiny(pairs):
        d, own = (_or_zeros(d, own), _or_zeros(own, d))
        limit = max(places.limit(variable), rounded)
        difference = of_gradients([d], [own])
        tally.note(kind, places.name(variable), "gradient", difference, limit)


def _or_zeros(gradient: Any, other: Any) -> tf.Tensor:
    return tf.zeros_like(other) if gradient is None else gradient
