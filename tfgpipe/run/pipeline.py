"""Runs a mini-batch through the cells: tasks to tensors.

The program of a step, see `schedules/program.py`, becomes one TensorFlow graph;
`chain.py` keeps its order on each device, and TensorFlow runs the devices at
the same time.

An operation is one function call: for K cells and M micro-batches the graph has
2 K M of them, and K (M - 1) more with re-materialisation. A device holds the
inputs of its cells for the micro-batches between their forward and backward
pass, one micro-batch's activations, and one sum of gradients.

What each operation takes of others, and what it leaves to them:

    forward         takes what earlier cells give        gives to later ones
    recompute       takes the same again                 leaves what is kept
    backward        takes what later cells give back,    gives to earlier ones,
                    and what is kept                     adds to sums
    head            takes what earlier cells give        both
    metrics         beside these, where they may take longer: the last cell's
    offload, fetch  take what is kept                    leave it elsewhere

All this is one list, `MiniBatch.values`: by micro-batch, values of tensors of
the model's graph. It begins with inputs and labels; `StateFlow.start` adds the
state, `LossGradients` the gradients of the loss, and each task its results.
What is kept is by cell and micro-batch, the sums of gradients by cell and
replica.

Weights have their values of one mini-batch, see `transfers.py`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells import CellTasks
from tfgpipe.graphs import Gradient, Values, gradient_sums
from tfgpipe.run.chain import (
    Beside,
    Chain,
    ReadyTask,
    run_independently,
    run_together,
)
from tfgpipe.run.loss_gradients import LossGradients, counts_ahead
from tfgpipe.run.mini_batch import MiniBatch
from tfgpipe.run.transfers import Offloads, Weights
from tfgpipe.schedules import HALVES, KINDS, Op, Program
from tfgpipe.state import StateFlow


class Pipeline:
    """One mini-batch on its way through the cells: `forward`, then `backward`.

    Args:
        batch: The mini-batch, and the model traced for it.
        tasks: What runs the tasks of each cell.
        program: What runs, in which order.
        clock: Notes when each task runs, see `clock.py`, or None.

    Attributes:
        tasks: What runs the tasks of each cell.
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
        tasks: Sequence[CellTasks],
        program: Program,
        clock: Any = None,
    ):
        self._batch = batch
        self.tasks = tasks
        self.micro_batches = batch.micro_batches
        self.results = batch.results
        self.is_training = batch.is_training
        self.program = program
        self.chain = Chain(clock)
        self.state = StateFlow(
            batch.traced,
            [cell.part for cell in tasks],
            {id(v) for v in batch.call.metric_state},
            batch.replicas,
            batch.micro_batches,
            batch.synchronizes,
        )
        weights = Weights(batch, tasks, self.chain)
        self._flow = TaskFlow(batch, tasks, weights, self.state)
        self._left = collections.deque(program.turns)

    @property
    def is_compiled(self) -> bool:
        """Is true if XLA compiles the tasks."""
        return self._batch.traced.options.jit_compile

    def forward(self) -> None:
        """Runs the operations before the first that needs the loss."""
        while self._left and not self._left[0][0].is_backward:
            self._run(self._left.popleft())

    def backward(self, start: LossGradients) -> None:
        """Runs all other operations."""
        self._flow.begin_backward(start)
        while self._left:
            self._run(self._left.popleft())

    def assign_state(self) -> None:
        """Assigns what no optimizer updates, when it is known; once."""
        self.state.assign(self.results.values)

    def _run(self, ops: list[Op]) -> None:
        """Runs an operation, or the operations of partners together."""
        ready = [self._flow.ready(op) for op in ops]
        started = [one for one, _ in ready]
        if KINDS[ops[0].kind].lane != "compute":
            results = [
                self.chain.run_beside(
                    one.beside.caller if one.beside else one.device, one.work
                )
                for one in started
            ]
        elif self._batch.synchronizes(ops[0].cell):
            results = run_together(self.chain, started, self.micro_batches)
        else:
            results = [self.chain.run(*one) for one in started]
        for (_, take), result in zip(ready, results, strict=True):
            take(result)

    # ------------------------------------------------------------ the results
    def counts(self) -> list[list[tf.Tensor]]:
        """Returns what the losses of each micro-batch count, scalars."""
        if self.results.are_complete:
            return self.results.counts()
        return counts_ahead(
            self._batch.traced,
            self.tasks,
            self._flow.counting,
            self._batch.replicas.device,
            self.micro_batches.count,
        )

    def gradients(self) -> dict[int, Any]:
        """The gradient of every trainable variable, by its id.

        A tensor of the variable's shape, `tf.IndexedSlices`, or None.
        """
        trained = self._batch.trained(self.tasks)
        return gradient_sums.of_variables(
            (
                self._batch.cells[k].stores[0],
                self.tasks[k].part.uses,
                [self._flow.sums(k, r) for r in self._batch.replicas.busy],
            )
            for k in trained
        )


