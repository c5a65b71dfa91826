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
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.cells import gradients
from tfgpipe.run.chain import Chain
from tfgpipe.run.flow import TaskFlow
from tfgpipe.run.loss_counts import counts_ahead
from tfgpipe.run.loss_gradients import LossGradients
from tfgpipe.run.partners import run_together
from tfgpipe.run.state import StateFlow
from tfgpipe.run.traced_batch import TracedBatch
from tfgpipe.run.weights import Weights
from tfgpipe.schedules import FORWARD, Op, Program


class Pipeline:
    """One mini-batch on its way through the cells: `forward`, then `backward`.

    Args:
        batch: The mini-batch, and the cells traced for it.
        tasks: What runs the tasks of each cell.
        program: What runs, in which order.
        clock: Notes when each task runs, see `clock.py`, or None.

    Attributes:
        micro_batches: How the rows fall into micro-batches.
        results: What the cells make of the mini-batch.
        program: What runs.
        state: The variables that no optimizer updates.
        chain: What runs on every device.
        is_training: Whether there is a backward pass.
    """

    def __init__(
        self,
        batch: TracedBatch,
        tasks: Sequence[Any],
        program: Program,
        clock: Any = None,
    ):
        self._batch = batch
        self._tasks = tasks
        self._functions = batch.functions
        self.micro_batches = batch.micro_batches
        self.results = batch.results
        self.is_training = batch.is_training
        self.program = program
        self.chain = Chain(clock)
        self.state = StateFlow(
            batch.functions, tasks, batch.replicas, batch.micro_batches
        )
        self._flow = TaskFlow(
            batch, tasks, Weights(batch.functions, tasks), self.state
        )
        self._left = collections.deque(program.turns)

    def forward(self) -> None:
        """Runs the operations before the first that needs the loss."""
        while self._left and self._left[0][0].kind in FORWARD:
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
        if self._functions[ops[0].cell].synchronizes:
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
            last = self.results.of(len(self._tasks) - 1)
            return [output.counts for output in last]
        return counts_ahead(
            self._functions,
            self._tasks,
            self._flow.counting,
            self._batch.replicas.device,
            self.micro_batches.count,
        )

    def assigned_variables(self) -> list[keras.Variable]:
        """Those that cells may assign."""
        found: list[keras.Variable] = []
        for k, function in enumerate(self._functions):
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
                [self._flow.sums(k, r) for r in self._batch.replicas.busy],
            )
            for k, function in enumerate(self._functions)
            if k in self._batch.trained
        )
