"""A model of the zoo, and what it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

ROWS = 4


class Sample(NamedTuple):
    """A published model, made small.

    Attributes:
        make: Returns a new model.
        inputs: Returns a nest of arrays of `ROWS` rows.
        is_whole: Whether the mini-batch must be one micro-batch, for numbers
            like those of Keras: with batch norm, or dropout that no argument
            turns off.
    """

    make: Callable[[], keras.Model]
    inputs: Callable[[], Any]
    is_whole: bool = False

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return 1 if self.is_whole else ROWS


def images(size: int) -> np.ndarray:
    """Random images, of shape (rows, size, size, 3)."""
    return np.random.default_rng(0).random((ROWS, size, size, 3))


def tokens(length: int = 8) -> np.ndarray:
    """Random tokens, of shape (rows, length)."""
    rng = np.random.default_rng(1)
    return rng.integers(1, 50, (ROWS, length)).astype("int32")


def ones(length: int = 8) -> np.ndarray:
    """A padding mask that masks nothing, of shape (rows, length)."""
    return np.ones((ROWS, length), "int32")
