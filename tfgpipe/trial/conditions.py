"""Loops and branches whose condition follows from rows, as the graph shows.

    rows --> max --> scalar --> while, cond, where

Each micro-batch decides such a thing by itself. Tried values show it only where
the parts of a batch decide otherwise than the whole.

Limits: inside a loop, what is picked from a tensor may be one row, as it is in
`tf.map_fn`, or all rows at one time. Conditions that follow from it are not
told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs import TracedModel, functions_of

# How a value follows from rows.
_NOT, _PICKED, _ROWS = range(3)

_LOOPS = {"StatelessWhile", "While"}
_BRANCHES = {"Case", "If", "StatelessCase", "StatelessIf"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_SELECTS = {"Select", "SelectV2"}

_SIZES = {"Rank", "Shape", "ShapeN", "Size"}
_SIZED_BY_VALUES = set(
    "DynamicPartition RaggedTensorToTensor Unique UniqueV2 Where".split()
)
_PICKS = {"Gather", "GatherV2", "Slice", "StridedSlice", "TensorListGetItem"}

# In names of what `tf.vectorized_map` makes of code for one row: its loops run
# until all rows are done, but leave those alone that are.
_VECTORIZED = "/pfor/"

_Levels = dict[str, int]  # by the names of tensors


def conditions_of_rows(traced: TracedModel) -> list[tf.Operation]:
    """Returns the operations that decide, or hold what decides, by rows.

    Those are loops, branches and choices by a scalar, and calls of functions,
    on which outputs or losses depend; losses that are chosen are left out, such
    as quotients by numbers that may be 0.
    """
    levels: _Levels = {t.name: _ROWS for t in traced.x if t is not None}
    shown = internals.ancestors(t for t in traced.handed_out if t is not None)
    lost = internals.ancestors(traced.losses)
    return [
        op
        for op in _deciding(traced.operations, levels)
        if op.name in shown or (op.name in lost and op.type not in _SELECTS)
    ]


def _deciding(
    operations: Iterable[tf.Operation], levels: _Levels, in_loop: bool = False
) -> list[tf.Operation]:
    """Finds the levels of all tensors; returns the operations that decide."""
    deciding = []
    sized: set[str] = set()  # operations whose sizes follow from values
    for op in operations:
        if op.outputs and all(t.name in levels for t in op.outputs):
            continue  # what comes in
        before = [levels.get(t.name, _NOT) for t in op.inputs]
        level = max(before, default=_NOT)
        is_fixed = all(t.op.type == "Const" for t in op.inputs[1:])
        has_sized = any(t.op.name in sized for t in op.inputs)
        if op.type in _SIZED_BY_VALUES or (has_sized and op.type not in _SIZES):
            sized.add(op.name)
        if op.type in _SIZES and not has_sized:
            level = _NOT
        elif in_loop and op.type in _PICKS and not is_fixed:
            level = min(level, _PICKED)
        made = [level] * len(op.outputs)
        decides = (
            op.type in _SELECTS
            and op.inputs[0].shape.rank == 0
            and before[0] == _ROWS
        )
        graphs = _graphs(op)
        if op.type in _LOOPS and graphs:
            made, decides = _of_loop(graphs, before)
        elif graphs:
            chosen = before.pop(0) if op.type in _BRANCHES else _NOT
            runs = [_of_function(graph, before, in_loop) for graph in graphs]
            each = zip(*(outputs for outputs, _ in runs))
            made = [max(chosen, *outputs) for outputs in each]
            decides = chosen == _ROWS or any(decides for _, decides in runs)
        levels.update(zip((t.name for t in op.outputs), made))
        if decides and _VECTORIZED not in op.name:
            deciding.append(op)
    return deciding


def _of_function(
    graph: tf.Graph, before: Sequence[int], in_loop: bool
) -> tuple[list[int], bool]:
    levels = dict(zip((t.name for t in graph.inputs), before))
    deciding = _deciding(graph.get_operations(), levels, in_loop)
    used = internals.ancestors(graph.outputs)
    made = [levels.get(t.name, _NOT) for t in graph.outputs]
    return made, any(op.name in used for op in deciding)


def _of_loop(
    graphs: Sequence[Any], before: list[int]
) -> tuple[list[int], bool]:
    condition, body = graphs
    known: list[int] = []
    while known != before:
        known = [*before]
        made, decides = _of_function(body, known, in_loop=True)
        before = [*map(max, known, made)]
    (ends,), _ = _of_function(condition, known, in_loop=True)
    return [max(ends, level) for level in known], decides or ends == _ROWS


def _graphs(op: tf.Operation) -> list[Any]:
    """Returns the graphs of what is called, a loop's condition first."""
    if op.type not in _LOOPS | _BRANCHES | _CALLS:
        return []
    called = functions_of(op.node_def)
    if op.type in _LOOPS:
        called = [op.get_attr(name).name for name in ("cond", "body")]
    try:
        return [internals.function_graph(op, name) for name in called]
    except AttributeError:  # of an older kind, which has none
        return []
