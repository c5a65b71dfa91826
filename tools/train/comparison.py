"""Compares the weights of two runs bit by bit, and what they took."""

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np

from tools.report import Column, Table, columns


class Difference(NamedTuple):
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
    """Compares two lists of arrays of the same shapes and dtypes."""
    pairs = list(zip(first, second, strict=True))
    changes = [np.abs(a - b.astype(np.float64)) for a, b in pairs]
    return Difference(
        len(pairs),
        sum(a.size for a in first),
        sum(int(np.count_nonzero(_bits(a) != _bits(b))) for a, b in pairs),
        max(float(change.max(initial=0)) for change in changes),
    )


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


class Stopwatch(keras.callbacks.Callback):
    """Measures steps."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Takes the time."""
        self._ends.append(time.monotonic())

    @property
    def seconds(self) -> float:
        """The median of what steps take, but for the first; NaN of one."""
        pairs = itertools.pairwise(self._ends)
        return statistics.median([b - a for a, b in pairs] or [math.nan])


def table(runs: Sequence[tuple[int, float, Sequence[int]]]) -> Table:
    """Makes a row of each run: K, seconds, and bytes of each device."""
    most = range(max(len(memory) for _, _, memory in runs))
    return Table(
        "runs",
        "A step of each run; the memory of devices is predicted",
        [
            *columns("num_partitions: K | seconds: seconds: .3f"),
            *(Column(f"device_{i}", f"device {i}, MiB", ",.1f") for i in most),
        ],
        [
            {"num_partitions": k, "seconds": seconds}
            | {f"device_{i}": b / 2**20 for i, b in enumerate(memory)}
            for k, seconds, memory in runs
        ],
    )
