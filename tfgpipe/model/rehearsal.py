"""Training steps that change nothing, and gradients told as they pass.

Each layer is a cell of its own, on the devices of its cell, and the head is one
after them: so what a layer gets and gives is what crosses from task to task.

    a step        cell 0: layers a, b        cell 1: layer c, loss
    by layers     a --> b -----------------> c --> loss
                  device 0                   device 1

The schedule, and what is recomputed, are those of the step; its bits are, too,
which do not depend on cells.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.boundary import Boundary, structure_of
from tfgpipe.cells import Cell, CellTasks, LayerCall, TaskCall
from tfgpipe.checks import checked_counts
from tfgpipe.failures import explained
from tfgpipe.loss import Objective
from tfgpipe.model.build import Built
from tfgpipe.model.step import Steps, trace
from tfgpipe.run import Pipeline
from tfgpipe.schedules import CellFacts, Program


class LayerRun(NamedTuple):
    """A layer on one micro-batch, on its device.

    Attributes:
        inputs: What came in.
        state: Values of `Cell.state`.
        assigned: What earlier layers have assigned to its weights, None where
            none did; empty if none did at all.
        outputs: What went out.
        losses: What it has added to the loss, numbers.
        dy: The gradients by what went out, by position, where there are.
        dlosses: Those by what it has added to the loss.
        dx: Those by what came in.
    """

    inputs: Boundary
    state: list[Any]
    assigned: Sequence[Any]
    outputs: Boundary
    losses: list[Any]
    dy: Mapping[int, Any]
    dlosses: Mapping[int, Any]
    dx: Mapping[int, Any]


class Rehearsal(NamedTuple):
    """What a step has come to.

    Attributes:
        total: The loss, a scalar.
        gradients: By each trainable weight, or None.
        calls: For each layer, and the head at last, what was asked of its
            calls, by micro-batch.
    """

    total: tf.Tensor
    gradients: list[Any]
    calls: list[list[Any]]


class ByLayers:
    """Runs training steps, layer by layer, that change nothing.

    `step` makes a graph of a mini-batch, and also returns nests like what comes
    into each cell; it is called within `nothing_eager`.

    Attributes:
        cells: A cell for each layer, and one for the head.
        structures: For each cell, a nest like what comes in.
    """

    def __init__(
        self, cells: Sequence[Cell], step: Callable, nothing_eager: Callable
    ):
        self._nothing_eager = nothing_eager
        self.cells = cells
        self.structures: list[Any] = []

        def run(data: Any) -> Rehearsal:
            found: Rehearsal
            found, self.structures = step(data)
            return found

        function = tf.function(run, autograph=False)
        self._function = explained(function, lambda: cells, True)

    def __call__(self, data: Any) -> Rehearsal:
        """Runs a mini-batch, which is as `train_step` takes it."""
        with self._nothing_eager():
            found: Rehearsal = self._function(data)
        return found


class Rehearsals(Steps):
    """The part of `GPipe` whose steps are looked at."""

    @property
    def gradient_dtype(self) -> str | None:
        """In which gradients are summed over micro-batches, see `GPipe`."""
        return self._arguments.gradient_dtype

    def program(self, batch_size: int | None) -> Program:
        """What a training step runs on each device. Print it.

        The layers are traced; nothing is computed. Loss, labels and weights
        are like those of the mini-batch that was trained on last. Before the
        first, the loss is taken to keep the outputs for its gradient.

        Args:
            batch_size: Rows of the mini-batch. None: not known when the step
                is traced, as in `fit` of data whose last mini-batch is
                shorter. The program of these has all micro-batches, of which
                some have no rows.

        Returns:
            The operations of the devices, in the order of the schedule,
            replica after replica.

        Raises:
            ValueError: If the model is not built, or cannot be trained.
        """
        built = self.built_for("program()")
        rows = batch_size
        if rows is not None:
            (rows,) = checked_counts(batch_size=rows)
        self._arguments.check_training()
        known = self._trained_on()
        specs = known or (built.input_spec, None, None)
        found: list[Program] = []

        def lowering(*batch: Any) -> None:
            head, loss = None, Objective(self, batch, training=True)
            if known is not None:
                head, loss = self._loss_of(batch, training=True)
            x, *labels = batch
            run = self.lowered(built.as_taken(x), labels, head, loss, True)
            found.append(run.program)

        def as_spec(t: Any) -> Any:
            if t is None:
                return None
            return tf.TensorSpec((rows, *t.shape[1:]), t.dtype)

        function = tf.function(lowering, autograph=False)
        flat = tree.map_structure(as_spec, specs)
        function.get_concrete_function(*flat)
        program = found[-1]
        program.note = f"mini-batches of {rows} rows"
        if rows is None:
            program.note = "mini-batches of unknown numbers of rows"
        if known is None:
            program.note += "; the loss is taken to keep the outputs"
        return program

    def _trained_on(self) -> Any:
        """Specs of x, y, sample_weight of the last step with this loss."""
        loss, specs = self._step_notes.trained or (None, None)
        is_same = self.compiled and loss is internals.compiled_loss(self)
        return specs if is_same else None

    def by_layers(self, of_call: Callable[[LayerRun], Any]) -> ByLayers:
        """Runs training steps that change nothing.

        `of_call` is asked of each call for a nest of tensors, while the step is
        traced.
        """
        built = self.built_for("by_layers()")
        #     built   | 0 1 | 2 3 4 |
        #     here    | 0 | 1 | 2 | 3 | 4 | head |    each step is a cell
        steps = [[*cell.calls] for cell in built.cells]
        steps[-1].append(_Nothing())
        places = [k for k, own in enumerate(steps) for _ in own]
        cells = [
            built.cells[k].part(i, step)
            for i, (k, step) in enumerate(zip(places, itertools.chain(*steps)))
        ]
        counts = collections.Counter(cell.number for cell in cells)
        groups = [counts[k] for k in range(self.num_partitions)]
        remat = built.remat.parted(places, groups)
        parted = dataclasses.replace(built, cells=tuple(cells), remat=remat)
        step = functools.partial(self._by_layers, of_call, parted)
        return ByLayers(cells, step, self.nothing_eager)

    def _by_layers(
        self,
        of_call: Callable[[LayerRun], Any],
        built: Built,
        data: Any,
    ) -> tuple[Rehearsal, list[Any]]:
        """A step by layers, and nests like what comes into each."""
        batch, _ = self._unpack(data)
        given, *labels = batch
        x = built.as_taken(given)
        head, loss = self._loss_of(batch, training=True)

        def lowered() -> tuple[list[_Recorded], Pipeline]:
            traced = trace(built, x, labels, head, True, self._jit_cells)
            wanted = loss.has_gradient(traced) if traced.is_training else ()
            tasks = [_Recorded(own) for own in traced.tasks(*wanted)]
            program = traced.program(tasks, built.schedule_of)
            return tasks, Pipeline(traced, tasks, program)

        tasks, run = lowered()
        run.forward()
        with keras.StatelessScope():  # the metrics stay as they are
            run.backward(loss.start(run))
            total = loss.total(run)
        pairs = self._gradients(run, loss)
        calls = [
            [of_call(call) for call in own.calls(k, run)]
            for k, own in enumerate(tasks)
        ]
        structures = [
            structure_of(x),
            *(own.findings.output_structure for own in tasks[:-1]),
        ]
        return Rehearsal(total, [d for d, _ in pairs], calls), structures

    def telling_gradients(
        self, tell: Callable[[list[tuple[Any, keras.Variable]]], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, training steps tell the gradients that they apply.

        `tell` is called with pairs of a gradient, or None, and its weight.
        """
        return internals.replaced(self._step_notes, "tell_gradients", tell)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[Callable[[], None]]:
        """Inside, steps may run: at the end the variables are as before.

        Those of the layers, of metrics, of the optimizer, and seeds. It yields
        what puts them back at once.
        """
        skips, optimizer = self._notes.skips, self.optimizer
        variables: list[Any] = [
            *self.variables,
            *self.metrics_variables,
            *(v for o in internals.with_inner(optimizer) for v in o.variables),
            *internals.unlisted(optimizer),
            *internals.global_seed(),
            *([] if skips is None else skips.counts),
        ]
        values = {id(v): (v, v.numpy()) for v in variables}  # on the host

        def put_back() -> None:
            for variable, value in values.values():
                is_own = isinstance(variable, keras.Variable)
                storage = variable.value if is_own else variable
                with tf.device(storage.device):
                    variable.assign(value)

        try:
            yield put_back
        finally:
            put_back()


