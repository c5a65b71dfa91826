"""Random seeds: how they advance over micro-batches, and how they are saved.

Keras itself does not save them.
"""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe.micro_batches import MicroBatches

# Whether what is loaded is a file of a `GPipe`, which has them.
is_expected: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "is_expected", default=False
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
            if seeds and is_expected.get():
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


def advance_seed(
    seed: tf.Tensor, draws: int, micro_batch: Any, draws_before: Any = 0
) -> tf.Tensor:
    """The seed, shape (2,), with which a micro-batch starts.

    Before it came `micro_batch` others, an int or a scalar, with `draws` each,
    and `draws_before` of its own.
    """
    steps = tf.cast(micro_batch, seed.dtype) * draws + draws_before
    return seed + tf.stack([tf.zeros_like(steps), steps])


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
