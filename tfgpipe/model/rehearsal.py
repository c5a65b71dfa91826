"""Training steps that change nothing, and gradients told as they pass.

Each section of the model is a cell, on the devices of its cell or on the host,
and the head is one after them: so what a layer gets and gives is what crosses
from task to task.

    a step        cell 0: layers a, b        cell 1: layer c, loss
    by layers     a --> b -----------------> c --> loss
                  device 0                   device 1

The step has the same schedule and recomputations, and the same bits, which do
not depend on cells.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import Cell, CellTasks
from tfgpipe.checks import checked_counts
from tfgpipe.devices import Replicas
from tfgpipe.failures import explained
from tfgpipe.graphs import Part, TracedModel, in_turn, tensors
from tfgpipe.internals import Nest
from tfgpipe.loss import Objective
from tfgpipe.model.build import Built
from tfgpipe.model.step import TrainingSteps, mini_batch_of, pipeline_of
from tfgpipe.run import MiniBatch, Pipeline
from tfgpipe.schedules import Program

HOST = "/device:CPU:0"


class Section(NamedTuple):
    """A section of the model, mostly a layer, as it ran.

    Values are those that a rehearsal was asked for, by micro-batch.

    Attributes:
        layer: The layer, or None.
        depth: In how many layers it is.
        name: The layer with its cell and devices, in words.
        devices: Those of the cell, one a replica.
        part: What it has of the model's graph.
        takes: Of what came in.
        gives: Of what went out, forward; without new variables.
        gradients: Of the gradients by what came in.
    """

    layer: keras.Layer | None
    depth: int
    name: str
    devices: tuple[str, ...]
    part: Part
    takes: Sequence[Any]
    gives: Sequence[Any]
    gradients: Sequence[Any]

    @property
    def weights(self) -> list[keras.Variable]:
        """The trained variables that it reads."""
        return [use.variable for use in self.part.uses if use.is_trained]

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that it reads, and all others of its layer."""
        taken = {t.ref() for t in self.part.forward_inputs}
        state = self.part.traced.state
        variables = [
            *([] if self.layer is None else self.layer.variables),
            *(use.variable for use in self.part.uses),
            *(v for v, t in state if t.ref() in taken),
        ]
        return [*{id(v): v for v in variables}.values()]


class Rehearsal(NamedTuple):
    """A training step, section by section, that changed nothing.

    Attributes:
        total: The loss, a scalar.
        gradients: By each trainable weight, or None.
        start: Of the gradients by what the model hands out, by micro-batch.
        seeds: By micro-batch, the states with which seeds began, by id.
        sections: The layers in order, without the head.
        batch: The mini-batch, as it was traced.
    """

    total: tf.Tensor
    gradients: list[tf.Tensor | tf.IndexedSlices | None]
    start: Sequence[Any]
    seeds: Sequence[Mapping[int, tf.Tensor]]
    sections: Sequence[Section]
    batch: MiniBatch


