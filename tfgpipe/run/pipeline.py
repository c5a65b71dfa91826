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
replica. Weights have their values of one mini-batch.

The counts of losses are known before the losses. A loss that is added up is
divided by a number of rows, unmasked positions or weights. It rarely depends on
what the layers compute: a function cut out of each cell computes nothing but
what the numbers follow from, so that a backward pass can start before the last
forward pass has ended. Where they do depend on it, that is computed twice.

A variable has one owner among the devices of its cell's column: one a replica.
It is read once, there, and sent to the others; what a cell only casts is cast
before that. If weights are on the host, they are read and sent again where a
device comes back to a cell:

    host       w0 -------> w2 ----------> w0 ...      w2 is sent after the first
    device     F0 of cell 0, F1, F2 | F0 of cell 2    F2 has begun

Shards of a layer get their columns once, when the step begins.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.cells import CellTasks
from tfgpipe.devices import names, placement
from tfgpipe.graphs import (
    GradientSums,
    Values,
    by_reference,
    gradient_sums,
)
from tfgpipe.run.chain import Chain, run_independently, send
from tfgpipe.run.clock import Clock
from tfgpipe.run.mini_batch import MiniBatch
from tfgpipe.schedules import KINDS, Op, Program
from tfgpipe.state import StateFlow, Use


class LossGradients(NamedTuple):
    """Where the backward pass starts: gradients of the loss.

    Attributes:
        outputs: For each micro-batch, with respect to the flat outputs: of the
            shape of an output each, or None.
        head: With respect to the head's losses, scalars, the same for every
            micro-batch; [] without a head.
        extra: With respect to each of the layers' own losses, scalars, or
            None.
    """

    outputs: Sequence[Sequence[tf.Tensor | None]]
    head: list[tf.Tensor]
    extra: Sequence[tf.Tensor | None]


