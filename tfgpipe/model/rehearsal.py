"""Training steps that change nothing, and gradients told as they pass.

Each section of the model is a cell of its own, on the devices of its cell, and
the head is one after them: so what a layer gets and gives is what crosses from
task to task.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import Cell
from tfgpipe.checks import checked_counts
from tfgpipe.devices import Replicas
from tfgpipe.failures import explained
from tfgpipe.graphs import (
    Part,
    TracedModel,
    by_reference,
    in_turn,
    is_continuous,
    tensors,
)
from tfgpipe.loss import Head, Objective
from tfgpipe.model.build import Built
from tfgpipe.model.step import TrainingSteps, mini_batch_of, pipeline_of
from tfgpipe.run import MiniBatch, Pipeline
from tfgpipe.schedules import Program


class LayerRun(NamedTuple):
    """A layer on one micro-batch, on its device.

    Attributes:
        taken: Values of `LayerPlace.taken`, as they came there.
        given: Those of `LayerPlace.given`.
    """

    taken: list[Any]
    given: list[Any]


class LossRun(NamedTuple):
    """Where the backward pass of a mini-batch starts.

    Attributes:
        outputs: What the model hands out, flat, of all rows.
        losses: By micro-batch, what layers add to the loss, numbers.
        dlosses: The gradients by these, or None.
        dy: By micro-batch the gradients by what is handed out, or None.
    """

    outputs: list[Any]
    losses: list[list[Any]]
    dlosses: list[list[Any]]
    dy: list[list[Any]]


class Rehearsal(NamedTuple):
    """What a step has come to.

    Attributes:
        total: The loss, a scalar.
        gradients: By each trainable weight, or None.
        loss: Where the backward pass starts.
        calls: For each layer, and the head at last, what was asked of its
            calls, by micro-batch.
    """

    total: tf.Tensor
    gradients: list[Any]
    loss: LossRun
    calls: list[list[Any]]


class LayerPlace:
    """A section of the model, mostly a layer, and where in the pipeline it is.

    Attributes:
        section: The section.
        cell: A cell of nothing else.
        part: What it has of the model's graph.
        name: The layer with its cell and devices, in words.
        taken: What it takes of others, forward and backward: tensors of the
            model's graph.
        given: What it gives to others.
        outputs: What of that is of the forward pass, and no new value of a
            variable.
        variables: Those that it reads, and all others of its layer.
    """

    def __init__(
        self,
        section: Any,
        words: str,
        cell: Cell,
        part: Part,
        spots: set[tuple[int, int]],
    ):
        self.section, self.cell, self.part = section, cell, part
        self._spots = spots
        self._words = words
        self.name = cell.describe(words)
        self.taken = [*part.takes, *part.takes_back]
        self.given = [*part.gives, *part.gives_back]
        traced = part.traced
        state = tensors([[t for _, t in traced.new_state], traced.moments])
        kept = {t.ref() for t in [*state, *traced.assigned]}
        self.outputs = [t for t in part.gives if t.ref() not in kept]
        given = {t.ref(): v for v, t in traced.state}
        read = [given[t.ref()] for t in part.takes if t.ref() in given]
        own = [] if section.layer is None else section.layer.variables
        found = [*own, *(use.variable for use in part.uses), *read]
        self.variables = [*{id(v): v for v in found}.values()]

    @property
    def weights(self) -> list[keras.Variable]:
        """The trained variables that it reads."""
        return [use.variable for use in self.part.uses if use.is_trained]

    def named_as(self, k: int, i: int) -> list[str]:
        """Its name, if its operations are named so, see `Cell`."""
        return [self.name] if (k, i) in self._spots else []

    def naming(self) -> contextlib.AbstractContextManager[None]:
        """Inside, errors say where in the pipeline they happened."""
        return self.cell.naming(self._words)

    def made(self, run: LayerRun, wanted: Sequence[Any]) -> list[Any]:
        """Values of some of what it gives."""
        values = by_reference(self.given, run.given)
        return [values[t.ref()] for t in wanted]


class ByLayers:
    """Runs training steps, layer by layer, that change nothing.

    `step` makes a graph of a mini-batch, and also returns the mini-batch and
    the places; it is called within `nothing_eager`.

    Attributes:
        batch: The mini-batch, as it was traced last.
        places: Its layers in order, and the head at last.
    """

    def __init__(self, step: Callable, nothing_eager: Callable):
        self._nothing_eager = nothing_eager
        self.batch: Any = None
        self.places: list[LayerPlace] = []

        def run(data: Any) -> Rehearsal:
            found: Rehearsal
            found, self.batch, self.places = step(data)
            return found

        function = tf.function(run, autograph=False)
        self._function = explained(
            function, lambda: self.places, functools.partial(in_turn, True)
        )

    def __call__(self, data: Any) -> Rehearsal:
        """Runs a mini-batch, which is as `train_step` takes it."""
        with self._nothing_eager():
            found: Rehearsal = self._function(data)
        return found


class Rehearsals(TrainingSteps):
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

    def by_layers(
        self, of_call: Callable[[LayerPlace, LayerRun], Any]
    ) -> ByLayers:
        """Runs training steps that change nothing.

        `of_call` is asked of each call for a nest of tensors, while the step is
        traced.
        """
        self.built_for("by_layers()")
        step = functools.partial(self._by_layers, of_call)
        return ByLayers(step, self.nothing_eager)

    def _by_layers(
        self,
        of_call: Callable[[LayerPlace, LayerRun], Any],
        data: Any,
    ) -> tuple[Rehearsal, MiniBatch, list[LayerPlace]]:
        """A step by layers, and these."""
        given, _ = self._unpack(data)
        x, *labels = given
        head, loss = self._loss_of(given, training=True)
        watched: Any = _WatchedHead(head)

        def begun(compiles: bool) -> tuple[Built, Any, Pipeline]:
            built = self.built_for("by_layers()")
            batch = mini_batch_of(
                built,
                built.as_taken(x),
                labels,
                watched,
                True,
                compiles,
                cls=_BatchBySections,
            )
            return built, batch, pipeline_of(built, batch, loss, None)

        built, batch, run = self.compiled_if_possible(begun, self.run_eagerly)
        run.forward()
        with keras.StatelessScope():  # the metrics stay as they are
            run.backward(loss.start(run))
            total = loss.total(run)
        pairs = self.gradients_of(run, loss)
        places = _places(built, batch, run)

        def call(place: LayerPlace, m: int, values: Any) -> Any:
            device = batch.replicas.device(place.cell.index, m)
            with tf.device(device):
                taken = [received(values.get(t.ref())) for t in place.taken]
            given = [values.get(t.ref()) for t in place.given]
            return of_call(place, LayerRun(taken, given))

        calls = [
            [call(place, m, own) for m, own in enumerate(run.results.values)]
            for place in places
        ]
        gradients = [d for d, _ in pairs]
        start = watched.loss_run(run)
        return Rehearsal(total, gradients, start, calls), batch, places

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

    Attributes:
        cells_before: The cell of each section in the model.
    """

    cells_before: Sequence[int]

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
        self.cells_before = before
        return dataclasses.replace(traced, cells=cells)


