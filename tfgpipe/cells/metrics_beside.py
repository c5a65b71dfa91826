"""The tasks of the last cell, where its metrics are computed beside them.

What waits for a function waits for all of it. Metrics may take long, above all
where an accelerator has no kernel for them, so that the host computes them: for
integers, say, as in the accuracy of classes. Nothing but the end of the step
needs them, so they are a function of their own:

    forward ----+--> backward ----> ...
                |
                +--> metrics        beside what the device runs next
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from tfgpipe.cells.tasks import CellTasks, KeptValues, TaskCall
from tfgpipe.failures import out_of_turn
from tfgpipe.graphs import CellFunctions, Part


class TasksBesideMetrics(CellTasks):
    """Makes the tasks of a cell, and its metrics apart.

    Args:
        part: Of the model's graph.
        functions: What is cut out, of this part or of an equal one.
        metric_state: The ids of the metrics' variables.
    """

    def __init__(
        self,
        part: Part,
        functions: CellFunctions,
        metric_state: Collection[int],
    ):
        super().__init__(part, functions)
        self._state = {
            t.ref() for v, t in part.traced.state if id(v) in metric_state
        }
        new = part.traced.new_state
        made = {t.ref() for v, t in new if id(v) in metric_state}
        results = [one for one in self._gives if one[0].ref() not in made]
        metrics = [one for one in self._gives if one[0].ref() in made]
        self._metrics = metrics if results else []
        if self._metrics:
            self._gives = results
            self._shows = functions.taken_by(
                [first for _, first in metrics], [t for _, t in results]
            )

    @property
    def awaits(self) -> list[tf.Tensor]:
        """See `CellTasks`."""
        own = super().awaits
        if not self._metrics:
            return own
        return [t for t in own if t.ref() not in self._state]

    def metrics(
        self, values: Mapping[Any, Any], weights: Any, kept: KeptValues
    ) -> TaskCall | None:
        """See `CellTasks`."""
        if not self._metrics:
            return None
        with out_of_turn():  # it runs while the device runs other functions
            function = self.functions.function(
                "metrics", self._shows, [first for _, first in self._metrics]
            )

        def finish(results: list[Any]) -> dict[Any, Any]:
            return {t.ref(): r for (t, _), r in zip(self._metrics, results)}

        return TaskCall(
            function, self.values(values, weights, kept), (), finish
        )
