"""Compares the weights of two runs bit by bit, and what they took."""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np

from tools.report import Column, Table


@dataclasses.dataclass(frozen=True)
class Difference:
    """How two lists of arrays differ.

    Attributes:
        num_arrays: Arrays compared.
        num_values: Numbers in all of them.
        num_different: Of these, how many have other bits.
        largest: The largest absolute difference; NaN where one is NaN.
    """

    num_arrays: int
    num_values: int
    num_different: int
    largest: float

    def __str__(self) -> str:
        compared = f"{self.num_values:,} values in {self.num_arrays} weights"
        if not self.num_different:
            return f"all {compared} are bit-identical"
        return (
            f"{self.num_different:,} of {compared} differ, by up to "
            f"{self.largest:.3g}"
        )


def difference(
    first: Sequence[np.ndarray], second: Sequence[np.ndarray]
) -> Difference:
    """Compares two lists of arrays.

    Args:
        first: Arrays of floats or integers.
        second: As many, of the same shapes and dtypes.

    Returns:
        What differs.

    Raises:
        ValueError: If the lists do not correspond.
    """
    kinds = [
        [(a.shape, a.dtype.name) for a in arrays] for arrays in (first, second)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "`first` and `second` must have the same shapes and dtypes. "
            f"Received: {kinds[0]} and {kinds[1]}."
        )
    num_different, largest = 0, 0.0
    for a, b in zip(first, second, strict=True):
        num_different += np.count_nonzero(_bits(a) != _bits(b))
        if a.size:
            change = np.abs(a.astype(np.float64) - b.astype(np.float64))
            largest = float(np.maximum(largest, change.max()))
    return Difference(
        len(first), sum(a.size for a in first), num_different, largest
    )


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


class Snapshot(keras.callbacks.Callback):
    """Keeps a copy of the weights as they are after one training step.

    Args:
        step: Steps after which to copy, counted from the first of the run.
        first_step: Steps that were done before this `fit`.

    Attributes:
        weights: The copy; `None` before that step.
        seconds: The median of what steps take, but for the first; NaN of one.
    """

    def __init__(self, step: int, first_step: int = 0) -> None:
        super().__init__()
        self.step = step
        self.weights: list[np.ndarray] | None = None
        self._steps_done = first_step
        self._ends: list[float] = []

    @property
    def seconds(self) -> float:
        """See the class."""
        if len(self._ends) < 2:
            return math.nan
        return statistics.median(
            end - start for start, end in itertools.pairwise(self._ends)
        )

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Counts, and copies when it is time."""
        self._ends.append(time.monotonic())
        self._steps_done += 1
        if self._steps_done == self.step:
            self.weights = self.model.get_weights()


class Took(NamedTuple):
    """What a run took.

    Attributes:
        num_partitions: K.
        seconds: See `Snapshot`.
        memory: Bytes of each device at the peak, as predicted.
    """

    num_partitions: int
    seconds: float
    memory: Sequence[int]


def table(runs: Sequence[Took]) -> Table:
    """What runs took, a row each."""
    most = range(max(len(run.memory) for run in runs))
    return Table(
        "runs",
        "A step of each run; the memory of devices is predicted",
        [
            Column("num_partitions", "K"),
            Column("seconds", "seconds", ".3f"),
            *(Column(f"device_{i}", f"device {i}, MiB", ",.1f") for i in most),
        ],
        [
            {"num_partitions": run.num_partitions, "seconds": run.seconds}
            | {f"device_{i}": b / 2**20 for i, b in enumerate(run.memory)}
            for run in runs
        ],
    )
