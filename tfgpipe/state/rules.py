"""Rules for variables that no optimizer updates, over micro-batches.

Every micro-batch of a mini-batch starts from the same state, and the variable
is assigned once, after the last micro-batch:

    random seeds         advance by the draws of every micro-batch
    metrics              run on from micro-batch to micro-batch
    other numbers        the mean of the new values, weighted by rows
    other integers       the new value of the first micro-batch
    batch normalisation  the moments of the mini-batch

Batch normalisation is in `batch_normalization.py`. Seeds are saved here, too,
which Keras does not do. With one micro-batch, the values that its layers
assigned are assigned.

The moments of a mini-batch follow exactly from its micro-batches'
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
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.inputs import MicroBatches


def advance_seed(
    seed: tf.Tensor, draws: int, micro_batch: Any, draws_before: Any = 0
) -> tf.Tensor:
    """Returns the seed, shape (2,), with which a micro-batch starts.

    Each draws so often, this one has drawn `draws_before`. Bits depend on the
    micro-batch, and not on cells.
    """
    steps = tf.cast(micro_batch, seed.dtype) * draws + draws_before
    return seed + tf.stack([tf.zeros_like(steps), steps])


def merged_metric(values: list[tf.Tensor], aggregation: str) -> tf.Tensor:
    """Returns a metric's value, by the last one of each replica."""
    if len(values) == 1 or aggregation not in ("sum", "mean"):
        return values[0]
    total = sum_of(values)
    if aggregation == "sum":
        return total
    return _if_equal(values, tf.cast(total / len(values), total.dtype))


def weighted_mean(
    values: list[tf.Tensor], micro_batches: MicroBatches
) -> tf.Tensor:
    """Returns the mean of micro-batches' values, weighted by rows.

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
    """Returns the value of all, where they are equal; else another one."""
    is_equal = tf.stack([value == values[-1] for value in values])
    return tf.where(tf.reduce_all(is_equal, axis=0), values[-1], otherwise)


def sum_of(values: list[tf.Tensor]) -> tf.Tensor:
    """Returns the sum, always rounded alike, which a sum by AddN is not."""
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
        seeds = self._seeds()
        saved = {key: store[key] for key in list(store.keys())}
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
