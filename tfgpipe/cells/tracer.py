"""Runs a model once, by its `call`, in one graph, and cuts it into tasks.

    x, labels -> [ scope: model(x) -> y -> loss and metrics ] -> results

All effects of its Python code are in the graph: masks, attributes of tensors,
tensors that one layer leaves in Python for another. Variables are read and
assigned through a scope, so nothing is captured and nothing is changed.

Python runs the model once, in one graph, and a tape differentiates it there.
The graph is cut into cells, and of equal ones, see `graphs/same_graph.py`, one
is cut into functions:

    model --trace--> graph --differentiate--> parts of cells 0 1 2 3
                                              functions      |=| |=|

The operations of layers are checked. TensorFlow runs the stateful operations of
a function one after the other, so a single `tf.print` in a cell would make the
whole pipeline run serially: `run/chain.py` takes the cells out of that order,
and the user is told that effects happen once a micro-batch, in any order
between devices. A random operation is an error: re-materialisation would draw
other numbers than the forward pass, and the gradient would be wrong.

Cells use the values of a model's variables, never their storage. A value that
the model reads is an argument, and one that it assigns is a result. Storage
that it used directly would hold the values of the last mini-batch, would change
once a micro-batch, and would have no gradient.

A `tf.Variable` that is not of the model, and that it does not assign, is read
once in a step, see `graphs/cut.py`. Where a loop, a branch or a lookup reads
it, or a table, TensorFlow orders the calls of cells and what a step assigns
later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells.cell import Cell
from tfgpipe.cells.head import Head
from tfgpipe.cells.sections import Around, Home, Sections
from tfgpipe.cells.tasks import CellTasks
from tfgpipe.devices import names
from tfgpipe.graphs import (
    CellFunctions,
    Gradient,
    Indices,
    TracedModel,
    TraceOptions,
    check_compilable,
    gradient_sums,
    part_key,
    parts_of,
    stateful_kinds,
)
from tfgpipe.inputs import structure_of
from tfgpipe.internals import Nest
from tfgpipe.state import ModelScope, MovingStatistics


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """A model, and how to run it.

    Attributes:
        call: Calls the model: `call(x, training)`.
        layers: The model's layers, as the user gave them.
        training: Whether it is trained.
        is_split: Whether there are several micro-batches.
        head: Loss and metrics of a micro-batch, or None.
        home: Returns the cell of a call, see `Sections`.
        around: Returns a context for the call of a layer, see `Sections`.
        num_cells: The number of cells; one, if there are none yet.
        trains_others: Whether variables of other layers are trained, too.
        shards: By the id of a layer, its number of shards, see `Sections`.
        sent: The ids of weights that have uses if they are frozen, too.
    """

    call: Callable[[Any, bool], Any]
    layers: Sequence[keras.layers.Layer]
    training: bool
    is_split: bool
    head: Head | None = None
    home: Home = lambda *_: None
    around: Around = lambda *_: contextlib.nullcontext()
    num_cells: int = 1
    trains_others: bool = False
    shards: Mapping[int, int] = dataclasses.field(default_factory=dict)
    sent: Collection[int] = ()

    @property
    def metric_state(self) -> list[keras.Variable]:
        """The variables of the metrics of layers, and of the head."""
        of_layers = [
            v for layer in self.layers for v in layer.metrics_variables
        ]
        return of_layers + (self.head.metric_state if self.head else [])

    @property
    def normalizations(self) -> list[keras.layers.BatchNormalization]:
        """The batch normalisations whose statistics move at the end."""
        if not self.is_split:
            return []
        layers = {
            id(inner): inner
            for layer in self.layers
            for inner in internals.flat_layers(layer)
            if isinstance(inner, keras.layers.BatchNormalization)
            and inner.trainable
        }
        return [*layers.values()]


def trace_model(
    model: ModelCall, x: Nest, labels: Nest, options: TraceOptions
) -> TracedModel:
    """Runs the model once, in a graph.

    `x` and `labels` are nests of `tf.TensorSpec`s of a micro-batch.
    """
    fields: dict[str, Any] = {}

    def run(x: Nest, labels: Nest) -> list[tf.Tensor]:
        fields.clear()  # TensorFlow may call it again
        fields.update(_run(model, x, labels))
        return [t for t in fields["outputs"] if t is not None]

    function = tf.function(run, **options.of_function)
    graph = function.get_concrete_function(x, labels).graph
    strangers = internals.captures_of_strangers(graph)
    if strangers:
        raise ValueError(
            "A layer must take tensors of its own step. Received: "
            f"{[t.name for t in strangers]}, which one has kept of another "
            "step. Make them in each call, or keep a `keras.Variable`."
        )
    operations = tuple(graph.get_operations())
    return TracedModel(
        graph=graph,
        options=options,
        operations=operations,
        places={op.name: i for i, op in enumerate(operations)},
        dw=[Gradient()] * len(fields["uses"]),
        effects=tuple(
            op for op in graph.control_outputs if op.type not in internals.READS
        ),
        **fields,
    )


def _run(model: ModelCall, x: Nest, labels: Nest) -> dict[str, Any]:
    """Returns the fields of a `TracedModel` but its graph's."""
    moving = MovingStatistics(model.normalizations)
    tape = None
    if model.training:
        tape = tf.GradientTape(watch_accessed_variables=False)
    sections = Sections(
        model.home,
        model.around,
        model.shards,
        lambda pieces: scope.reading(pieces),
    )
    of_layers = {id(v) for layer in model.layers for v in layer.variables}
    scope = ModelScope(
        lambda: sections.current,
        None if model.trains_others else of_layers,
        internals.seeds_of(model.layers),
        moving,
        model.training,
        tape,
        model.sent,
    )
    # Scalars, one for each output with a loss.
    sums: list[tf.Tensor] = []
    counts: list[tf.Tensor] = []
    with (
        tape or contextlib.nullcontext(),
        scope,
        internals.around_calls(sections.called),
        internals.naming_on_tapes(),
        internals.noting_losses(model.layers) as added,
        internals.recording_moments(scope.record)
        if model.is_split
        else contextlib.nullcontext(),
    ):
        y = model.call(x, model.training)
        sections.begin(model.num_cells - 1)  # the head, in the last cell
        if model.head is not None:
            sums, counts = model.head(y, labels, model.is_split)
        others = [_check_loss(loss, x, model) for loss in added(scope.losses)]
        flat = tree.flatten(y)
        outputs = [None if t is None else _as_result(t) for t in flat]
        attached = [*map(internals.attached_to, flat)]
        head = model.head
        hung = {name for t in flat for name in internals.hung_by_user(t)}
        if hung and head is not None and not (sums and head.metrics_add_up):
            raise ValueError(
                "Outputs must have no attributes where a loss or a metric takes"
                f" those of a whole mini-batch. Received: {sorted(hung)}. "
                "Return them as outputs."
            )
        losses = [_as_result(t) for t in [*sums, *others]]
        new_state = [(v, _as_result(t)) for v, t in scope.new_state()]
    moving.check()
    if model.is_split and scope.overwritten:
        raise ValueError(
            "A seed must be drawn by `seed_generator.next()` alone if there is "
            "more than one micro-batch. Received: another new value of "
            f"{[*scope.overwritten.values()]}, as of `next(ordered=False)`, or "
            "of `keras.random` without a seed. Draw with `seed=` a "
            "`keras.random.SeedGenerator`, or pass num_micro_batches=1."
        )
    return {
        "tape": tape,
        "sections": sections.sections,
        "cells": sections.cells,
        "x": tree.flatten(x),
        "labels": tree.flatten(labels),
        "uses": scope.uses,
        "state": [*scope.given.values()],
        "outputs": outputs,
        "attached": attached,
        "structure": structure_of(y),
        "losses": losses,
        "num_head_losses": len(sums),
        "counts": counts,
        "new_state": new_state,
        "assigned": scope.values,
        "normalizations": moving.layers,
        "moments": [moving.moments[id(layer)] for layer in moving.layers],
        "rules": [moving.rules[id(layer)] for layer in moving.layers],
        "of_rows": moving.of_rows,
        "draws": {
            key: None if key in scope.overwritten else count
            for key, count in scope.draws.items()
        },
    }


