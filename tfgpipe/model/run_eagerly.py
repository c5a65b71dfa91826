"""A model that Python runs, to be looked at.

A step is a graph, whoever calls it, and is traced before it runs first. Where a
model runs eagerly, Python then runs it, the loss and the metrics before each
step, on the rows that they will get, so that the user can print, assert and
stop there. What they return and assign is dropped; variables that Keras does
not know are set back. Then the step itself runs, the same graph as otherwise:

    rows 0 --> model --> loss of rows 0      Python, to be looked at
    rows 1 --> model --> loss of rows 1
    mini-batch --> graph --> logs            what is trained
"""

from __future__ import annotations

import bdb
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import Cell, as_number
from tfgpipe.loss import Head
from tfgpipe.micro_batches import MicroBatches, structure_of


def captured_by(call: Callable, function: Any, data: Any) -> list[tf.Tensor]:
    """What a step reads and assigns; nothing if it cannot be traced.

    It fails in Python then, which says more. `call` calls what traces it.
    """
    try:
        graph = call(function.get_concrete_function, data)
    except bdb.BdbQuit:  # asked for in a debugger
        raise
    except Exception:
        return []
    captured: list[tf.Tensor] = graph.captured_inputs
    return captured


def run_eagerly(
    source: Any,
    cells: Sequence[Cell],
    x: Any,
    labels: Sequence[Any],
    count: int,
    training: bool,
    head: Head | None,
    of_all_rows: Callable[[Any, list[tf.Tensor]], None],
) -> None:
    """Has Python run a model, micro-batch by micro-batch; changes nothing.

    As in the step, each micro-batch finds the state that the mini-batch found;
    seeds and metrics run on. There are at most `count`. `labels` are y and
    sample_weight, nests or None; `head` computes loss and metrics of a
    micro-batch, and `of_all_rows` what it does not, called with the outputs and
    what layers add to the loss. `cells` say where layers are, in errors.
    """
    device = cells[-1].device
    places = {id(la): cell for cell in cells for la in cell.sequence}

    def called(layer: keras.layers.Layer, run: Callable[[], Any]) -> Any:
        cell = places.get(id(layer))
        with contextlib.nullcontext() if cell is None else cell.naming(layer):
            return run()

    split = MicroBatches(x, count)
    layers = source.layers
    own = [v for layer in layers for v in layer.variables]
    runs_on = internals.seeds_of(layers)
    runs_on += [v for layer in layers for v in layer.metrics_variables]
    runs_on += [] if head is None else head.metric_state
    # Keras looks for what it regularises in the scope alone.
    read = [(v, v.value) for v in own if v.regularizer is not None]
    known: list[tuple[keras.Variable, Any]] = read
    outputs, attached, added = [], [], []
    parts = zip(split.split(x), split.split(tuple(labels)))
    for m, (values, rows) in enumerate(parts):
        # What runs on is as the last micro-batch left it, all else as it was.
        with (
            keras.StatelessScope(known, collect_losses=True) as scope,
            internals.noting_losses(layers) as of_model,
        ):
            with internals.around_calls(called):
                y = source.call(values, training)
            if head is not None:
                with tf.device(device):
                    head(y, rows, split.count > 1)
            found = [(v, scope.get_current_value(v)) for v in runs_on]
        known = read + [(v, value) for v, value in found if value is not None]
        outputs.append(tree.flatten(y))
        is_split = split.count > 1
        attached.append(
            [internals.attached_to(t, is_split) for t in outputs[-1]]
        )
        if is_split:
            for tensor in filter(tf.is_tensor, outputs[-1]):
                split.check_output(tensor, m)
        losses = map(as_number, of_model(scope.losses))
        added.append([split.fraction(m, t.dtype) * t for t in losses])
    with keras.StatelessScope(known), tf.device(device):
        made = [
            None if t is None else tf.identity(t) for t in split.join(outputs)
        ]
        made = [*map(internals.attach, made, split.join(attached))]
        of_all_rows(
            tree.map_structure(lambda i: made[i], structure_of(y)),
            [sum(terms) for terms in zip(*added)],
        )
