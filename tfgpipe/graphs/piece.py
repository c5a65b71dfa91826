"""Some columns of a weight: what one of several devices has of it."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import tensorflow as tf


class Piece(NamedTuple):
    """Some consecutive columns, along one axis.

    Attributes:
        axis: The axis, from 0.
        start: The first column.
        stop: Behind the last one.
    """

    axis: int
    start: int
    stop: int

    def of(self, value: tf.Tensor) -> tf.Tensor:
        """These columns of a whole value."""
        whole = (slice(None),) * self.axis
        return value[(*whole, slice(self.start, self.stop))]

    def in_whole(self, value: tf.Tensor, shape: Any) -> tf.Tensor:
        """A value of these columns in a whole that is 0 elsewhere."""
        sides = [(0, 0)] * len(shape)
        sides[self.axis] = (self.start, shape[self.axis] - self.stop)
        return tf.pad(value, sides)

    def shape(self, shape: Any) -> list[int]:
        """Their shape, by that of the whole."""
        found = [*shape]
        found[self.axis] = self.stop - self.start
        return found


def pieces_of(axis: int, size: int, count: int) -> list[Piece]:
    """As many pieces of about equal sizes.

    Example:

    >>> [(piece.start, piece.stop) for piece in pieces_of(1, 5, 2)]
    [(0, 2), (2, 5)]
    """
    ends = [size * i // count for i in range(count + 1)]
    return [Piece(axis, a, b) for a, b in itertools.pairwise(ends)]
