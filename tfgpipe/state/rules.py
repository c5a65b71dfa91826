"""What micro-batches do to the variables that no optimizer updates.

Every micro-batch of a mini-batch starts from the same state, and the variable
is assigned once, after the last micro-batch:

    random seeds         `SeedRule`    advance by what every micro-batch draws
    metrics              `MetricRule`  run on from micro-batch to micro-batch
    other numbers        `MeanRule`    of the new values, weighted by rows
    other integers       `FirstRule`   the new value of the first micro-batch
    batch normalisation                the moments of the mini-batch

Batch normalisation is in `batch_normalization.py`. Seeds are saved here, too,
which Keras does not do.

Where there is one micro-batch, what its layers assigned is what is assigned.

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

import contextvars
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe.micro_batches import MicroBatches


class SeedRule(NamedTuple):
    """A random seed: advances by what every micro-batch draws, in order.

    So bits depend on the micro-batch and not on how layers fall into cells.

    Attributes:
        draws: Draws of one micro-batch.
    """

    draws: int

    def start(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """With what a micro-batch begins, after `rank` others.

        `value` is the seed before the mini-batch.
        """
        return advance_seed(value, self.draws, rank)

    def end(self, value: tf.Tensor, micro_batches: MicroBatches) -> tf.Tensor:
        """The value after the mini-batch."""
        rank = micro_batches.rank(micro_batches.count)
        return advance_seed(value, self.draws, rank)


class MetricRule(NamedTuple):
    """A metric: a micro-batch begins with what the one before has left.

    Attributes:
        aggregation: What becomes of several replicas' values, see
            `keras.Variable`.
    """

    aggregation: str

    def first(self, value: tf.Tensor, is_first_replica: bool) -> tf.Tensor:
        """With what a replica begins: what is summed is zero in all but one."""
        if is_first_replica:
            return value
        if self.aggregation == "sum":
            return tf.zeros_like(value)
        return tf.identity(value)

    def end(self, lasts: list[tf.Tensor]) -> tf.Tensor:
        """The value after the mini-batch, for what each replica has left."""
        if len(lasts) == 1 or self.aggregation not in ("sum", "mean"):
            return lasts[0]
        total = sum_of(lasts)
        if self.aggregation == "sum":
            return total
        return _if_equal(lasts, tf.cast(total / len(lasts), total.dtype))


class MeanRule:
    """Any other number: the mean of the new values, weighted by rows."""

    def end(
        self, values: list[tf.Tensor], micro_batches: MicroBatches
    ) -> tf.Tensor:
        """The value after the mini-batch, for those of micro-batches."""
        return weighted_mean(values, micro_batches)


class FirstRule:
    """Any other integer, such as a counter: what the first micro-batch left."""

    def end(
        self, values: list[tf.Tensor], micro_batches: MicroBatches
    ) -> tf.Tensor:
        """The value after the mini-batch, for those of micro-batches."""
        del micro_batches
        return values[0]


def advance_seed(
    seed: tf.Tensor, draws: int, micro_batch: Any, draws_before: Any = 0
) -> tf.Tensor:
    """The seed, shape (2,), with which a micro-batch starts.

    Before it came `micro_batch` others, an int or a scalar, with `draws` each,
    and `draws_before` of its own.
    """
    steps = tf.cast(micro_batch, seed.dtype) * draws + draws_before
    return seed + tf.stack([tf.zeros_like(steps), steps])


def weighted_mean(
    values: list[tf.Tensor], micro_batches: MicroBatches
) -> tf.Tensor:
    """Mean of the micro-batches' values, weighted by their rows.

    Where all are equal it is that value to the bit, an infinity too. A
    micro-batch without rows counts for nothing.
    """
    parts, counted = [], []
    for m, value in enumerate(values):
        part = value * micro_batches.fraction(m, value.dtype)
        parts.append(micro_batches.select(m, part, tf.zeros_like(part)))
        # The last one always has rows.
        counted.append(micro_batches.select(m, value, values[-1]))
    return _if_equal(counted, sum_of(parts))


def _if_equal(values: list[tf.Tensor], otherwise: tf.Tensor) -> tf.Tensor:
    """What all values are, where they are equal; else another value."""
    is_equal = tf.stack([value == values[-1] for value in values])
    return tf.where(tf.reduce_all(is_equal, axis=0), values[-1], otherwise)


def sum_of(values: list[tf.Tensor]) -> tf.Tensor:
    """The sum, rounded alike every time, which that of AddN is not."""
    return tf.reduce_sum(tf.stack(values), axis=0)


# ------------------------------------------------------------------ saved seeds
# Whether what is loaded is a file of a `GPipe`, which has them.
seeds_expected: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "seeds_expected", default=False
)


class RandomState(keras.layers.Layer):
    """Saves the states of seed generators, which Keras does not.

    Without them a resumed run would draw the dropout masks of its first steps
    again. `seeds` returns them: they are not tracked, for the layers own them.
    """

    def __init__(self, model: str, seeds: Callable[[], list[keras.Variable]]):
        super().__init__(name="random_state")
        self._model = model
        self._seeds = seeds
        self.built = True

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras to save."""
        for i, seed in enumerate(self._seeds()):
            store[str(i)] = seed.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras to load; plain Keras files have no seeds."""
        seeds, names = self._seeds(), list(store.keys())
        saved = {key: store[key] for key in names}
        if not saved:
            if seeds and seeds_expected.get():
                warnings.warn(
                    "The file of a `GPipe` must hold the states of its random "
                    f"seeds. Received: none of the {len(seeds)} of model "
                    f"'{self._model}', which goes on with new ones: dropout "
                    "and other random layers repeat what they drew first.",
                    stacklevel=2,
                )
            return
        expected = {str(i): tuple(seed.shape) for i, seed in enumerate(seeds)}
        if {key: tuple(v.shape) for key, v in saved.items()} != expected:
            warnings.warn(
                "The saved states of random seeds must be those of the model's "
                f"layers. Expected: {len(seeds)} of them, one for each seed "
                f"generator of model '{self._model}', in the order of its "
                f"layers. Received: {len(saved)} in the file. None of them was "
                "loaded, so dropout and other random layers go on as if new. "
                "Make the model of the layers that were saved.",
                stacklevel=2,
            )
            return
        for i, seed in enumerate(seeds):
            seed.assign(saved[str(i)])
