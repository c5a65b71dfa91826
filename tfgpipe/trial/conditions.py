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

# How a value or a size follows from rows.
_NOT, _PICKED, _ROWS = range(3)

_LOOPS = {"StatelessWhile", "While"}
_BRANCHES = {"Case", "If", "StatelessCase", "StatelessIf"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_SELECTS = {"Select", "SelectV2"}

_SIZES = {"Rank", "Shape", "ShapeN", "Size"}
_SIZED_BY_VALUES = {
    "DynamicPartition",
    "RaggedTensorToTensor",
    "Unique",
    "UniqueV2",
    "Where",
}
_PICKS = {"Gather", "GatherV2", "Slice", "StridedSlice", "TensorListGetItem"}

# In names of what `tf.vectorized_map` makes of code for one row: its loops run
# until all rows are done, but leave those alone that are.
_VECTORIZED = "/pfor/"

_Level = tuple[int, int]  # of the value of a tensor, and of its sizes
_Levels = dict[str, _Level]  # by the names of tensors


def conditions_of_rows(traced: TracedModel) -> list[tf.Operation]:
    """Returns the operations that decide, or hold what decides, by rows.

    Those are loops, branches and choices by a scalar, and calls of functions,
    on which outputs or losses depend; losses that are chosen are left out, such
    as quotients by numbers that may be 0.
    """
    levels: _Levels = {t.name: (_ROWS, _NOT) for t in traced.x if t is not None}
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
    for op in operations:
        if op.outputs and all(t.name in levels for t in op.outputs):
            continue  # what comes in
        before = [levels.get(t.name, (_NOT, _NOT)) for t in op.inputs]
        graphs = _graphs(op)
        if op.type in _LOOPS and len(graphs) == 2:
            made, decides = _of_loop(graphs, before)
        elif op.type in _BRANCHES and graphs:
            made, decides = _of_branches(graphs, before, in_loop)
        elif op.type in _CALLS and graphs:
            made, decides = _of_function(graphs[0], before, in_loop)
        else:
            made = [_of_operation(op, before, in_loop)] * len(op.outputs)
            decides = (
                op.type in _SELECTS
                and op.inputs[0].shape.rank == 0
                and before[0][0] == _ROWS
            )
        levels.update(zip((t.name for t in op.outputs), made))
        if decides and _VECTORIZED not in op.name:
            deciding.append(op)
    return deciding


def _of_operation(
    op: tf.Operation, before: Sequence[_Level], in_loop: bool
) -> _Level:
    value, size = _largest(before)
    if op.type in _SIZES:
        return size, _NOT
    is_fixed = all(t.op.type == "Const" for t in op.inputs[1:])
    if in_loop and op.type in _PICKS and not is_fixed:
        value = min(value, _PICKED)
    if op.type in _SIZED_BY_VALUES:
        size = max(size, value)
    elif op.type not in _PICKS or op.type in ("Slice", "StridedSlice"):
        sizes = [v for t, (v, _) in zip(op.inputs, before) if _is_size(t)]
        size = max([size, *sizes])
    is_known = all(t.shape.is_fully_defined() for t in op.outputs)
    return value, _NOT if is_known else size


def _of_function(
    graph: tf.Graph, before: Sequence[_Level], in_loop: bool
) -> tuple[list[_Level], bool]:
    levels = dict(zip((t.name for t in graph.inputs), before))
    deciding = _deciding(graph.get_operations(), levels, in_loop)
    used = internals.ancestors(graph.outputs)
    made = [levels.get(t.name, (_NOT, _NOT)) for t in graph.outputs]
    return made, any(op.name in used for op in deciding)


def _of_branches(
    graphs: Sequence[Any], before: Sequence[_Level], in_loop: bool
) -> tuple[list[_Level], bool]:
    (chosen, _), *given = before
    runs = [_of_function(graph, given, in_loop) for graph in graphs]
    made = [
        _largest([(chosen, _NOT), *outputs])
        for outputs in zip(*(outputs for outputs, _ in runs))
    ]
    return made, chosen == _ROWS or any(decides for _, decides in runs)


def _of_loop(
    graphs: Sequence[Any], before: list[_Level]
) -> tuple[list[_Level], bool]:
    condition, body = graphs
    known: list[_Level] = []
    while known != before:
        known = [*before]
        made, decides = _of_function(body, known, in_loop=True)
        before = [_largest(pair) for pair in zip(known, made)]
    ((ends, _),), _ = _of_function(condition, known, in_loop=True)
    made = [_largest([(ends, _NOT), level]) for level in known]
    return made, decides or ends == _ROWS


def _graphs(op: tf.Operation) -> list[Any]:
    """Returns the graphs of what an operation calls; none if one has none.

    The condition of a loop comes first.
    """
    if op.type not in _LOOPS | _BRANCHES | _CALLS:
        return []
    names = (
        [op.get_attr(name).name for name in ("cond", "body")]
        if op.type in _LOOPS
        else functions_of(op.node_def)
    )
    try:
        return [internals.function_graph(op, name) for name in names]
    except AttributeError:  # of an older kind, which has none
        return []


def _is_size(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor may hold sizes: a few whole numbers."""
    is_small = tensor.shape.rank in (0, 1) and tensor.shape.is_fully_defined()
    return bool(tensor.dtype.is_integer and is_small)


def _largest(levels: Iterable[_Level]) -> _Level:
    values, sizes = zip((_NOT, _NOT), *levels)
    return max(values), max(sizes)
