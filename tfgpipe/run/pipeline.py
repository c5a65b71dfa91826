"""Runs a mini-batch through the cells: tasks to tensors.

The program of a step, see `schedules/program.py`, becomes one TensorFlow graph;
`chain.py` keeps its order on each device, and TensorFlow runs the devices at
the same time.

An operation is one function call: for K cells and M micro-batches the graph has
2 K M of them, and K (M - 1) more with re-materialisation. A device holds the
inputs of its cells for the micro-batches between their forward and backward
pass, one micro-batch's activations, and one sum of gradients.

What each operation takes of others, and what it leaves to them:

    forward         takes the boundary before the cell   leaves the one behind
    recompute       takes that boundary again            leaves what is kept
    backward        takes dy and what is kept            leaves dx, adds to sums

Each is by cell and micro-batch (k, m), except the sums of gradients, which are
by cell and replica. What no operation needs any more is let go.

Weights have their values of one mini-batch. A variable has one owner among the
devices of its cell's column: one a replica. It is read once, there, and sent to
the others; what a cell only casts is cast before that.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe.boundary import Boundary, CellArguments, Output
from tfgpipe.cells import CellFunction
from tfgpipe.devices import names, placement
from tfgpipe.graphs import Gradient, gradient_sums
from tfgpipe.run.chain import Chain, ReadyTask, run_together
from tfgpipe.run.loss_gradients import LossGradients, counts_ahead
from tfgpipe.run.mini_batch import MiniBatch
from tfgpipe.schedules import HALVES, Op, Program
from tfgpipe.state import StateFlow


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
        batch: MiniBatch,
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
        self._flow = TaskValues(
            batch, tasks, Weights(batch.functions, tasks), self.state
        )
        self._left = collections.deque(program.turns)

    def forward(self) -> None:
        """Runs the operations before the first that needs the loss."""
        while self._left and not self._left[0][0].needs_loss:
            self._run(self._left.popleft())

    def backward(self, start: LossGradients) -> None:
        """Runs all other operations."""
        self._flow.begin_backward(start)
        while self._left:
            self._run(self._left.popleft())

    def _run(self, ops: list[Op]) -> None:
        """Runs an operation, or those of partners together."""
        ready = [self._flow.ready(op) for op in ops]
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
        return gradient_sums.of_variables(
            (
                function.device,
                function.flat_weights,
                [self._flow.sums(k, r) for r in self._batch.replicas.busy],
            )
            for k, function in enumerate(self._functions)
            if k in self._batch.trained
        )


class TaskValues:
    """Makes operations ready to run, and takes their results."""

    def __init__(
        self,
        batch: MiniBatch,
        tasks: Sequence[Any],
        weights: Weights,
        state: StateFlow,
    ):
        self._tasks = tasks
        self._batch = batch
        self._weights = weights
        self._state = state
        self._replicas = batch.replicas
        self._start: Any = None  # the gradients of the loss
        # (cell, micro-batch): what crosses into the cell, what its forward pass
        # keeps, and dx, which is the dy of the cell before; the backward pass
        # lets go of the first two. Sums of gradients are by (cell, replica).
        self._boundaries = {(0, m): own for m, own in enumerate(batch.inputs)}
        self._kept: dict[tuple[int, int], Any] = {}
        self._dy: dict[tuple[int, int], list[Any]] = {}
        self._sums: dict[tuple[int, int], Any] = {}
        # What makes an operation ready, by its kind.
        self._makers: dict[str, Callable] = {
            "forward": self._ready_forward,
            "recompute": self._ready_recompute,
            **dict.fromkeys(("backward", *HALVES), self._ready_backward),
        }

    def begin_backward(self, start: LossGradients) -> None:
        """Takes the gradients of the loss, as of a cell behind the last."""
        self._start = start
        for m, dy in enumerate(start.outputs):
            self._dy[len(self._tasks), m] = dy

    def ready(self, op: Op) -> tuple[ReadyTask, Callable[[Any], None]]:
        """An operation to be run, and what takes its results."""
        device = self._replicas.device(op.cell, op.micro_batch)
        with tf.device(device):
            awaited, work, take = self._makers[op.kind](op)
        return ReadyTask(op.task, device, awaited, work), take

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
            labels=self._batch.labels_of(k, m),
            assigned=self._state.assigned(k, m),
        )

    def _ready_forward(self, op: Op) -> tuple[list[Any], Any, Callable]:
        k, m = op.cell, op.micro_batch
        work = self._tasks[k].forward(self._arguments(k, m), op.keeps)

        def take(found: tuple[Output, Any]) -> None:
            output, kept = found
            with tf.device(self._replicas.device(k, m)):
                self._state.after(k, m, output)
                self._batch.results.add(k, m, output)
            if k in self._batch.trained:
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

    def _ready_backward(self, op: Op) -> tuple[list[Any], Any, Callable]:
        """A backward pass, or one of its halves."""
        kind, k, m = op.task
        cell, own = self._tasks[k], (k, self._replicas.of(m))
        dy = self._dy[k + 1, m]
        has_head = self._batch.functions[k].head is not None
        dlosses = self._start.of_losses(
            k, m, has_head, self._batch.micro_batches
        )
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


class Weights:
    """The values of all cells' weights, on every device that needs them.

    What a cell only casts, for every micro-batch, is cast once here.
    """

    def __init__(self, functions: Sequence[CellFunction], tasks: Sequence[Any]):
        self._functions = functions
        self._tasks = tasks
        self._values = [
            tf.nest.pack_sequence_as(
                function.weights,
                [
                    self._read(variable, dtype)
                    for variable, dtype in zip(
                        function.flat_weights, own.weight_dtypes
                    )
                ],
            )
            for function, own in zip(functions, tasks)
        ]
        self._packed: dict[tuple[int, str], Any] = {}  # (cell, device)

    def _read(self, variable: keras.Variable, dtype: Any) -> tf.Tensor:
        with tf.device(variable.value.device):
            return tf.cast(placement.read_variable(variable), dtype)

    def packed(self, k: int, device: str) -> Any:
        """The weights of cell k on a device, as its tasks take them."""
        if (k, device) not in self._packed:
            values = self._values[k]
            # Sent when the step begins, not when they are used first.
            with tf.control_dependencies(None), tf.device(device):
                values = tree.map_structure(
                    lambda variable, value: self._sent(variable, value, device),
                    self._functions[k].weights,
                    values,
                )
                self._packed[k, device] = self._tasks[k].pack_weights(values)
        return self._packed[k, device]

    def _sent(
        self, variable: keras.Variable, value: tf.Tensor, device: str
    ) -> tf.Tensor:
        """A value on the current device, which has this name."""
        if names.same_device(variable.value.device, device):
            return value
        return tf.identity(value)