class Pipeline:
    """One mini-batch on its way through the cells: `forward`, then `backward`.

    Attributes:
        batch: The mini-batch.
        tasks: What runs the tasks of each cell.
        program: What runs.
        state: The variables that no optimizer updates.
        chain: What runs on every device.
    """

    def __init__(
        self,
        batch: MiniBatch,
        tasks: Sequence[CellTasks],
        program: Program,
        clock: Clock | None = None,
    ):
        self.batch = batch
        self.tasks = tasks
        self.program = program
        self.chain = Chain(clock)
        self.state = StateFlow(
            batch.traced,
            [cell.part for cell in tasks],
            {id(v) for v in batch.call.metric_state},
            batch.replicas,
            batch.micro_batches,
        )
        self._weights = Weights(batch, tasks, self.chain)
        self._left = collections.deque(program.ops)
        self._trained = batch.trained(tasks)
        # By cell and micro-batch, what its forward pass keeps.
        self._kept: dict[tuple[int, int], Values] = {}
        # By cell and replica: sums of gradients, and what computes metrics, of
        # one micro-batch after the other.
        self._sums: dict[tuple[int, int], GradientSums] = {}
        self._metrics: dict[tuple[int, int], list[tf.Operation]] = (
            collections.defaultdict(list)
        )

    def forward(self) -> None:
        """Runs the operations before the first that needs the loss."""
        while self._left and not self._left[0].is_backward:
            self._run(self._left.popleft())

    def backward(self, start: LossGradients) -> None:
        """Runs all other operations, by the gradients of the loss."""
        made, rows = self.tasks[0].part.traced, self.batch.micro_batches
        # Without `dy`, nothing is trained.
        for m, values in enumerate(self.batch.values if made.dy else ()):
            head = [rows.select(m, d, tf.zeros_like(d)) for d in start.head]
            extra = [
                None if d is None else d * rows.fraction(m, d.dtype)
                for d in start.extra
            ]
            keys = [*made.dy, *made.dlosses]
            gradients = [*start.outputs[m], *head, *extra]
            values.update(
                (key.ref(), gradient)
                for key, gradient in zip(keys, gradients, strict=True)
                if key is not None
            )
        while self._left:
            self._run(self._left.popleft())

    def assign_state(self) -> None:
        """Assigns what no optimizer updates, when it is known; once."""
        self.state.assign(self.batch.values)

    # ------------------------------------------------------------- operations
    def _run(self, op: Op) -> None:
        """Collects what an operation takes, runs it, and takes its results."""
        if KINDS[op.kind].lane != "compute":
            self._transfer(op)
            return
        kind, k, m = op.task
        r = self.batch.replicas.replica_of(m)
        tasks: Any = self.tasks[k]  # the last ones may be a head's
        part, values = tasks.part, self.batch.values[m]
        kept, sums = self._kept.get((k, m)), self._sums.get((k, r))
        awaited, before = part.gradient_inputs, []
        with tf.device(self._device(k, m)):
            known = self._taken(k, m, values)
            if kind == "forward":
                awaited = tasks.awaits
                # So at most two micro-batches hold outputs for their metrics.
                before = self._metrics[k, r][-2:-1]
                work = tasks.forward(known, op.keeps)
            elif kind == "recompute":
                awaited, work = [], tasks.recompute(known, kept)
            elif kind == "head":
                awaited = part.forward_inputs
                work = tasks.head(known, sums, m)
            elif kind == "input_gradient":
                work = tasks.input_gradient(known, kept)
            else:
                with_dx = kind == "backward"
                work = tasks.backward(known, kept, sums, m, with_dx)
        cell, beside = self.batch.cells[k], None
        if cell.shards and cell.is_beside:
            beside = cell.callers[r], cell.shards.start
        awaited, device = [values[t.ref()] for t in awaited], self._device(k, m)
        made = self.chain.run(op.task, device, awaited, work, beside, before)
        self._take(op, known, made)

    def _take(self, op: Op, taken: Values, results: Any) -> None:
        """Takes the results of an operation, as its task returns them."""
        kind, k, m = op.task
        r = self.batch.replicas.replica_of(m)
        tasks, values = self.tasks[k], self.batch.values[m]
        if kind == "recompute":
            self._kept[k, m] = results
            return
        made, left = results
        with tf.device(self._device(k, m)):
            self.batch.add(m, made)
            if kind == "forward":
                metrics = tasks.metrics(taken, left)
                if metrics is not None:
                    made = metrics()
                    self.batch.add(m, made)
                    self._metrics[k, r].append(run_independently(made))
            if kind in ("forward", "head"):
                self.state.after(tasks.part, m, values)
        if kind == "input_gradient" or (
            kind == "forward" and k in self._trained
        ):
            self._kept[k, m] = left
        elif kind != "forward":
            self._sums[k, r] = left
            self._kept.pop((k, m), None)

    def _device(self, k: int, m: int) -> str:
        return self.batch.replicas.device(k, m)

    def _taken(self, k: int, m: int, values: Values) -> Values:
        """Returns values, with the state that cell k takes, and its weights."""
        self.state.start(self.tasks[k].part, m, values)
        weights = self._weights.packed(k, self._device(k, m))
        return {**values, self.tasks[k].functions.weights: weights}

    def _transfer(self, op: Op) -> None:
        """Sends what is kept to the host, or back from there.

        Back when the device has run what it has before it.
        """
        _, k, m = op.task
        cell, device = self.batch.cells[k], self._device(k, m)
        host = names.host_of(device)
        if cell.is_stored_elsewhere:  # where its weights are sent from
            host = cell.store_of(device)
        kept, bundle = self._kept[k, m], self.tasks[k].functions.kept
        values = kept.get(bundle, [])
        if op.kind == "offload":
            values = send(values, host)
        else:
            caller = cell.callers[self.batch.replicas.replica_of(m)]
            last = self.chain.last_op.get(caller)
            # What is sent does not wait for what takes it: so it waits here.
            with tf.device(host):
                with tf.control_dependencies([] if last is None else [last]):
                    begin = tf.no_op()
                with tf.control_dependencies([begin]):
                    waiting = [tf.identity(value) for value in values]
            values = send(waiting, device)
        self._kept[k, m] = {**kept, bundle: values}

    # ---------------------------------------------------------------- results
    def counts(self) -> list[list[tf.Tensor]]:
        """Returns what the losses of each micro-batch count, scalars."""
        wanted = self.batch.traced.counts
        if self.batch.is_complete:
            return self.batch.values_of(wanted)
        cells = self._counting()
        counts = []
        for m, values in enumerate(self.batch.values):
            made: Values = {}
            for k, (function, results) in cells.items():
                known = self._taken(k, m, dict(values))
                taken = self.tasks[k].arguments({**known, **made})
                with tf.device(self._device(k, m)):
                    made.update(by_reference(results, function(taken)))
            counts.append([made[t.ref()] for t in wanted])
        return counts

    def _counting(self) -> dict[int, tuple[Callable, list[tf.Tensor]]]:
        """Returns what counts need of cells: functions, and what they return.

        By the index of a cell, in order.
        """
        cells = {}
        missing = {t.ref() for t in self.batch.traced.counts}
        for k, cell in reversed([*enumerate(self.tasks)]):
            part, cut = cell.part, cell.functions
            pairs = zip(part.forward_outputs, cut.part.forward_outputs)
            wanted = [(t, first) for t, first in pairs if t.ref() in missing]
            if not wanted:
                continue
            function = cut.of_forward([first for _, first in wanted])
            cells[k] = function, [t for t, _ in wanted]
            inputs = {id(t) for t in function.inputs}
            for t, first in zip(part.forward_inputs, cut.part.forward_inputs):
                if id(first) in inputs:
                    missing.add(t.ref())
        return dict(reversed(cells.items()))

    def gradients(self) -> dict[int, Any]:
        """The gradient of every trainable variable, by its id.

        A tensor of the variable's shape, `tf.IndexedSlices`, or None.
        """
        replicas = self.batch.replicas

        def sums(k: int, r: int) -> list[gradient_sums.Gradient]:
            cell = self.batch.cells[k]  # its sums are where its weights are
            with tf.device(cell.store_of(replicas.device_in(r, k))):
                return self.tasks[k].unpack_sums(self._sums[k, r])

        return gradient_sums.of_variables(
            (
                self.batch.cells[k].stores[0],
                self.tasks[k].part.uses,
                [sums(k, r) for r in replicas.busy],
            )
            for k in self._trained
        )


