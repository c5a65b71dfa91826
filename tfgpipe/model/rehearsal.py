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
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.checks import checked_counts
from tfgpipe.devices import Replicas
from tfgpipe.failures import explained
from tfgpipe.graphs import TracedModel, in_turn, tensors
from tfgpipe.internals import Nest
from tfgpipe.loss import Objective
from tfgpipe.model.step import TrainingSteps
from tfgpipe.run import MiniBatch, Pipeline
from tfgpipe.schedules import Program
from tfgpipe.trial import Trial

HOST = "/device:CPU:0"


class Section(NamedTuple):
    """A section of the model, mostly a layer, as it ran.

    Values are those that a rehearsal was asked for, by micro-batch.

    Attributes:
        name: The layer with its cell and devices, in words.
        weights: The trained variables that it reads.
        gives: Of what went out, forward; without new variables.
        gradients: Of the gradients by what came in.
    """

    name: str
    weights: list[keras.Variable]
    gives: Sequence[Any]
    gradients: Sequence[Any]


class Rehearsal(NamedTuple):
    """A training step, section by section, that changed nothing.

    Attributes:
        total: The loss, a scalar.
        gradients: By each trainable weight, or None.
        start: Of the gradients by what the model hands out, by micro-batch.
        sections: The layers in order, without the head.
    """

    total: tf.Tensor
    gradients: list[tf.Tensor | tf.IndexedSlices | None]
    start: Sequence[Any]
    sections: Sequence[Section]


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
        if batch_size is not None:
            (batch_size,) = checked_counts(batch_size=batch_size)
        self._arguments.check_training()
        # Specs of x, y, sample_weight of the last step, if it had this loss.
        loss, known = self._notes.trained or (None, None)
        if not self.compiled or loss is not internals.compiled_loss(self):
            known = None
        specs = known or (built.input_spec, None, None)
        found: list[Program] = []

        def lowering(*batch: Nest) -> None:
            head, loss = None, Objective(self, batch, training=True)
            if known is not None:
                head, loss = self._loss_of(batch, training=True)
            found.append(self.pipeline_for(batch, head, loss, True).program)

        def as_spec(t: Any) -> Any:
            if t is None:
                return None
            return tf.TensorSpec((batch_size, *t.shape[1:]), t.dtype)

        function = tf.function(lowering, autograph=False)
        flat = tree.map_structure(as_spec, specs)
        function.get_concrete_function(*flat)
        program = found[-1]
        count = "unknown numbers of" if batch_size is None else batch_size
        program.note = f"mini-batches of {count} rows"
        if known is None:
            program.note += "; the loss is taken to keep the outputs"
        return program

    def rehearse(
        self, data: Nest, look: Callable[[list[tf.Tensor]], Any] = list
    ) -> Rehearsal:
        """Runs a training step, section by section, that changes nothing.

        Args:
            data: A mini-batch, as `train_step` takes it.
            look: Makes what is wanted of some tensors, while the step is
                traced.
        """
        traces: list[list[Section]] = []

        def run(data: Nest) -> Any:
            batch, _ = self._unpack(data)
            head, loss = self._loss_of(batch, training=True)
            pipeline = self.pipeline_for(
                batch, head, loss, True, _BatchBySections
            )
            pipeline.forward()
            with keras.StatelessScope():  # the metrics stay as they are
                pipeline.backward(loss.start(pipeline))
                total = loss.total(pipeline)
            gradients = [d for d, _ in self.gradients_of(pipeline, loss)]
            model = self.built_for("a step").source.model
            sections, start = _sections(model, pipeline)
            traces.append(sections)

            def looked(tensors: Sequence[tf.Tensor]) -> list[Any]:
                by_micro_batch = pipeline.batch.values
                return [look(_known(tensors, vs)) for vs in by_micro_batch]

            values = [[looked(s.gives), looked(s.gradients)] for s in sections]
            return total, gradients, looked(start), values

        function = explained(
            tf.function(run, autograph=False),
            lambda: self.built_for("a step").cells,
            functools.partial(in_turn, True),
        )
        with self.nothing_eager(), self.tried_by(None):
            total, gradients, start, values = function(data)
        ran = [
            section._replace(gives=gives, gradients=gradients_by_inputs)
            for section, (gives, gradients_by_inputs) in zip(traces[-1], values)
        ]
        return Rehearsal(total, gradients, start, ran)

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Inside, steps are traced for the host, which compiles nothing."""
        with (
            internals.replaced(self, "_built", self.built_for("a step")),
            internals.replaced(self, "_jit_cells", False),
        ):
            self.group_for(False)
            built = self.built_for("a step")
            cells = tuple(
                dataclasses.replace(
                    cell,
                    devices=(HOST,) * len(cell.devices),
                    stores=(),
                    callers=(),
                )
                for cell in built.cells
            )
            self._built = dataclasses.replace(built, cells=cells)
            yield

    def tried_by(self, trial: Trial | None) -> AbstractContextManager[None]:
        """Inside, a trial, or none, tries the model when a step is traced."""
        return internals.replaced(self, "_trial", trial)

    def telling_gradients(self, tell: Callable) -> AbstractContextManager[None]:
        """Inside, training steps tell the gradients that they apply.

        `tell` is called with pairs of a gradient, or None, and its weight.
        """
        return internals.replaced(self._notes, "tell_gradients", tell)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Inside, steps may run: at the end the variables are as before.

        Those of the layers, of metrics, of the optimizer, and seeds.
        """
        skips, optimizer = self._notes.skips, self.optimizer
        variables: list[Any] = [
            *self.variables,
            *self.metrics_variables,
            *(v for o in internals.with_inner(optimizer) for v in o.variables),
            *internals.unlisted(optimizer),
            *internals.global_seed(),
            *([] if skips is None else skips.counts.values()),
        ]
        values = {id(v): (v, v.numpy()) for v in variables}  # on the host
        try:
            yield
        finally:
            for variable, value in values.values():
                is_own = isinstance(variable, keras.Variable)
                storage = variable.value if is_own else variable
                with tf.device(storage.device):
                    variable.assign(value)


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


def _sections(
    model: keras.Model | None, pipeline: Pipeline
) -> tuple[list[Section], list[tf.Tensor]]:
    """Returns the sections, with tensors of the model's graph for values.

    And the gradients that come from behind all of them.
    """
    traced = pipeline.batch.traced
    outer = () if model is None else (model,)
    state = tensors([[t for _, t in traced.new_state], traced.moments])
    assigned = {t.ref() for t in [*state, *traced.assigned]}
    sections, parts = [], []
    for section, k in [*zip(traced.sections, traced.cells)][:-1]:
        part, cell = pipeline.tasks[k].part, pipeline.batch.cells[k]
        if not part.forward:
            continue
        # The model that the user gave is not said again for each layer.
        around = section.around
        if around[:1] == outer and len(around) > 1:
            around = around[1:]
        parts.append(part)
        sections.append(
            Section(
                cell.describe(section._replace(around=around).words),
                [use.variable for use in part.uses if use.is_trained],
                [t for t in part.forward_outputs if t.ref() not in assigned],
                part.gradient_outputs,
            )
        )
    inside = {t.ref() for part in parts for t in part.gradient_outputs}
    start = [t for part in parts for t in part.gradient_inputs]
    return sections, [t for t in start if t.ref() not in inside]


def _known(
    tensors: Sequence[tf.Tensor], values: Mapping[Hashable, tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the values that there are of tensors, lists left out."""
    known = [values.get(t.ref()) for t in tensors if t.dtype != tf.variant]
    return [value for value in known if value is not None]
