"""Layers that Python runs, to be looked at.

A step is a graph, whoever calls it. Where a model runs eagerly, Python first
runs each layer, the loss and the metrics on the rows that they will get, so
that the user can print, assert and stop there. What they return and assign is
dropped; then the step itself runs, as the same graph as otherwise:

    rows 0 --> cell 0 --> cell 1 --> loss of rows 0      Python, to be looked at
    rows 1 --> cell 0 --> cell 1 --> loss of rows 1
    mini-batch --> graph --> logs                        what is trained
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.boundary import Boundary, structure_of
from tfgpipe.cells import Cell, as_number
from tfgpipe.loss import Head
from tfgpipe.micro_batches import MicroBatches


def run_layers_eagerly(
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
    seeds and metrics run on. There are at most `count`. `labels` are y and
    sample_weight, nests or None; `head` computes loss and metrics of a
    micro-batch, and `of_all_rows` what it does not, called with the outputs and
    what layers add to the loss.
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
        # What runs on is as the last micro-batch left it, all else as it was.
        with (
            keras.StatelessScope(known, collect_losses=True) as scope,
            internals.noting_losses(cells[0].model_layers) as of_model,
        ):
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
        losses = map(as_number, of_model(scope.losses))
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
