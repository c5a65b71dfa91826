"""What a tensor may have to do with the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfgpipe.cells.values import is_continuous


class Rows(NamedTuple):
    """Along an axis lie the rows, in order: one or more elements of each."""

    axis: int


class Mixed(NamedTuple):
    """Follows from several rows, since an operation."""

    op: tf.Operation


class Unknown(NamedTuple):
    """Follows from rows in a way that is not known."""


class Total(NamedTuple):
    """A sum over rows, times the number of rows to a power.

    A mean over rows is that of its micro-batches, weighted by their rows. So is
    what is linear in means; and a sum is not, but for one that is divided by
    the number of rows.

    Attributes:
        op: The operation that took the sum, or the number.
        power: 1 for a sum and for the number itself, 0 for a mean.
        axis: Where rows lie that are not added up; None where they are.
        is_count: Whether it is the number alone, to a power.
    """

    op: tf.Operation
    power: float
    axis: int | None = None
    is_count: bool = False

    @property
    def is_mean(self) -> bool:
        """Whether it is linear in means over all rows."""
        return not self.power and self.axis is None and not self.is_count


class Sizes(NamedTuple):
    """The shape of a tensor that has rows along an axis."""

    op: tf.Operation
    axis: int


# None: does not follow from rows.
State = Rows | Mixed | Total | Sizes | Unknown | None
States = Sequence[State]
Rule = Callable[[tf.Operation, States], State]
UNKNOWN = Unknown()
# Of integers, which are data all the same.
_COUNTS = {"Bincount", "DenseBincount"}


def is_data(state: Mixed | Total, tensor: tf.Tensor) -> bool:
    """Not a length or an index, by which nothing but a shape may follow."""
    return is_continuous(tensor) or state.op.type in _COUNTS
