"""What each operation takes of others, and what it leaves to them.

    forward         takes the boundary before the cell   leaves the one behind
    recompute       takes that boundary again            leaves what is kept
    backward        takes dy and what is kept            leaves dx, adds to sums

Each is by cell and micro-batch (k, m), except the sums of gradients, which are
by cell and replica. What no operation needs any more is let go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from tfgpipe.cells import (
    Boundary,
    CellArguments,
    Gradient,
    Output,
)
from tfgpipe.run.loss_gradients import LossGradients
from tfgpipe.run.partners import Started
from tfgpipe.run.state import StateFlow
from tfgpipe.run.traced_batch import TracedBatch
from tfgpipe.run.weights import Weights
from tfgpipe.schedules import Op


class TaskFlow:
    """Makes operations ready to run, and takes their results.

    Args:
        batch: The mini-batch.
        tasks: What runs the tasks of each cell.
        weights: The values of the trainable variables.
        state: The variables that no optimizer updates.
    """

    def __init__(
        self,
        batch: TracedBatch,
        tasks: Sequence[Any],
        weights: Weights,
        state: StateFlow,
    ):
        self._tasks = tasks
        self._labels = batch.labels
        self._weights = weights
        self._state = state
        self._results = batch.results
        self._replicas = batch.replicas
        self._micro_batches = batch.micro_batches
        self._trained = batch.trained
        self._boundaries = {(0, m): own for m, own in enumerate(batch.inputs)}
        self._kept: dict[tuple[int, int], Any] = {}
        self._dy: dict[tuple[int, int], list[Any]] = {}
        self._sums: dict[tuple[int, int], Any] = {}

    def ready(
        self, op: Op, start: LossGradients | None
    ) -> tuple[Started, Callable[[Any], None]]:
        """An operation to be run, and what takes its results.

        Args:
            op: The operation.
            start: The gradients of the loss, once they are known.
        """
        device = self._replicas.device(op.cell, op.micro_batch)
        with tf.device(device):
            if op.kind == "forward":
                awaited, work, take = self._ready_forward(op)
            elif op.kind == "recompute":
                awaited, work, take = self._ready_recompute(op)
            else:
                awaited, work, take = self._ready_backward(
                    op, cast(LossGradients, start)
                )
        return Started(op.task, device, awaited, work), take

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

    def _ready_forward(self, op: Op) -> tuple[list[Any], Any, Callable]:
        k, m = op.cell, op.micro_batch
        work = self._tasks[k].forward(self._arguments(k, m), op.keeps)

        def take(found: tuple[Output, Any]) -> None:
            output, kept = found
            with tf.device(self._replicas.device(k, m)):
                self._state.after(k, m, output)
                self._results.add(k, m, output)
            if k in self._trained:
                self._kept[k, m] = kept
            if k + 1 < len(self._tasks):
                outputs = Boundary(output.tensors, output.masks)
                self._boundaries[k + 1, m] = outputs

        boundary = self._boundaries[k, m]
        return [*boundary.tensors, *boundary.masks], work, take

    def _ready_recompute(self, op: Op) -> tuple[list[Any], Any, Callable]:
        k, m = op.cell, op.micro_batch
        work = self._tasks[k].recompute(self._arguments(k, m), self._kept[k, m])

        def take(kept: Any) -> None:
            self._kept[k, m] = kept

        return [], work, take

    def _ready_backward(
        self, op: Op, start: LossGradients
    ) -> tuple[list[Any], Any, Callable]:
        """A backward pass, or one of its halves."""
        kind, k, m = op.task
        cell, own = self._tasks[k], (k, self._replicas.of(m))
        is_end = k == len(self._tasks) - 1
        dy = start.outputs[m] if is_end else self._dy[k + 1, m]
        dlosses = start.of_losses(k, m, self._micro_batches)
        given = self._arguments(k, m), self._kept[k, m], dy, dlosses
        sums = self._sums.get(own)

        def take_halfway(found: Any) -> None:
            self._dy[k, m], self._kept[k, m] = found

        def take(found: Any) -> None:
            if kind == "backward":
                self._dy[k, m], found = found
            self._sums[own] = found
            del self._kept[k, m], self._boundaries[k, m]

        if kind == "input_gradient":
            work = cell.input_gradient(*given)
            return [*dy, *dlosses], work, take_halfway
        summed = cell.backward if kind == "backward" else cell.weight_gradient
        return [*dy, *dlosses], summed(*given, sums, m), take

    def sums(self, k: int, r: int) -> list[Gradient]:
        """What cell k has added up in replica r."""
        with tf.device(self._replicas.device_in(r, k)):
            return self._tasks[k].unpack_sums(self._sums[k, r])
