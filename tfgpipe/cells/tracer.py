"""Makes the tasks of all cells: functions, which equal cells share.

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

import math
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells.cell import Cell
from tfgpipe.cells.model_trace import ModelCall, trace_model
from tfgpipe.cells.tasks import CellTasks
from tfgpipe.devices import names
from tfgpipe.graphs import (
    CellFunctions,
    Indices,
    Part,
    TracedModel,
    TraceOptions,
    check_compilable,
    gradient_sums,
    part_key,
    parts_of,
    stateful_kinds,
)
from tfgpipe.internals import Nest


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
    _check_captured(traced)
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
    return [
        CellTasks(part, functions_of(known, key, part, cell, *way))
        for key, part, cell, way in zip(keys, parts, cells, ways)
    ]


def functions_of(
    known: dict[str, CellFunctions],
    key: str,
    part: Part,
    cell: Cell,
    share: float,
    is_sent: bool,
) -> CellFunctions:
    """Returns the functions of an equal part, or cuts them."""
    if key not in known:
        types = names.device_types(cell.devices)
        known[key] = CellFunctions(part, types, share, is_sent)
    functions = known[key]
    if functions.kept_share > share:
        least = math.ceil(100 * functions.kept_share) / 100
        raise ValueError(
            "`remat` must let a cell keep what cannot be computed again: "
            "loops, conditions and what has state. Expected: at least "
            f"{least:g} for cell {cell.number}. Received: "
            f'remat={share:g}. Pass "always", "never", or a share of that, '
            "if it is below 1, in a dict for this cell alone."
        )
    cell.traced_as.add(functions.part.index)
    return functions


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
        has_replicas = len(cell.devices) > 1
        if random and (recomputes[k] or has_replicas):
            why, cure = "With `remat`", 'pass `remat="never"`'
            if has_replicas:
                why, cure = "With replicas", "train with one replica"
            raise ValueError(
                f"{why} a cell must draw its random numbers from Keras seeds: "
                "else recomputation draws others, and replicas the same. "
                f"Received: {layer} of cell {cell.number}, which runs "
                f"{', '.join(random)}. Draw by `keras.random` with a "
                f"`keras.random.SeedGenerator` of the layer, or {cure}."
            )
        if kinds and (is_split or len(cells) > 1):
            cell.warn_of(
                layer,
                f"of cell {cell.number} runs {', '.join(kinds)}, which "
                "has side effects. They happen once for every micro-batch, and "
                "in no order between devices.",
            )


def _check_captured(traced: TracedModel) -> None:
    """Refuses storage that the graph captures.

    Branches, loops and functions capture through it.
    """
    for outer, inner in traced.graph.captures:
        variable = internals.variable_of(outer)
        if variable is not None:
            users = inner.consumers()
            place = min((traced.places[op.name] for op in users), default=0)
            raise ValueError(
                "A layer must use a weight of the model by its "
                "`keras.Variable`. Received: "
                f"{traced.section_of(place).words} uses the `tf.Variable` of "
                f"'{variable.path}' by itself, which has no gradient here. "
                "Keep the variable, `layer.kernel` instead of "
                "`layer.kernel.value`, read it outside of a "
                "`keras.StatelessScope`, and use `assign` and `keras.ops`."
            )