def _as_result(tensor: Any) -> tf.Tensor:
    """Returns a tensor that a cell makes: arguments are copied."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.op.type.startswith(("Placeholder", "ReadVariableOp")):
        return tf.identity(tensor)
    return tensor


def _check_loss(loss: Any, x: Nest, model: ModelCall) -> tf.Tensor:
    """Returns a loss of `add_loss` as a number; refuses one for each row."""
    loss = tf.convert_to_tensor(loss)
    first = next((t for t in tree.flatten(x) if t is not None), loss)
    if (
        model.is_split
        and loss.shape.rank
        and loss.shape[0] in (None, first.shape[0])
    ):
        raise ValueError(
            "`add_loss` must be given a scalar, the mean over rows, if there "
            "is more than one micro-batch. Received: shape "
            f"{tuple(loss.shape)}. Or pass num_micro_batches=1."
        )
    # As Keras, which sums it up.
    if not loss.dtype.is_floating:
        loss = tf.cast(loss, keras.config.floatx())
    return tf.reduce_sum(loss) if loss.shape.rank != 0 else loss


def unanalysed(x: Nest) -> Any:
    """Returns a nest of tensors whose users TensorFlow does not analyse.

    It would do so before the first step, see `internals.analysis_stopper`.
    """
    with tf.control_dependencies([internals.analysis_stopper()]):
        return tf.nest.map_structure(
            lambda t: None if t is None else tf.identity(t), x
        )


def trace_cells(
    call: ModelCall,
    cells: Sequence[Cell],
    x: Nest,
    labels: Nest,
    recomputes: Sequence[bool],
    options: TraceOptions,
) -> TracedModel:
    """Runs a model once.

    `x` and `labels` are nests of `tf.TensorSpec`s of a micro-batch;
    `recomputes` says for each cell whether any micro-batch is computed again.
    """
    traced = trace_model(call, x, labels, options)
    for cell in cells:
        cell.called = []
    for section, k in zip(traced.sections, traced.cells):
        if section.operation is not None:
            cells[k].called.append(section.operation)
    # Branches, loops and functions capture storage.
    for outer, inner in traced.graph.captures:
        variable = internals.variable_of(outer)
        if variable is not None:
            users = inner.consumers()
            place = min((traced.places[op.name] for op in users), default=0)
            raise ValueError(
                "A layer must use a weight of the model by its "
                "`keras.Variable`. Received: "
                f"{traced.section_of(place).words} uses the `tf.Variable` of "
                f"'{variable.path}'. Use `layer.kernel` instead of its `value`,"
                " outside of a `keras.StatelessScope`."
            )
    _check_operations(traced, cells, recomputes, call.is_split)
    return traced


def tasks_of(
    made: TracedModel,
    cells: Sequence[Cell],
    indices: Sequence[Sequence[Indices]],
    ways: Sequence[tuple[float, bool]] | None = None,
) -> list[CellTasks]:
    """Cuts the tasks of each cell out of a graph; equal ones once.

    Args:
        made: The graph, differentiated.
        cells: The cells.
        indices: For each use of a weight, and each lookup, how indices
            differ between micro-batches.
        ways: For each cell the share of the bytes for its backward pass
            that it may keep, and whether it keeps them on the host.
            Defaults to all of them, on the device.
    """
    parts = parts_of(made, len(cells), indices)
    ways = ways or [(1.0, False)] * len(cells)
    types = [names.device_types(cell.devices) for cell in cells]
    keys = []
    for part, on, way in zip(parts, types, ways, strict=True):
        variables = [use.variable for use in part.uses]
        replaced = [*map(gradient_sums.is_replaced, variables)]
        keys.append(part_key(part, [*on, part.indices, replaced, *way]))
    if made.options.jit_compile:
        check_compilable(parts, keys)
    known: dict[str, CellFunctions] = {}
    tasks = []
    for key, part, on, cell, way in zip(keys, parts, types, cells, ways):
        if key not in known:
            known[key] = CellFunctions(part, on, *way)
        functions, share = known[key], way[0]
        if functions.kept_share > share:
            least = math.ceil(100 * functions.kept_share) / 100
            raise ValueError(
                "`remat` must let a cell keep what cannot be computed again: "
                "loops, conditions and what has state. Expected: at least "
                f"{least:g} for cell {cell.number}. Received: remat={share:g}."
            )
        cell.traced_as.add(functions.part.index)
        tasks.append(CellTasks(part, functions))
    return tasks


# Stateful operations that draw random numbers.
_RANDOM = re.compile(
    "(?!Stateless).*(Random|Rng|Multinomial|CandidateSampler|TruncatedNormal|"
    "DistortedBoundingBox|StatefulUniform|StatefulStandardNormal)"
)


def _check_operations(
    traced: TracedModel,
    cells: Sequence[Cell],
    recomputes: Sequence[bool],
    is_split: bool,
) -> None:
    """Warns of stateful operations and refuses random ones.

    One micro-batch in one cell has the effects that it has in plain Keras.

    Raises:
        ValueError: If the recomputation would draw other random numbers, or
            replicas the same ones.
    """
    if not stateful_kinds(traced.operations):
        return
    # The last one is the head: losses and metrics may check their arguments.
    ends = [section.start for section in traced.sections[1:]]
    for section, k, end in zip(traced.sections, traced.cells, ends):
        kinds = sorted(stateful_kinds(traced.operations[section.start : end]))
        cell, layer = cells[k], section.words
        random = [*filter(_RANDOM.match, kinds)]
        if random and (recomputes[k] or len(cell.devices) > 1):
            raise ValueError(
                "With `remat` or replicas, a cell must draw its random numbers "
                "from a `keras.random.SeedGenerator` of the layer. Received: "
                f"{layer} of cell {cell.number}, which runs "
                f'{", ".join(random)}. Or pass remat="never" to one replica.'
            )
        if kinds and (is_split or len(cells) > 1):
            cell.warn_of(
                layer,
                f"of cell {cell.number} runs {', '.join(kinds)}, which "
                "has side effects. They happen once for every micro-batch, and "
                "in no order between devices.",
            )
