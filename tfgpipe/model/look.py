"""Steps that are called eagerly, and layers that Python runs to be looked at.

A step is a graph, whoever calls it. Where a model runs eagerly, Python first
runs each layer, the loss and the metrics on the rows that they will get, so
that the user can print, assert and stop there. What they return and assign is
dropped; then the step itself runs, as the same graph as otherwise:

    rows 0 --> cell 0 --> cell 1 --> loss of rows 0      Python, to be looked at
    rows 1 --> cell 0 --> cell 1 --> loss of rows 1
    mini-batch --> graph --> logs                        what is trained
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.boundary import Boundary, structure_of
from tfgpipe.cells import Cell, as_number
from tfgpipe.failures import one_step
from tfgpipe.loss import Head
from tfgpipe.micro_batches import MicroBatches
from tfgpipe.model.hooks import Hooks
from tfgpipe.sequence import inputs


def as_graph(step: Callable) -> Callable:
    """A step of a `GPipe`, which is a graph also where it is called eagerly.

    Args:
        step: A method that takes a mini-batch.
    """
    in_graph = one_step(step)

    @functools.wraps(step)
    def called(self: Any, data: Any) -> Any:
        if tf.executing_eagerly():
            return self.run_as_graph(in_graph, data)
        return in_graph(self, data)

    return called


class Looking(Hooks):
    """The part of `GPipe` whose steps may be called eagerly."""

    run_eagerly: Any
    _unpack: Any
    _loss_of: Any

    def run_as_graph(self, step: Callable, data: Any) -> Any:
        """Runs a step that was called eagerly.

        Args:
            step: A training, test or predict step.
            data: The mini-batch.
        """
        kind = step.__name__.removesuffix("_step")
        getattr(self, f"make_{kind}_function")()  # what Keras checks before
        self.note_data(data)
        batch, _ = self._unpack(data, with_loss=kind != "predict")
        if self.run_eagerly or tf.config.functions_run_eagerly():
            self._look(kind, batch)
        known = self._notes.functions.setdefault(kind, {})
        trained = tuple(v.trainable for v in self.variables)
        if trained not in known:
            function = functools.partial(step, self)
            known[trained] = self._explained(
                tf.function(function, autograph=False, reduce_retracing=True)
            )
        with self.nothing_eager():
            return known[trained](data)

    def _look(self, kind: str, batch: tuple[Any, Any, Any]) -> None:
        """Has Python run what a step will run."""
        training, head, loss = kind == "train", None, None
        if kind != "predict":
            head, loss = self._loss_of(batch, training)

        def of_all_rows(y_pred: Any, added: list[tf.Tensor]) -> None:
            if loss is not None:
                loss.look(y_pred, added)
            if head is not None and not head.streams_metrics:
                x, y, sample_weight = batch
                self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

        given, *labels = batch
        built = self.built_for("a step")
        x = built.as_taken(given)
        count = built.num_micro_batches * built.num_replicas
        with inputs.explaining_sizes(x, built.input_spec):
            look(built.cells, x, labels, count, training, head, of_all_rows)

    @contextlib.contextmanager
    def nothing_eager(self) -> Iterator[None]:
        """Inside, steps are traced, also those of a model that runs eagerly."""
        was_eager = bool(self.run_eagerly), tf.config.functions_run_eagerly()
        self.run_eagerly = False
        tf.config.run_functions_eagerly(False)
        try:
            yield
        finally:
            self.run_eagerly = was_eager[0]
            tf.config.run_functions_eagerly(was_eager[1])


def look(
    cells: Sequence[Cell],
    x: Any,
    labels: Sequence[Any],
    count: int,
    training: bool,
    head: Head | None,
    of_all_rows: Callable[[Any, list[tf.Tensor]], None],
) -> None:
    """Has Python run the layers, micro-batch by micro-batch; changes nothing.

    As in the step, each micro-batch finds the state that the mini-batch found;
    seeds and metrics run on.

    Args:
        cells: The cells.
        x: What the first layer takes.
        labels: y and sample_weight, nests or None.
        count: How many micro-batches it has at most.
        training: The `training` argument of the layers.
        head: Loss and metrics of a micro-batch, or None.
        of_all_rows: Computes what the head does not, called with the outputs
            and what layers add to the loss.
    """
    split = MicroBatches(x, count)
    runs_on = [v for cell in cells for v in [*cell.seeds, *cell.metric_state]]
    runs_on += [] if head is None else head.metric_state
    # Keras looks for what it regularises in the scope alone.
    weights = [
        v for cell in cells for own in cell.weights_by_layer for v in own
    ]
    read = [(v, v.value) for v in weights if v.regularizer is not None]
    known: list[tuple[keras.Variable, Any]] = read
    outputs, added = [], []
    parts = zip(split.split(x), split.split(tuple(labels)))
    for m, (values, own) in enumerate(parts):
        with keras.StatelessScope(known, collect_losses=True) as scope:
            values = _run_cells(cells, values, training)
            if head is not None:
                with tf.device(cells[-1].device):
                    head(values, own, first=True)
            found = [(v, scope.get_current_value(v)) for v in runs_on]
        known = read + [(v, value) for v, value in found if value is not None]
        outputs.append(Boundary.of(values))
        if split.count > 1:
            for tensor in filter(tf.is_tensor, outputs[-1].tensors):
                split.check_output(tensor, m)
        losses = map(as_number, scope.losses)
        added.append([split.fraction(m, t.dtype) * t for t in losses])
    all_rows = Boundary(
        split.join([own.tensors for own in outputs]),
        split.join([own.masks for own in outputs]),
    )
    with keras.StatelessScope(known), tf.device(cells[-1].device):
        of_all_rows(
            all_rows.nest(structure_of(values)),
            [sum(terms) for terms in zip(*added)],
        )


def _run_cells(cells: Sequence[Cell], values: Any, training: bool) -> Any:
    for cell in cells:
        with tf.device(cell.device):
            values = cell(
                values, before_layer=lambda i: None, training=training
            )
    return values
