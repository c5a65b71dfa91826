"""What micro-batches do to the variables that no optimizer updates.

Every micro-batch of a mini-batch starts from the same state, and the variable
is assigned once, after the last micro-batch:

    random seeds           advance by what every micro-batch draws, in order
    metrics                run on from micro-batch to micro-batch
    batch normalisation    one update with the mini-batch's moments
    other floats           mean of the new values, weighted by rows
    other integers         the new value of the first micro-batch

The moments of a mini-batch follow from those of its micro-batches exactly
([Chan et al., 1979](http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773)):
mean = sum w_m mean_m, variance = sum w_m (variance_m + (mean_m - mean)^2),
where w_m is the share of the rows (of the unmasked positions) of micro-batch m.
A backward pass recomputes from the same state, and assigns nothing.

Limits: a seed that is drawn a number of times that depends on the data, and
state that rows of a mini-batch hand on to each other, cannot be told from the
above. `BatchNormalization(renorm=True)` normalises by its state: refused.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.micro_batch import MicroBatches


class StateScope(keras.StatelessScope):
    """Runs layers on given values of their variables, and notes new ones.

    Args:
        state: Pairs of a variable and its value.
        seeds: The variables among them that are random seeds.
        normalizations: Batch normalisations whose moments are to be recorded
            instead of moving their statistics.

    Attributes:
        assigned: ids of the variables that got a new value.
        draws: How often the seed of an id was drawn.
        unknown: Paths of assigned variables that were not given.
        moments: For each batch normalisation a list of its calls, each a
            (mean, variance, count), where count is None without a mask.
    """

    def __init__(
        self,
        state: list[tuple[keras.Variable, tf.Tensor]],
        seeds: Sequence[keras.Variable] = (),
        normalizations: Sequence[keras.layers.BatchNormalization] = (),
    ):
        super().__init__(state, collect_losses=True)
        self._known = set(self.state_mapping)
        self._seeds = {id(v) for v in seeds}
        self._weights: dict[int, tf.Tensor] = {}
        self._moving = {
            id(v): layer
            for layer in normalizations
            for v in (layer.moving_mean, layer.moving_variance)
        }
        self.assigned: set[int] = set()
        self.draws: collections.Counter[int] = collections.Counter()
        self.unknown: list[str] = []
        self._moved: dict[int, keras.layers.BatchNormalization] = {}
        self.moments: dict[int, list[Any]] = {
            id(layer): [] for layer in normalizations
        }

    def use_weights(
        self, weights: list[tuple[keras.Variable, tf.Tensor]]
    ) -> None:
        """Gives the next layer its trainable variables.

        A variable that two layers share comes as two tensors, so that each
        use has its own gradient: they are summed in the same order wherever
        the two uses are.
        """
        self._weights = {id(v): tensor for v, tensor in weights}
        for variable, tensor in weights:
            self.state_mapping[id(variable)] = tensor

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Called by `Variable.assign`."""
        variable, value = update
        key = id(variable)
        if key in self._moving:
            layer = self._moving[key]
            self._moved[id(layer)] = layer
            return
        if key in self._weights:
            # As in Keras the gradient is that of the new value.
            weight = self._weights[key]
            value = weight + tf.stop_gradient(
                tf.cast(value, weight.dtype) - weight
            )
        elif key not in self._known:
            self.unknown.append(variable.path)
        self.draws[key] += key in self._seeds
        self.assigned.add(key)
        super().add_update((variable, value))

    @property
    def moved_alone(self) -> list[str]:
        """Names of normalisations that moved, without moments of Keras's."""
        return [
            layer.name
            for key, layer in self._moved.items()
            if not self.moments[key]
        ]

    def new_values(self, variables: list[keras.Variable]) -> list[Any]:
        """Their new values so far, None where they were not assigned."""
        return [
            self.get_current_value(v) if id(v) in self.assigned else None
            for v in variables
        ]

    def record(
        self, layer: Any, inputs: Any, mask: Any, mean: Any, variance: Any
    ) -> None:
        """Notes the moments by which a batch normalisation normalises."""
        del inputs
        count = None
        if mask is not None:
            count = tf.reduce_sum(tf.cast(mask, mean.dtype))
        self.moments[id(layer)].append((mean, variance, count))


def advance_seed(
    seed: tf.Tensor, draws_before: Any, draws: int, micro_batch: Any
) -> tf.Tensor:
    """The seed with which a cell starts micro-batch `micro_batch`.

    Args:
        seed: State of a `keras.random.SeedGenerator`, shape (2,).
        draws_before: Draws of one micro-batch in earlier cells.
        draws: Draws of one micro-batch in all cells.
        micro_batch: How many micro-batches came before, int or scalar tensor.
    """
    steps = tf.cast(micro_batch, seed.dtype) * draws + draws_before
    return seed + tf.stack([tf.zeros_like(steps), steps])


def mean_over_micro_batches(
    values: list[tf.Tensor], micro_batches: MicroBatches
) -> tf.Tensor:
    """One new value of a variable that no micro-batch may update alone."""
    if not values[0].dtype.is_floating:
        return values[0]
    return weighted_mean(values, micro_batches)


def weighted_mean(
    values: list[tf.Tensor], micro_batches: MicroBatches
) -> tf.Tensor:
    """Mean of the micro-batches' values, weighted by their rows."""
    dtype = values[0].dtype
    return sum_of(
        [
            value * micro_batches.fraction(m, dtype)
            for m, value in enumerate(values)
        ]
    )


def sum_of(values: list[tf.Tensor]) -> tf.Tensor:
    """The sum, rounded alike every time, which that of AddN is not."""
    return tf.reduce_sum(tf.stack(values), axis=0)


def moving_statistics(
    layer: keras.layers.BatchNormalization,
    initial: tuple[tf.Tensor, tf.Tensor],
    moments: list[list[Any]],
    micro_batches: MicroBatches,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Updates a batch normalisation once, with a mini-batch's moments.

    Args:
        layer: The layer.
        initial: Its moving mean and variance before the mini-batch.
        moments: For each micro-batch what `StateScope.moments` recorded.
        micro_batches: How the rows fall into micro-batches.

    Returns:
        The new moving mean and variance.
    """

    def updated(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
        kept = tf.cast(old, new.dtype) * layer.momentum
        return tf.cast(kept + new * (1.0 - layer.momentum), old.dtype)

    moving_mean, moving_variance = initial
    for call in zip(*moments):  # a layer may be called more than once
        mean, variance = combine_moments(list(call), micro_batches)
        moving_mean = updated(moving_mean, mean)
        moving_variance = updated(moving_variance, variance)
    return moving_mean, moving_variance


def combine_moments(
    moments: list[Any], micro_batches: MicroBatches
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of a mini-batch from those of its micro-batches."""
    means, variances, unmasked = zip(*moments)
    dtype = means[0].dtype
    counts = []
    for m, count in enumerate(unmasked):
        rows = micro_batches.size(m) if count is None else count
        counts.append(
            micro_batches.select(m, tf.cast(rows, dtype), tf.zeros([], dtype))
        )
    total = sum_of(counts)
    shares = [tf.math.divide_no_nan(count, total) for count in counts]
    mean = sum_of([w * m for w, m in zip(shares, means)])
    variance = sum_of(
        [
            w * (v + tf.square(m - mean))
            for w, v, m in zip(shares, variances, means)
        ]
    )
    return mean, variance
