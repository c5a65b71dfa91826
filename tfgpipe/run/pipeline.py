"""Runs a mini-batch through the cells: tasks to tensors.

The program of a step, see `schedules/program.py`, becomes one TensorFlow graph;
`chain.py` keeps its order on each device, and TensorFlow runs the devices at
the same time.

An operation is one function call: for K cells and M micro-batches the graph has
2 K M of them, and K (M - 1) more with re-materialisation. A device holds the
inputs of its cells for the micro-batches between their forward and backward
pass, one micro-batch's activations, and one sum of gradients.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
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
from tfgpipe.run.partners import run_together
from tfgpipe.run.replicas import Replicas
from tfgpipe.run.results import Results
from tfgpipe.run.state import StateFlow
from tfgpipe.run.weights import Weights
from tfgpipe.schedules import Op, Program, Remat, Schedule, fill_drain, lower


class Pipeline:
    """One mini-batch on its way through the cells.

    Made, it has traced the cells. Then come, in this order, `differentiate` if
    it trains, `lower`, `forward`, and `backward`.

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
        chain: What runs on every device.
        is_training: Whether there is a backward pass.
        program: What runs, once it is lowered.
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
        self._has_head = head is not None
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

    # -------------------------------------------------------- the operations
    def lower(self, schedule_of: Callable[[int], Schedule]) -> None:
        """Decides what runs, on which device and in which order.

        Args:
            schedule_of: Returns the schedule for a number of micro-batches:
                those of a replica.
        """
        self._cell_tasks = self._tracer.tasks(
            self._backward,
            [
                k > 0 and self._differentiates[k - 1]
                for k in range(len(self.cells))
            ],
        )
        facts = [
            own.facts(has_backward)
            for own, has_backward in zip(self._cell_tasks, self._differentiates)
        ]
        if not self._has_head:  # whatever the loss is, it keeps the outputs
            can_recompute = self._tracer.can_recompute
            facts[-1] = facts[-1]._replace(recomputes=can_recompute)
        self.program: Program = lower(
            schedule_of,
            facts,
            self._remat,
            self.replicas.counts,
            any(f.synchronizes for f in self.functions),
        )

    def forward(self) -> None:
        """Runs the operations before the first backward pass."""
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
            [k for k, trains in enumerate(self._differentiates) if trains],
        )
        in_order = self.program
        if tf.executing_eagerly():
            in_order = fill_drain(in_order)
        self._left = collections.deque(in_order.turns)
        while self._left and self._left[0][0].kind == "forward":
            self._run(self._left.popleft(), None)

    def backward(self, start: LossGradients) -> None:
        """Runs all other operations.

        Args:
            start: The gradients of the loss.
        """
        while self._left:
            self._run(self._left.popleft(), start)

    def _run(self, ops: list[Op], start: LossGradients | None) -> None:
        """Runs an operation, or those of partners together."""
        ready = [self._flow.ready(op, start) for op in ops]
        started = [one for one, _ in ready]
        if self.functions[ops[0].cell].synchronizes:
            results = run_together(self.chain, started, self.micro_batches)
        else:
            results = [
                self.chain.run(one.task, one.device, one.awaited, one.work)
                for one in started
            ]
        for (_, take), result in zip(ready, results, strict=True):
            take(result)

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
