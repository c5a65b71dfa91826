"""Batch normalisations whose statistics move at the end of a mini-batch.

Where there are several micro-batches, what a layer assigns to its moving mean
and variance is not kept: they move once, with the moments of the mini-batch. By
which rule is seen in what the layer assigned, old * a + new * b with a + b = 1,
and every other rule is refused. (One micro-batch is the mini-batch; then moving
statistics are state as any other.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe.cells.affine import factors
from tfgpipe.cells.single_values import count_of_few

_KEPT = (1.0, 0.0)
_ROUNDING = {2: 2.0**-6, 4: 2.0**-21, 8: 2.0**-50}  # by bytes of a float


class MovingStatistics:
    """The moving statistics of a cell, while its layers run.

    Args:
        layers: Batch normalisations whose moments are to be recorded instead
            of moving their statistics.
        moved: ids of the moving statistics that earlier cells have moved.

    Attributes:
        moments: By the id of a layer a list of its calls, each a
            (mean, variance, count, few), where count is None without a mask,
            and few is that of `single_values.count_of_few`.
        rules: By the id of a layer a list of its calls, each the pairs (a, b)
            by which its mean and its variance move: old * a + new * b.
    """

    def __init__(
        self,
        layers: Sequence[keras.layers.BatchNormalization],
        moved: Collection[int],
    ):
        self._owners = {
            id(v): (layer, i)
            for layer in layers
            for i, v in enumerate((layer.moving_mean, layer.moving_variance))
        }
        self._moved = set(moved)
        self._stale: dict[int, str] = {}
        self._odd: dict[int, str] = {}
        self.moments: dict[int, list[Any]] = {id(v): [] for v in layers}
        self.rules: dict[int, list[Any]] = {id(v): [] for v in layers}

    def has(self, variable: keras.Variable) -> bool:
        """Whether a variable is one of them."""
        return id(variable) in self._owners

    def read(self, variable: keras.Variable) -> None:
        """Notes that a layer reads a variable."""
        if id(variable) in self._moved:
            self._stale[id(variable)] = variable.path

    def record(
        self, layer: Any, inputs: Any, mask: Any, mean: Any, variance: Any
    ) -> None:
        """Notes the moments by which a batch normalisation normalises."""
        for variable in (layer.moving_mean, layer.moving_variance):
            self._stale.pop(id(variable), None)  # it was the layer itself
        count = None
        if mask is not None:
            count = tf.reduce_sum(tf.cast(mask, mean.dtype))
        few = count_of_few(layer, inputs) if mask is None else None
        self.moments[id(layer)].append((mean, variance, count, few))
        self.rules[id(layer)].append([_KEPT, _KEPT])

    def assign(
        self, variable: keras.Variable, old: tf.Tensor, value: tf.Tensor
    ) -> None:
        """Notes by which rule a layer moves a variable.

        Args:
            variable: The variable.
            old: Its value so far.
            value: What is assigned.
        """
        layer, i = self._owners[id(variable)]
        rule = None
        calls = self.rules[id(layer)]
        if calls and calls[-1][i] is _KEPT:
            new = self.moments[id(layer)][-1][i]
            rule = _rule(layer, old, new, value)
        if rule is None:
            self._odd[id(layer)] = layer.name
        else:
            calls[-1][i] = rule
        self._moved.add(id(variable))

    def check(self, number: int) -> None:
        """Refuses what cannot be told of the mini-batch.

        Args:
            number: Of the cell.
        """
        if self._stale:
            raise ValueError(
                "A layer must not read the moving statistics of a "
                "`keras.layers.BatchNormalization` after it was called with "
                "`training=True`, if there is more than one micro-batch: they "
                "move once, at the end of the mini-batch. Received: reads of "
                f"{[*self._stale.values()]} in cell {number}. Read them "
                "before, compute the moments that you need, or pass "
                "num_micro_batches=1."
            )
        if self._odd:
            raise ValueError(
                "A `keras.layers.BatchNormalization` must leave its moments to "
                "Keras, and move its statistics to `old * momentum + new * "
                "(1 - momentum)` with a constant momentum, if there is more "
                "than one micro-batch: they move once, with the moments of "
                f"the mini-batch. Received: {[*self._odd.values()]} in cell "
                f"{number}, which assign something else to their moving "
                "statistics. Call `super().call`, pass num_micro_batches=1, "
                "or derive from `keras.layers.Layer`: then they are the mean "
                "over micro-batches, as other state is."
            )


def _rule(
    layer: Any, old: tf.Tensor, new: tf.Tensor, value: tf.Tensor
) -> tuple[Any, Any] | None:
    """The numbers (a, b) with value = old * a + new * b and a + b = 1."""
    limit = _ROUNDING[value.dtype.size]
    found = factors(value, [old, new])
    if found is None:
        return None
    a, b, constant = found
    if np.any(constant) or np.any(abs(a + b - 1) > limit):
        return None
    return a, b