class _Nothing(LayerCall):
    """Hands on what the last layer has made: where the head is."""

    def __init__(self) -> None:
        super().__init__(keras.layers.Identity())

    def __call__(self, values: Any, training: bool) -> Any:
        """Returns what came in: there is no layer, see `LayerCall`."""
        return values


class _Recorded:
    """The tasks of a cell, which note what they take and return."""

    def __init__(self, tasks: CellTasks):
        self._tasks = tasks
        self._forward: list[tuple[Any, Any]] = []
        self._backward: dict[int, tuple[Any, Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tasks, name)

    def facts(
        self, has_backward: bool, synchronizes: bool = False
    ) -> CellFacts:
        """See `CellTasks`; the halves of a backward pass are one."""
        facts = self._tasks.facts(has_backward, synchronizes)
        return facts._replace(has_halves=False)

    def forward(self, arguments: Any, keeps: bool) -> TaskCall:
        """The forward task, noted, see `CellTasks`."""
        work = self._tasks.forward(arguments, keeps)

        def finish(results: list[Any]) -> Any:
            found = work.finish(results)
            self._forward.append((arguments, found[0]))
            return found

        return work._replace(finish=finish)

    def backward(self, *given: Any) -> TaskCall:
        """The backward task, noted, see `CellTasks`."""
        work = self._tasks.backward(*given)
        _, _, dy, dlosses, _, m = given

        def finish(results: list[Any]) -> Any:
            found = work.finish(results)
            self._backward[m] = dy, dlosses, found[0]
            return found

        return work._replace(finish=finish)

    def calls(self, k: int, run: Pipeline) -> list[LayerRun]:
        """What was noted, by micro-batch, as `run` ran it as cell k."""
        ops = [op for op in run.program.ops if op.kind == "forward"]
        order = [op.micro_batch for op in ops if op.cell == k]
        num_head = self.findings.num_head_losses
        made = {}
        # Noted in the order of the schedule, returned in that of the rows.
        for m, (given, output) in zip(order, self._forward, strict=True):
            dy, dlosses, dx = self._backward.get(m, ((), (), ()))
            made[m] = LayerRun(
                given.inputs,
                given.state,
                given.assigned,
                Boundary(output.tensors, output.masks),
                output.losses[num_head:],
                *map(_known, (dy, dlosses[num_head:], dx)),
            )
        return [made[m] for m in sorted(made)]


def _known(gradients: Sequence[Any]) -> dict[int, Any]:
    return {i: d for i, d in enumerate(gradients) if d is not None}
