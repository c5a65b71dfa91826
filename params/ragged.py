"""Rows of integers that differ in length, in one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Ragged(NamedTuple):
    """Rows of integers.

    Attributes:
        values: All rows one after the other, int32.
        starts: Where each row begins in `values`, and where the last one ends.

    Example:

    >>> rows = Ragged.of([[5, 6, 7], [8]])
    >>> rows.lengths
    array([3, 1])
    >>> rows.padded(np.array([1, 0]), width=2)
    array([[8, 0],
           [5, 6]], dtype=int32)
    """

    values: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Joins rows, of which some may be empty."""
        starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        values = np.fromiter(
            (value for row in rows for value in row), np.int32, starts[-1]
        )
        return cls(values, starts)

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row."""
        return np.diff(self.starts)

    def padded(self, rows: np.ndarray, width: int) -> np.ndarray:
        """Some rows as a matrix, cut or filled up with zeros on the right.

        Args:
            rows: Indices of the rows to take.
            width: Columns of the result.
        """
        columns = np.arange(width)
        inside = columns < self.lengths[rows, np.newaxis]
        index = np.where(inside, self.starts[rows, np.newaxis] + columns, 0)
        if not self.values.size:
            return np.zeros(index.shape, np.int32)
        return np.where(inside, self.values[index], 0).astype(np.int32)
