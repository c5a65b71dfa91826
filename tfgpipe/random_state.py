"""Saves the states of random seeds, which Keras does not."""

from __future__ import annotations

import contextvars
import warnings
from typing import Any

import keras

# Whether what is loaded is a file of a `GPipe`, which has them.
is_expected: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "is_expected", default=False
)


class RandomState(keras.layers.Layer):
    """Saves the states of seed generators, which Keras does not.

    Without them a resumed run would draw the dropout masks of its first steps
    again.
    """

    def __init__(self, model: str, seeds: list[keras.Variable]):
        super().__init__(name="random_state")
        self._model = model
        self._seeds = lambda: seeds  # not tracked: the layers own them
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
