"""Runs a mini-batch through the cells: tasks to tensors.

The tasks of a schedule become operations of one TensorFlow graph, in an order
in which nothing comes too early. A control dependency from each task to the
next one on its device keeps the schedule's order there; between devices only
data does, and TensorFlow runs the devices at the same time.

A task is one function call, or a few where replicas take moments together: for
K cells and M micro-batches the graph has 2 K M of them, and K (M - 1) more with
re-materialisation. A device holds the inputs of its cells for the micro-batches
between their forward and backward task, one micro-batch's activations, and one
sum of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfgpipe.cells import (
    Arguments,
    Boundary,
    Cell,
    CellFunction,
    Exchange,
    MicroBatches,
    Tracer,
    gradients,
)
from tfgpipe.devices import placement
from tfgpipe.run.chain import Turns
from tfgpipe.run.order import Replicas
from tfgpipe.run.results import Results
from tfgpipe.run.seeds import Seeds
from tfgpipe.run.state import StateFlow
from tfgpipe.run.weights import Weights
from tfgpipe.schedules import Schedule, Task, fill_drain

REMAT = ("except_last", "always", "never")


class Pipeline:
    """One mini-batch on its way through the cells.

    Args:
        cells: The cells, in order.
        x: The mini-batch, a nest of tensors of shape (batch, ...).
        labels: A nest of the same rows that the head takes, or None.
        num_micro_batches: M, those of a replica.
        training: The `training` argument of the layers.
        head: Loss and metrics of a micro-batch, or None.
        remat: For each cell, which micro-batches its backward pass computes
            again.
        tracer: Makes the cells' functions.
        clock: Notes when each task runs, see `timeline.Clock`, or None.
    """

    def __init__(
        self,
        cells: list[Cell],
        x: Any,
        labels: Any,
        num_micro_batches: int,
        training: bool,
        head: Any,
        remat: list[str],
        tracer: Tracer,
        clock: Any = None,
    ):
        self.cells = cells
        x = tracer.led(x)
        devices = [cell.devices for cell in cells]
        count = len(devices[0]) * num_micro_batches
        # Rows for several devices are taken apart where they come from, and
        # those for a TPU where that need not be compiled.
        from_host = len(devices[0]) > 1 or placement.has_tpu(devices[0])
        host = "CPU:0" if from_host else None
        with tf.device(host or cells[0].device):
            self.micro_batches = MicroBatches(x, count)
            inputs = self.micro_batches.split(x)
        with tf.device(host or cells[-1].device):
            self._labels = self.micro_batches.split(labels)
        self.replicas = Replicas(devices, self.micro_batches.count)
        self._remat = remat
        self.functions = [
            CellFunction(
                cell,
                training,
                head if cell is cells[-1] else None,
                recomputes=training and remat[k] != "never",
                is_split=self.micro_batches.count > 1,
            )
            for k, cell in enumerate(cells)
        ]
        self._boundaries = {
            (0, m): Boundary.of(nest) for m, nest in enumerate(inputs)
        }
        has_weights = [any(f.weights) for f in self.functions]
        self._differentiates = [
            training and any(has_weights[: k + 1]) for k in range(len(cells))
        ]
        self.state = StateFlow(
            self.functions, self.replicas, self.micro_batches
        )
        self._weights = Weights(self.functions)
        self._tracer = tracer
        self.is_training = False
        self.tasks = tracer.cells(
            self.functions,
            x,
            [self._first_arguments(k) for k in range(len(cells))],
            [k > 0 and self._differentiates[k - 1] for k in range(len(cells))],
            self.micro_batches,
        )
        self.results = Results(
            self.tasks,
            [cell.device for cell in cells],
            self.replicas,
            self.micro_batches,
        )
        self.turns = Turns(self.replicas, self.micro_batches, clock)
        self._totals: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._kept: dict[tuple[int, int], Any] = {}
        self._dy: dict[tuple[int, int], list[Any]] = {}
        self._sums: dict[tuple[int, int], Any] = {}

    def _labels_of(self, k: int, m: int) -> Any:
        return self._labels[m] if k == len(self.cells) - 1 else None

    def _first_arguments(self, k: int) -> Arguments:
        return Arguments(
            inputs=self._boundaries[0, 0],
            weights=self._weights.values[k],
            state=self.state.initial[k],
            labels=self._labels_of(k, 0),
        )

    # ------------------------------------------------------------- the tasks
    def run(
        self, schedule_of: Callable[[int], Schedule], objective: Any = None
    ) -> None:
        """Runs all tasks of a schedule.

        Args:
            schedule_of: Returns the schedule for a number of micro-batches:
                those of a replica.
            objective: Says where the backward pass starts, see
                `objective.Objective`; None for the forward pass alone.
        """
        self.is_training = objective is not None and any(self._differentiates)
        self.replicas.plan(
            schedule_of, any(f.synchronizes for f in self.functions)
        )
        if self.is_training:
            for schedule in self.replicas.schedules.values():
                objective.check(schedule)
            self._differentiate(objective)
        self._weights.cast(self.tasks)
        groups = self.replicas.groups(
            self._keeps if self.is_training else None,
            fill_drain if tf.executing_eagerly() else None,
        )
        seeds: Seeds | None = None
        for tasks in groups:
            kind, k, _ = tasks[0]
            if kind != "forward" and not self._differentiates[k]:
                continue
            if kind != "forward" and seeds is None:
                seeds = objective.start(self)
            self.turns.together(
                {task.micro_batch: self._running(task, seeds) for task in tasks}
            )

    def _running(self, task: Task, seeds: Any) -> Exchange:
        """A task, to be run by `Turns.together`."""
        kind, k, m = task
        if kind == "forward":
            keeps = self._differentiates[k] and self._keeps(k, m)
            return self._run_forward(k, m, self.is_training and keeps)
        if kind == "recompute":
            return self._run_recompute(k, m)
        return self._run_backward(kind, k, m, seeds)

    def _differentiate(self, objective: Any) -> None:
        """Adds the backward pass to the cells, from the last to the first."""
        if tf.executing_eagerly():
            return
        has_gradient = objective.has_gradient(self)
        for k in reversed(range(len(self.cells))):
            if self._differentiates[k]:
                has_gradient = self._tracer.differentiate(
                    self.tasks[k], has_gradient
                )

    def _keeps(self, k: int, m: int) -> bool:
        """Whether a forward task keeps what the backward pass needs."""
        if self._remat[k] == "except_last":
            return self.replicas.goes_back_first(k, m)
        return self._remat[k] == "never"

    def _arguments(self, k: int, m: int) -> Arguments:
        return Arguments(
            inputs=self._boundaries[k, m],
            weights=self._weights.packed(k, self.replicas.device(k, m)),
            state=self.state.before(k, m),
            labels=self._labels_of(k, m),
            assigned=self.state.assigned(k, m),
            totals=self._totals.get((k, m), ()),
        )

    def _run_forward(self, k: int, m: int, keeps: bool) -> Exchange:
        output, totals, kept = yield from self.turns.run(
            Task("forward", k, m),
            self._boundaries[k, m].tensors,
            lambda: self.tasks[k].forward(self._arguments(k, m), keeps),
        )
        with tf.device(self.replicas.device(k, m)):
            self.state.after(k, m, output)
            self.results.add(k, m, output)
        self._totals[k, m] = totals
        if keeps:
            self._kept[k, m] = kept
        if k + 1 < len(self.cells):
            self._boundaries[k + 1, m] = Boundary(output.tensors, output.masks)

    def _run_recompute(self, k: int, m: int) -> Exchange:
        self._kept[k, m] = yield from self.turns.run(
            Task("recompute", k, m),
            [],
            lambda: self.tasks[k].recompute(self._arguments(k, m)),
        )

    def _run_backward(
        self, kind: str, k: int, m: int, seeds: Seeds
    ) -> Exchange:
        """Runs a backward task, or one of its halves."""
        cell = self.tasks[k]
        is_last = kind != "input_gradient"
        if kind != "backward" and not cell.is_split:
            if is_last:  # the first half did it all
                return
            kind, is_last = "backward", True
        own = k, self.replicas.of(m)
        dx, sums = self._dy.get((k, m), []), self._sums.get(own)
        is_end = k == len(self.cells) - 1
        dy = seeds.outputs[m] if is_end else self._dy[k + 1, m]
        with tf.device(self.replicas.device(k, m)):
            dlosses = seeds.of_losses(k, m, self.micro_batches)

        def call() -> Exchange:
            values = self._arguments(k, m), self._kept[k, m], dy, dlosses
            if kind == "input_gradient":
                return cell.input_gradient(*values)
            return getattr(cell, kind)(*values, sums, m)

        task = Task(kind, k, m)
        found = yield from self.turns.run(task, [*dy, *dlosses], call)
        if kind == "backward":
            dx, sums = found
        elif kind == "input_gradient":
            dx, more = found
            self._kept[k, m] += more
        else:
            sums = found
        self._dy[k, m], self._sums[own] = dx, sums
        if is_last:
            del self._kept[k, m], self._boundaries[k, m]

    # ------------------------------------------------------------ the results
    def head_counts(self) -> list[list[tf.Tensor]]:
        """What each micro-batch's losses count, see `Results`."""
        return self.results.head_counts(
            lambda k, m: Arguments(
                inputs=self._boundaries.get((k, m), Boundary([], [])),
                weights=self._weights.packed(k, self.replicas.device(k, m)),
                state=self.state.values(k, m),
                labels=self._labels_of(k, m),
                assigned=self.state.assigned(k, m),
            )
        )

    def gradients(self) -> dict[int, Any]:
        """The gradient of every trainable variable, by its id."""
        return gradients.of_variables(
            (
                function.device,
                function.flat_weights,
                [self._finished_sums(k, r) for r in self.replicas.busy],
            )
            for k, function in enumerate(self.functions)
            if self._differentiates[k]
        )

    def _finished_sums(self, k: int, r: int) -> list[Any]:
        """What cell k has added up in replica r."""
        with tf.device(self.replicas.device_in(r, k)):
            return self.tasks[k].unpack_sums(self._sums[k, r])
