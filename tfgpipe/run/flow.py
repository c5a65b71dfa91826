"""What each task takes of others, and what it leaves to them.

    forward         takes the boundary before the cell   leaves the one behind
    recompute       takes that boundary again            leaves what is kept
    backward        takes dy and what is kept            leaves dx, adds to sums

Each is by cell and micro-batch (k, m), but for the sums of gradients, which are
by cell and replica. What no task needs any more is let go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells import (
    Boundary,
    CellArguments,
    Gradient,
    MicroBatches,
    Output,
)
from tfgpipe.run.loss_gradients import LossGradients
from tfgpipe.run.order import Replicas
from tfgpipe.run.partners import Started
from tfgpipe.run.results import Results
from tfgpipe.run.state import StateFlow
from tfgpipe.run.weights import Weights
from tfgpipe.schedules import Task


class TaskFlow:
    """Makes tasks ready to run, and takes their results.

    Args:
        tasks: What runs the tasks of each cell.
        inputs: What crosses into the first cell, by micro-batch.
        labels: What the head takes, by micro-batch.
        weights: The values of the trainable variables.
        state: The variables that no optimizer updates.
        results: Takes what the cells make of the mini-batch.
        replicas: Where cells compute micro-batches.
        micro_batches: How the rows fall into micro-batches.
        keeps: For (k, m), whether the forward task keeps what the backward
            pass needs; returns None where there is no backward task.
    """

    def __init__(
        self,
        tasks: Sequence[Any],
        inputs: Sequence[Boundary],
        labels: Sequence[Any],
        weights: Weights,
        state: StateFlow,
        results: Results,
        replicas: Replicas,
        micro_batches: MicroBatches,
        keeps: Callable[[int, int], bool | None],
    ):
        self._tasks = tasks
        self._labels = labels
        self._weights = weights
        self._state = state
        self._results = results
        self._replicas = replicas
        self._micro_batches = micro_batches
        self._keeps = keeps
        self._boundaries = {(0, m): own for m, own in enumerate(inputs)}
        self._kept: dict[tuple[int, int], Any] = {}
        self._dy: dict[tuple[int, int], list[Any]] = {}
        self._sums: dict[tuple[int, int], Any] = {}

    def ready(
        self, task: Task, start: LossGradients | None
    ) -> tuple[Started | None, Callable[[Any], None]]:
        """A task to be run, and what takes its results; None for no task."""
        kind, k, m = task
        device = self._replicas.device(k, m)
        with tf.device(device):
            if kind == "forward":
                awaited, work, take = self._ready_forward(k, m)
            elif kind == "recompute":
                awaited, work, take = self._ready_recompute(k, m)
            elif start is not None:
                kind, awaited, work, take = self._ready_backward(
                    kind, k, m, start
                )
        if work is None:
            return None, take
        return Started(task._replace(kind=kind), device, awaited, work), take

    def _arguments(self, k: int, m: int) -> CellArguments:
        return self._given(
            k, m, self._boundaries[k, m], self._state.before(k, m)
        )

    def counting(self, k: int, m: int) -> CellArguments:
        """What cell k takes, as far as it is known when nothing has run."""
        inputs = self._boundaries.get((k, m), Boundary([], []))
        return self._given(k, m, inputs, self._state.values(k, m))

    def _given(
        self, k: int, m: int, inputs: Boundary, state: list[tf.Tensor]
    ) -> CellArguments:
        return CellArguments(
            inputs=inputs,
            weights=self._weights.packed(k, self._replicas.device(k, m)),
            state=state,
            labels=self._labels[m] if k == len(self._tasks) - 1 else None,
            assigned=self._state.assigned(k, m),
        )

    def _ready_forward(self, k: int, m: int) -> tuple[list[Any], Any, Callable]:
        keeps = self._keeps(k, m)
        work = self._tasks[k].forward(self._arguments(k, m), bool(keeps))

        def take(found: tuple[Output, Any]) -> None:
            output, kept = found
            with tf.device(self._replicas.device(k, m)):
                self._state.after(k, m, output)
                self._results.add(k, m, output)
            if keeps is not None:
                self._kept[k, m] = kept
            if k + 1 < len(self._tasks):
                outputs = Boundary(output.tensors, output.masks)
                self._boundaries[k + 1, m] = outputs

        boundary = self._boundaries[k, m]
        return [*boundary.tensors, *boundary.masks], work, take

    def _ready_recompute(
        self, k: int, m: int
    ) -> tuple[list[Any], Any, Callable]:
        work = self._tasks[k].recompute(self._arguments(k, m), self._kept[k, m])

        def take(kept: Any) -> None:
            self._kept[k, m] = kept

        return [], work, take

    def _ready_backward(
        self, kind: str, k: int, m: int, start: LossGradients
    ) -> tuple[str, list[Any], Any, Callable]:
        """A backward task, or one of its halves."""
        cell, own = self._tasks[k], (k, self._replicas.of(m))
        if kind != "backward" and not cell.is_split:
            # All in one, in the place of the half that is waited for.
            if (kind == "input_gradient") != cell.needs_dx:
                return kind, [], None, _nothing
            kind = "backward"
        is_end = k == len(self._tasks) - 1
        dy = start.outputs[m] if is_end else self._dy[k + 1, m]
        dlosses = start.of_losses(k, m, self._micro_batches)
        given = self._arguments(k, m), self._kept[k, m], dy, dlosses
        sums = self._sums.get(own)

        def take(found: Any) -> None:
            if kind == "input_gradient":
                self._dy[k, m], self._kept[k, m] = found
                return
            if kind == "backward":
                self._dy[k, m], found = found
            self._sums[own] = found
            del self._kept[k, m], self._boundaries[k, m]

        if kind == "input_gradient":
            work = cell.input_gradient(*given)
        elif kind == "weight_gradient":
            work = cell.weight_gradient(*given, sums, m)
        else:
            work = cell.backward(*given, sums, m)
        return kind, [*dy, *dlosses], work, take

    def sums(self, k: int, r: int) -> list[Gradient]:
        """What cell k has added up in replica r."""
        with tf.device(self._replicas.device_in(r, k)):
            return self._tasks[k].unpack_sums(self._sums[k, r])


def _nothing(_: Any) -> None:
    """Takes no results."""