class Weights:
    """The values of all cells' weights, on every device that needs them.

    What a cell only casts, for every micro-batch, is cast once here. A device
    that has weights of elsewhere holds two cells' weights, and its shards.
    """

    def __init__(
        self, batch: MiniBatch, tasks: Sequence[CellTasks], chain: Chain
    ):
        self._tasks = tasks
        self._cells = batch.cells
        self._chain = chain
        # What layers assign has its old value to the end.
        self._assigned = {id(v) for v, _ in batch.traced.new_state}
        self._read: dict[tuple[int, Any, Any], tf.Tensor] = {}
        self._held: dict[str, dict[int, Any]] = {}  # by device and cell
        self._of_shards: dict[tuple[int, str], Any] = {}  # by cell and device
        # By device, what ran there before the last task.
        self._before_last: dict[str, tf.Operation] = {}

    def packed(self, k: int, device: str) -> Any:
        """The weights of cell k on a device, as its next task takes them."""
        cell = self._cells[k]
        if cell.shards is not None:
            if (k, device) not in self._of_shards:
                self._of_shards[k, device] = self._packed(k, device)
            return self._of_shards[k, device]
        held = self._held.setdefault(device, {})
        before_last = self._before_last.get(device)
        self._before_last[device] = self._chain.last_op.get(device)
        if k in held:
            held[k] = held.pop(k)  # the last one used
            return held[k]
        ready = []
        if cell.is_stored_elsewhere:
            if len(held) > 1:
                del held[next(iter(held))]
            ready = [] if before_last is None else [before_last]
            self._read = {
                key: value
                for key, value in self._read.items()
                if key[0] in self._assigned
            }
        # Otherwise sent when the step begins, not when they are used first.
        held[k] = self._packed(k, device, ready)
        return held[k]

    def _packed(
        self, k: int, device: str, ready: Sequence[tf.Operation] = ()
    ) -> Any:
        """Packs the weights of cell k, sent after some operations."""
        cell = self._tasks[k]
        packed = cell.functions.weights
        pairs = zip(cell.part.uses, packed.tensors)
        with tf.control_dependencies(None), tf.control_dependencies(ready):
            values = [self._sent(use, t.dtype, device) for use, t in pairs]
        with tf.control_dependencies(None), tf.device(device):
            return packed.pack(values)

    def _sent(self, use: Use, dtype: tf.DType, device: str) -> tf.Tensor:
        """Returns what a cell reads of a variable, in a dtype on a device."""
        home = use.variable.value.device
        key = id(use.variable), use.piece, dtype
        if key not in self._read:
            with tf.device(home):
                value = use.columns_of(placement.read_variable(use.variable))
                self._read[key] = tf.cast(value, dtype)
        if names.same_device(home, device):
            return self._read[key]
        (value,) = send([self._read[key]], device)
        return value
