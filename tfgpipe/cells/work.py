"""A task of a cell, ready to be run, and what it leaves to later ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.cells.gradients import Gradient


class Kept(NamedTuple):
    """What later tasks of a micro-batch take of earlier ones.

    Attributes:
        totals: What was added up over replicas.
        values: What `Cut.kept` names, packed; None if it was dropped.
        crossing: What `Cut.crossing` names, packed; None before it is there.
    """

    totals: list[tf.Tensor]
    values: list[tf.Tensor] | None = None
    crossing: list[tf.Tensor] | None = None


class Work(NamedTuple):
    """A task, ready to be run: a call without arguments.

    Attributes:
        function: A `Subfunction`; for a cell that takes moments over replicas
            `Stages`, see `run/partners.py`.
        values: What it takes, by what that is of the graph.
        sums: The sums of gradients so far, packed.
        finish: Makes what the task returns of what the function does.
    """

    function: Any
    values: dict[Any, Any]
    sums: Sequence[tf.Tensor]
    finish: Callable[[list[Any]], Any]

    def __call__(self) -> Any:
        """Runs the task."""
        return self.finish(self.function(self.values, self.sums))


class Sums(NamedTuple):
    """The gradients of a cell's weights, summed so far.

    Attributes:
        dense: Those of `Cut.sums`, packed.
        sparse: For each weight, the slices of its gradient.
    """

    dense: list[tf.Tensor]
    sparse: list[Gradient]