def _places(
    built: Built, batch: _BatchBySections, run: Pipeline
) -> list[LayerPlace]:
    """Where each section is; cells of none have no place."""
    traced, model = batch.traced, built.source.model
    outer = () if model is None else (model,)
    # By its cell, which layer of which cell of the model each one is.
    spots: dict[int, tuple[int, int]] = {}
    counts: collections.Counter[int] = collections.Counter()
    found = zip(traced.sections, traced.cells, batch.cells_before)
    for section, k, cell_before in found:
        if section.operation is not None:
            spots[k] = cell_before, counts[cell_before]
            counts[cell_before] += 1
    places = []
    for section, k in zip(traced.sections, traced.cells):
        # The model that the user gave is not said again for each layer.
        around = section.around
        if around[:1] == outer and len(around) > 1:
            around = around[1:]
        words = section._replace(around=around).words
        cell = batch.cells[k]
        own = {spots[j] for j in cell.traced_as if j in spots}
        places.append(LayerPlace(section, words, cell, run.tasks[k].part, own))
    return places


def received(tensor: Any) -> Any:
    """A tensor as it comes to the current device."""
    return None if tensor is None else tf.identity(tensor)


class _WatchedHead:
    """A head that notes the gradients by what it takes of the model.

    It takes copies, whose gradients are those of the loss alone.
    """

    def __init__(self, head: Head):
        self._head = head
        self._dy: dict[int, tf.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def __call__(self, y_pred: Any, labels: Any, is_split: bool) -> Any:
        """See `Head`."""
        self._dy = {}
        copies: dict[int, Any] = {}

        def copy(tensor: Any, i: int) -> Any:
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copied(tensor, i)
            return copies[id(tensor)]

        flat = tree.flatten(y_pred)
        found = [copy(t, i) for i, t in enumerate(flat)]
        i = len(flat)
        for place, tensor in enumerate(flat):
            attached = internals.attached_to(tensor, is_split=False)
            names = enumerate(attached, i)
            hung = internals.constants_on(tensor)
            hung.update({name: copy(attached[name], n) for n, name in names})
            found[place] = internals.attach(found[place], hung)
            i += len(attached)
        nest = tree.pack_sequence_as(y_pred, found)
        return self._head(nest, labels, is_split)

    def _copied(self, tensor: Any, i: int) -> Any:
        """A copy of what is handed out in place i."""
        if not is_continuous(tensor):
            return None if tensor is None else tf.identity(tensor)

        def noted(d: tf.Tensor) -> tf.Tensor:
            self._dy[i] = tf.identity(d)
            return self._dy[i]

        @tf.custom_gradient
        def copied(tensor: tf.Tensor) -> Any:
            return tf.identity(tensor), noted

        return copied(tensor)

    def loss_run(self, run: Pipeline) -> LossRun:
        """Where the backward pass of a mini-batch has started."""
        made = run.tasks[0].part.made
        traced, num_head = made.traced, made.traced.num_head_losses
        # Gradients of the mini-batch's loss come from outside, or from here.
        dy = [
            self._dy.get(i) if d is None else d for i, d in enumerate(made.dy)
        ]

        def by_micro_batch(wanted: Sequence[Any]) -> list[list[Any]]:
            return [
                [None if t is None else known.get(t.ref()) for t in wanted]
                for known in run.results.values
            ]

        return LossRun(
            run.results.joined(),
            by_micro_batch(traced.losses[num_head:]),
            by_micro_batch(made.dlosses[num_head:]),
            by_micro_batch(dy),
        )
