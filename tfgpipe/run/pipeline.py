"""Runs a mini-batch through the cells: tasks to tensors.

The tasks of a schedule become operations of one TensorFlow graph, in an order
in which nothing comes too early; `chain.py` keeps the schedule's order on each
device, and TensorFlow runs the devices at the same time.

A task is one function call: for K cells and M micro-batches the graph has 2 K M
of them, and K (M - 1) more with re-materialisation. A device holds the inputs
of its cells for the micro-batches between their forward and backward task, one
micro-batch's activations, and one sum of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.cells import (
    Boundary,
    Cell,
    CellArguments,
    CellFunction,
    MicroBatches,
    gradients,
)
from tfgpipe.devices import placement
from tfgpipe.run.chain import Chain
from tfgpipe.run.flow import TaskFlow
from tfgpipe.run.loss_counts import counts_ahead
from tfgpipe.run.loss_gradients import LossGradients
from tfgpipe.run.order import Replicas
from tfgpipe.run.partners import run_together
from tfgpipe.run.results import Results
from tfgpipe.run.state import StateFlow
from tfgpipe.run.weights import Weights
from tfgpipe.schedules import Remat, Schedule, Task, fill_drain


class Pipeline:
    """One mini-batch on its way through the cells.

    Made, it has traced the cells. Then come, in this order, `plan`,
    `differentiate` if it trains, `forward`, and `backward`.

    Args:
        cells: The cells, in order.
        x: The mini-batch, a nest of tensors of shape (batch, ...).
        labels: A nest of the same rows that the head takes, or None.
        num_micro_batches: M, those of a replica.
        training: The `training` argument of the layers.
        head: Loss and metrics of a micro-batch, or None.
        remat: Which micro-batches are computed again.
        tracer: Makes the cells' functions: `Tracer`, or `EagerTracer`.
        clock: Notes when each task runs, see `clock.py`, or None.

    Attributes:
        cells: The cells.
        micro_batches: How the rows fall into micro-batches.
        results: What the cells make of the mini-batch.
        state: The variables that no optimizer updates.
        chain: The tasks of every device.
        is_training: Whether there is a backward pass.
    """

    def __init__(
        self,
        cells: list[Cell],
        x: Any,
        labels: Any,
        num_micro_batches: int,
        training: bool,
        head: Any,
        remat: Remat,
        tracer: Any,
        clock: Any = None,
    ):
        self.cells = cells
        self._tracer = tracer
        self._remat = remat
        x = self._split(tracer.led(x), labels, num_micro_batches)
        self.functions = [
            CellFunction(
                cell,
                training,
                head if cell is cells[-1] else None,
                recomputes=training and remat.recomputes(k),
                is_split=self.micro_batches.count > 1,
            )
            for k, cell in enumerate(cells)
        ]
        has_weights = [any(f.weights) for f in self.functions]
        self._differentiates = [
            training and any(has_weights[: k + 1]) for k in range(len(cells))
        ]
        self.is_training = any(self._differentiates)
        self._traced = tracer.trace(
            self.functions,
            x,
            [self._specs(k) for k in range(len(cells))],
            self.micro_batches.spec,
        )
        self._backward = tracer.differentiate(
            self._traced, [False] * len(cells), []
        )
        self.results = Results(
            self._traced, [cell.device for cell in cells], self.micro_batches
        )
        self.chain = Chain(clock)
        self._left: list[list[Task]] = []

    def _split(self, x: Any, labels: Any, num_micro_batches: int) -> Any:
        """Takes the rows of micro-batches; returns the mini-batch."""
        grid = list(zip(*(cell.devices for cell in self.cells)))
        # Rows for several devices are taken apart where they come from, and
        # those for a TPU where that need not be compiled.
        first = self.cells[0].devices
        from_host = len(first) > 1 or placement.only_compiles(first)
        host = "CPU:0" if from_host else None
        with tf.device(host or self.cells[0].device):
            count = len(grid) * num_micro_batches
            self.micro_batches = MicroBatches(x, count)
            inputs = self.micro_batches.split(x)
        with tf.device(host or self.cells[-1].device):
            self._labels = self.micro_batches.split(labels)
        self._inputs = [Boundary.of(nest) for nest in inputs]
        self.replicas = Replicas(grid, self.micro_batches.count)
        return x

    def _specs(self, k: int) -> CellArguments:
        """What cell k is traced for; of inputs, those of the first cell."""

        def exact(variable: Any) -> tf.TensorSpec:
            return tf.TensorSpec(variable.shape, variable.value.dtype)

        function = self.functions[k]
        return CellArguments(
            inputs=self._inputs[0],
            weights=[[exact(v) for v in own] for own in function.weights],
            state=[exact(v) for v in function.state],
            labels=self._labels[0] if k == len(self.cells) - 1 else None,
        ).specs(self.micro_batches.spec)

    def differentiate(
        self,
        has_gradient: Sequence[bool],
        has_losses: Sequence[Sequence[bool]],
    ) -> None:
        """Adds the backward pass to the cells.

        Args:
            has_gradient: For each output tensor, whether there will be a
                gradient.
            has_losses: For each cell, whether there will be one of each of
                its layers' own losses.
        """
        self._backward = self._tracer.differentiate(
            self._traced, self._differentiates, has_gradient, has_losses
        )

    # ------------------------------------------------------------- the tasks
    def plan(self, schedule_of: Callable[[int], Schedule]) -> None:
        """Takes the order of the tasks.

        Args:
            schedule_of: Returns the schedule for a number of micro-batches:
                those of a replica.
        """
        self.replicas.plan(
            schedule_of, any(f.synchronizes for f in self.functions)
        )

    @property
    def schedules(self) -> Iterable[Schedule]:
        """Those of the replicas."""
        return self.replicas.schedules.values()

    def forward(self) -> None:
        """Runs the tasks before the first backward task."""
        self._cell_tasks = self._tracer.tasks(
            self._backward,
            [
                k > 0 and self._differentiates[k - 1]
                for k in range(len(self.cells))
            ],
        )
        self.state = StateFlow(
            self.functions, self._cell_tasks, self.replicas, self.micro_batches
        )
        self._flow = TaskFlow(
            self._cell_tasks,
            self._inputs,
            self._labels,
            Weights(self.functions, self._cell_tasks),
            self.state,
            self.results,
            self.replicas,
            self.micro_batches,
            self._keeps_what_is_needed,
        )
        groups = self.replicas.groups(
            self._keeps if self.is_training else None,
            fill_drain if tf.executing_eagerly() else None,
        )
        self._left = [
            group
            for group in groups
            if group[0].kind == "forward" or self._differentiates[group[0].cell]
        ]
        while self._left and self._left[0][0].kind == "forward":
            self._run(self._left.pop(0), None)

    def backward(self, start: LossGradients) -> None:
        """Runs all other tasks.

        Args:
            start: The gradients of the loss.
        """
        while self._left:
            self._run(self._left.pop(0), start)

    def _run(self, group: list[Task], start: LossGradients | None) -> None:
        """Runs a task, or those of partners together."""
        ready = [self._flow.ready(task, start) for task in group]
        started = [one for one, _ in ready if one is not None]
        if not started:
            return
        if self.functions[group[0].cell].synchronizes:
            results = run_together(self.chain, started, self.micro_batches)
        else:
            results = [
                self.chain.run(one.task, one.device, one.awaited, one.work)
                for one in started
            ]
        for (_, take), result in zip(ready, results, strict=True):
            take(result)

    def _keeps_what_is_needed(self, k: int, m: int) -> bool | None:
        """As `_keeps`; None where there is no backward task."""
        has_backward = self.is_training and self._differentiates[k]
        return self._keeps(k, m) if has_backward else None

    def _keeps(self, k: int, m: int) -> bool:
        """Whether a forward task keeps what the backward pass needs."""
        return self._remat.keeps(k, self.replicas.goes_back_first(k, m))

    # ------------------------------------------------------------ the results
    def counts(self) -> list[list[tf.Tensor]]:
        """What the losses of each micro-batch count, scalars."""
        if self.results.are_complete:
            last = self.results.of(len(self.cells) - 1)
            return [output.counts for output in last]
        return counts_ahead(
            self.functions,
            self._cell_tasks,
            self._flow.counting,
            self.replicas.device,
            self.micro_batches.count,
        )

    def assigned_variables(self) -> list[keras.Variable]:
        """Those that cells may assign."""
        found: list[keras.Variable] = []
        for k, function in enumerate(self.functions):
            new = self.results.assigned_weights(k)
            pairs = zip(function.flat_weights, new, strict=True)
            found += function.state
            found += [v for v, value in pairs if value is not None]
        return found

    def gradients(self) -> dict[int, Any]:
        """The gradient of every trainable variable, by its id.

        A tensor of the variable's shape, `tf.IndexedSlices`, or None.
        """
        return gradients.of_variables(
            (
                function.device,
                function.flat_weights,
                [self._flow.sums(k, r) for r in self.replicas.busy],
            )
            for k, function in enumerate(self.functions)
            if self._differentiates[k]
        )