class TaskFlow:
    """Makes operations ready to run, and takes their results."""

    def __init__(
        self,
        batch: MiniBatch,
        tasks: Sequence[CellTasks],
        weights: Weights,
        state: StateFlow,
    ):
        self._tasks = tasks
        self._batch = batch
        self._weights = weights
        self._state = state
        self._replicas = batch.replicas
        # By micro-batch: values by the references of tensors of the graph.
        self._values = batch.results.values
        # (cell, micro-batch): what its forward pass keeps.
        self._kept: dict[tuple[int, int], Any] = {}
        self._sums: dict[tuple[int, int], Any] = {}  # (cell, replica)
        # Likewise: what computes metrics, of one micro-batch after the other.
        self._beside: dict[tuple[int, int], list[Any]] = (
            collections.defaultdict(list)
        )
        self._trained = set(batch.trained(tasks))
        offloads = Offloads(batch, self._kept)
        # What makes an operation ready, by its kind.
        self._makers: dict[str, Callable] = {
            "forward": self._ready_forward,
            "recompute": self._ready_recompute,
            **dict.fromkeys(("backward", *HALVES), self._ready_backward),
            "head": self._ready_head,
            "offload": offloads.ready,
            "fetch": offloads.ready_back,
        }

    def begin_backward(self, start: LossGradients) -> None:
        """Takes the gradients of the loss."""
        made = self._tasks[0].part.made
        for m, values in enumerate(self._values):
            known = start.for_micro_batch(m, self._batch.micro_batches, made)
            values.update(known)

    def ready(self, op: Op) -> tuple[ReadyTask, Callable[[Any], None]]:
        """An operation to be run, and what takes its results."""
        device = self._replicas.device(op.cell, op.micro_batch)
        with tf.device(device):
            awaited, work, take = self._makers[op.kind](op)
        cell, beside = self._batch.cells[op.cell], None
        if cell.shards is not None and cell.is_beside:
            r = self._replicas.replica_of(op.micro_batch)
            beside = Beside(cell.callers[r], cell.shards.start)
        # So at most two micro-batches hold outputs for their metrics.
        before = [] if op.kind != "forward" else self._metrics_before(op)
        return ReadyTask(op.task, device, awaited, work, beside, before), take

    def _metrics_before(self, op: Op) -> list[Any]:
        replica = self._replicas.replica_of(op.micro_batch)
        return self._beside[op.cell, replica][-2:-1]

    def counting(self, k: int, m: int) -> tuple[Values, Any]:
        """Values that cell k takes, as far as they are known by now."""
        values = dict(self._values[m])
        self._state.start(self._tasks[k].part, m, values)
        return values, self._packed(k, m)

    def _packed(self, k: int, m: int) -> Any:
        return self._weights.packed(k, self._replicas.device(k, m))

    def _ready_forward(self, op: Op) -> tuple[list[Any], Any, Callable]:
        k, m = op.cell, op.micro_batch
        cell, values = self._tasks[k], self._values[m]
        part = cell.part
        self._state.start(part, m, values)
        packed = self._packed(k, m)
        work = cell.forward(values, packed, op.keeps)
        beside = self._beside[k, self._replicas.replica_of(m)]

        def take(results: tuple[Values, Any]) -> None:
            outputs, kept = results
            with tf.device(self._replicas.device(k, m)):
                self._batch.results.add(m, outputs)
                metrics = cell.metrics(values, packed, kept)
                if metrics is not None:
                    made = metrics()
                    self._batch.results.add(m, made)
                    beside.append(run_independently(made))
                self._state.after(part, m, values)
            if k in self._trained:
                self._kept[k, m] = kept

        return [values[t.ref()] for t in cell.awaits], work, take

    def _ready_recompute(self, op: Op) -> tuple[list[Any], Any, Callable]:
        k, m = op.cell, op.micro_batch
        work = self._tasks[k].recompute(
            self._values[m], self._packed(k, m), self._kept[k, m]
        )

        def take(kept: Any) -> None:
            self._kept[k, m] = kept

        return [], work, take

    def _ready_backward(self, op: Op) -> tuple[list[Any], Any, Callable]:
        """A backward pass, or one of its halves."""
        kind, k, m = op.task
        cell, values = self._tasks[k], self._values[m]
        of_replica = k, self._replicas.replica_of(m)
        self._state.start(cell.part, m, values)
        given = values, self._packed(k, m), self._kept[k, m]
        sums = self._sums.get(of_replica)

        def take_halfway(results: Any) -> None:
            dx, self._kept[k, m] = results
            values.update(dx)

        def take(results: Any) -> None:
            dx, self._sums[of_replica] = results
            values.update(dx)
            del self._kept[k, m]

        awaited = [values[t.ref()] for t in cell.part.gradient_inputs]
        if kind == "input_gradient":
            return awaited, cell.input_gradient(*given), take_halfway
        with_dx = kind == "backward"
        return awaited, cell.backward(*given, sums, m, with_dx), take

    def _ready_head(self, op: Op) -> tuple[list[Any], Any, Callable]:
        k, m = op.cell, op.micro_batch
        cell: Any = self._tasks[k]
        values, of_replica = self._values[m], (k, self._replicas.replica_of(m))
        self._state.start(cell.part, m, values)
        awaited = [values[t.ref()] for t in cell.part.forward_inputs]
        sums = self._sums.get(of_replica)
        work = cell.head(values, self._packed(k, m), sums, m)

        def take(results: tuple[Values, Any]) -> None:
            outputs, self._sums[of_replica] = results
            with tf.device(self._replicas.device(k, m)):
                self._batch.results.add(m, outputs)
                self._state.after(cell.part, m, values)

        return awaited, work, take

    def sums(self, k: int, r: int) -> list[Gradient]:
        """Returns the sums of cell k in replica r, where its weights are."""
        cell = self._batch.cells[k]
        with tf.device(cell.store_of(self._replicas.device_in(r, k))):
            return self._tasks[k].unpack_sums(self._sums[k, r])