class Rehearsals(TrainingSteps):
    """The part of `GPipe` whose steps are looked at."""

    def program(self, batch_size: int | None) -> Program:
        """Returns what a training step runs on each device. Print it.

        The layers are traced; nothing is computed. Loss, labels and weights
        are like in the mini-batch that was trained on last. Before the
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

        def lowering(*batch: Nest) -> None:
            head, loss = None, Objective(self, batch, training=True)
            if known is not None:
                head, loss = self._loss_of(batch, training=True)
            x, *labels = batch
            run = self.pipeline_for(built.as_taken(x), labels, head, loss, True)
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

    def rehearse(
        self,
        data: Nest,
        look: Callable[[list[tf.Tensor]], Any] = list,
        on_host: bool = False,
    ) -> Rehearsal:
        """Runs a training step, section by section, that changes nothing.

        Args:
            data: A mini-batch, as `train_step` takes it.
            look: Makes what is wanted of some tensors, while the step is
                traced.
            on_host: Whether all run on the host, not on their cells' devices.
        """
        traces: list[tuple[list[Section], MiniBatch]] = []

        def run(data: Nest) -> Any:
            total, gradients, pipeline, batch = self._by_sections(data, on_host)
            built, state = self.built_for("check()"), batch.traced.state
            sections = _sections(built, batch, pipeline.tasks)
            parts = [section.part for section in sections]
            inside = {t.ref() for part in parts for t in part.gradient_outputs}
            start = [
                t
                for part in parts
                for t in part.gradient_inputs
                if t.ref() not in inside
            ]
            traces.append((sections, batch))
            by_micro_batch = pipeline.results.values

            def looked(tensors: Sequence[tf.Tensor]) -> list[Any]:
                return [look(_known(tensors, vs)) for vs in by_micro_batch]

            values = [
                [looked(s.takes), looked(s.gives), looked(s.gradients)]
                for s in sections
            ]
            seeds = [
                {
                    id(v): values[t.ref()]
                    for v, t in state
                    if id(v) in batch.traced.draws
                }
                for values in by_micro_batch
            ]
            return values, total, gradients, looked(start), seeds

        function = explained(
            tf.function(run, autograph=False),
            lambda: self.built_for("check()").cells,
            functools.partial(in_turn, True),
        )
        with self.nothing_eager():
            values, total, gradients, start, seeds = function(data)
        sections, batch = traces[-1]
        ran = [
            section._replace(takes=takes, gives=gives, gradients=gradients)
            for section, (takes, gives, gradients) in zip(sections, values)
        ]
        return Rehearsal(total, gradients, start, seeds, ran, batch)

    def _by_sections(
        self, data: Nest, on_host: bool
    ) -> tuple[tf.Tensor, list[Any], Pipeline, MiniBatch]:
        """Traces a step whose cells are the sections of the model."""
        given, _ = self._unpack(data)
        x, *labels = given
        head, loss = self._loss_of(given, training=True)

        def begun(compiles: bool) -> tuple[MiniBatch, Pipeline]:
            built = self.built_for("check()")
            if on_host:
                cells = tuple(map(_on_host, built.cells))
                built = dataclasses.replace(built, cells=cells)
            batch = mini_batch_of(
                built,
                built.as_taken(x),
                labels,
                head,
                True,
                compiles and not on_host,
                cls=_BatchBySections,
            )
            return batch, pipeline_of(built, batch, loss, None)

        batch, run = self.compiled_if_possible(begun, self.run_eagerly)
        run.forward()
        with keras.StatelessScope():  # the metrics stay as they are
            run.backward(loss.start(run))
            total = loss.total(run)
        gradients = [d for d, _ in self.gradients_of(run, loss)]
        return total, gradients, run, batch

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


class _BatchBySections(MiniBatch):
    """A mini-batch for which each section of the model is a cell.

    The graph is for any number of rows, where there are several micro-batches.
    """

    def spec(self, tensor: tf.Tensor) -> tf.TensorSpec:
        """See `MiniBatch`."""
        rows = None if self.micro_batches.count > 1 else tensor.shape[0]
        return tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)

    def with_cells(self, traced: TracedModel) -> TracedModel:
        """Makes each section a cell, with the rules of the one it is in.

        built   | 0 1 | 2 3 4 |
        here    | 0 | 1 | 2 | 3 | 4 |     the last one is the head
        """
        whole, before = self.cells, traced.cells
        # A cell of no section stays, without operations.
        empty = {*range(len(whole))} - {*before}
        places = sorted([*before, *empty])
        self.cells = [whole[k].part(i) for i, k in enumerate(places)]
        counts = collections.Counter(whole[k].number for k in places)
        self.remat = self.remat.parted(places, [*counts.values()])
        grid = list(zip(*(cell.devices for cell in self.cells)))
        self.replicas = Replicas(grid, self.micro_batches.count)
        cells = [
            i + sum(k < own for k in empty) for i, own in enumerate(before)
        ]
        return dataclasses.replace(traced, cells=cells)


def _on_host(cell: Cell) -> Cell:
    """Returns a cell like another one, on the host."""
    return Cell(
        cell.index,
        cell.steps,
        [HOST] * len(cell.devices),
        cell.number,
        head_parts=cell.head_parts,
        shards=cell.shards,
    )


def _sections(
    built: Built, batch: MiniBatch, tasks: Sequence[CellTasks]
) -> list[Section]:
    """Returns the sections, with tensors of the model's graph for values."""
    traced, model = batch.traced, built.source.model
    outer = () if model is None else (model,)
    state = tensors([[t for _, t in traced.new_state], traced.moments])
    assigned = {t.ref() for t in [*state, *traced.assigned]}
    sections = []
    for section, k in [*zip(traced.sections, traced.cells)][:-1]:
        part, cell = tasks[k].part, batch.cells[k]
        if not part.forward:
            continue
        # The model that the user gave is not said again for each layer.
        around = section.around
        if around[:1] == outer and len(around) > 1:
            around = around[1:]
        sections.append(
            Section(
                section.layer,
                len(around),
                cell.describe(section._replace(around=around).words),
                cell.devices,
                part,
                part.forward_inputs,
                [t for t in part.forward_outputs if t.ref() not in assigned],
                part.gradient_outputs,
            )
        )
    return sections


def _known(
    tensors: Sequence[tf.Tensor], values: Mapping[Hashable, tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the values that there are of tensors, lists left out."""
    known = [values.get(t.ref()) for t in tensors if t.dtype != tf.variant]
    return [value for value in known if value is not None]
