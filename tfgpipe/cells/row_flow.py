"""Follows the rows of a batch through a graph, to where they are mixed.

For each tensor that follows from the batch, it is told along which of its axes
element i follows from row i alone. A sum over that axis, a matrix product along
it or its reversal mixes rows.

What the operations below do is known. Others are taken to leave rows where they
are, if the shapes of their results allow that; where not, nothing is claimed.
Loops and branches are not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.cells.values import is_continuous


class Rows(NamedTuple):
    """Element i along an axis follows from row i alone."""

    axis: int


class Mixed(NamedTuple):
    """Follows from several rows, since an operation."""

    op: tf.Operation


class Unknown(NamedTuple):
    """Follows from rows in a way that is not known."""


State = Rows | Mixed | Unknown | None  # None: does not follow from rows
States = Sequence[State]
Rule = Callable[[tf.Operation, States], State]
UNKNOWN = Unknown()


def follow(
    operations: Iterable[tf.Operation],
    rows: Iterable[tf.Tensor],
    allowed: Collection[Any] = (),
) -> Callable[[tf.Tensor], State]:
    """Tells what tensors of a graph have to do with the rows of a batch.

    Args:
        operations: Of the graph, each after those that it reads.
        rows: Tensors that have a row for each of the batch's.
        allowed: References of tensors that may mix rows.

    Returns:
        A function of a tensor.
    """
    found: dict[Any, State] = {t.ref(): Rows(0) for t in rows if t.shape.rank}
    for op in operations:
        states = [found.get(t.ref()) for t in op.inputs]
        if op.type in _ASIDE:
            states[_ASIDE[op.type]] = None
        if op.type in _OF_SHAPES or not any(s is not None for s in states):
            continue
        for output in op.outputs:
            if output.ref() not in allowed:
                found[output.ref()] = _state(op, states, output)
    return lambda tensor: found.get(tensor.ref())


def _state(op: tf.Operation, states: States, output: tf.Tensor) -> State:
    mixed = next((s for s in states if isinstance(s, Mixed)), None)
    if mixed is not None:
        return mixed
    if op.type == "RaggedTensorToTensor":
        return _padded(op)
    if UNKNOWN in states or op.type in _OTHER_ROWS:
        return UNKNOWN
    if op.type in _RULES:
        found = _RULES[op.type](op, states)
    elif op.type in _ELEMENTWISE:
        found = _broadcast(op, states)
    else:
        found = _left(op, states, output)
    if isinstance(found, Mixed) and not _is_data(output):
        return UNKNOWN
    return found


def _is_data(tensor: tf.Tensor) -> bool:
    """Not a length or an index, by which nothing but a shape may follow."""
    return is_continuous(tensor) or tensor.op.type in _COUNTS


def _left(op: tf.Operation, states: States, output: tf.Tensor) -> State:
    """Rows are left on the axis on which they are, if that can be."""
    shapes = [t.shape for t, s in zip(op.inputs, states) if s is not None]
    axes = {s.axis for s in states if isinstance(s, Rows)}
    axis = axes.pop()
    rank = output.shape.rank
    if axes or rank is None or rank <= axis:
        return UNKNOWN
    if axis and any(shape.rank != rank for shape in shapes):
        return UNKNOWN
    sizes = {shape[axis] for shape in shapes}
    return Rows(axis) if sizes == {output.shape[axis]} else UNKNOWN


def _broadcast(op: tf.Operation, states: States) -> State:
    rank = op.outputs[0].shape.rank
    axes = set()
    for tensor, state in zip(op.inputs, states):
        if rank is None or tensor.shape.rank is None:
            return UNKNOWN
        if isinstance(state, Rows):
            axes.add(state.axis + rank - tensor.shape.rank)
    return Rows(axes.pop()) if len(axes) == 1 else Mixed(op)


def _axes(tensor: tf.Tensor, rank: int | None) -> list[int] | None:
    """Axes that a tensor names, or None if they are not known."""
    value = tf.get_static_value(tensor)
    if value is None or not rank:
        return None
    return [int(axis) % rank for axis in value.flatten()]


def _along(index: int) -> Rule:
    """The rule of what goes along the axes that an input names."""

    def rule(op: tf.Operation, states: States) -> State:
        state, rank = states[0], op.inputs[0].shape.rank
        axes = _axes(op.inputs[index], rank)
        if axes is None or not isinstance(state, Rows):
            return UNKNOWN
        if state.axis in axes:
            return Mixed(op)
        if op.outputs[0].shape.rank == rank:
            return state
        return Rows(state.axis - sum(axis < state.axis for axis in axes))

    return rule


def _along_last(op: tf.Operation, states: States) -> State:
    rank = op.inputs[0].shape.rank
    return Mixed(op) if rank and states[0] == Rows(rank - 1) else states[0]


def _counted(op: tf.Operation, states: States) -> State:
    """Counts over all elements, or over the second of two axes."""
    is_whole = op.type == "Bincount" or op.inputs[0].shape.rank == 1
    return Mixed(op) if is_whole else states[0]


def _padded(op: tf.Operation) -> State:
    """Ragged rows, made as long as the longest one, or as is told."""
    told = tf.get_static_value(op.inputs[0], partial=True)
    if told is None or told.ndim == 0:
        return Mixed(op)
    return Rows(0) if all(n and n > 0 for n in told[1:]) else Mixed(op)


def _normalised(op: tf.Operation, states: States) -> State:
    return Mixed(op) if op.get_attr("is_training") else states[0]


def _transposed(op: tf.Operation, states: States) -> State:
    before, after = op.inputs[0].shape, op.outputs[0].shape
    order = _axes(op.inputs[1], before.rank)
    state = states[0]
    if before.rank is None or not isinstance(state, Rows):
        return UNKNOWN
    if order is not None:
        return Rows(order.index(state.axis))
    size = before[state.axis]  # which may be that of one axis only
    where = [axis for axis, other in enumerate(after) if other == size]
    return Rows(where[0]) if len(where) == 1 else UNKNOWN


def _reshaped(op: tf.Operation, states: States) -> State:
    """Rows keep their order; each may have several elements on their axis."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    state = states[0]
    if not isinstance(state, Rows) or before.rank is None or not after.rank:
        return UNKNOWN
    if any(size != 1 for size in before[: state.axis]):
        return UNKNOWN
    rows = before[state.axis]
    if rows == 1:  # where is it now?
        return Rows(0) if after[0] == 1 and state == Rows(0) else UNKNOWN
    axis = next((k for k, size in enumerate(after) if size != 1), 0)
    is_whole = after[axis] is None or (rows and after[axis] % rows == 0)
    return Rows(axis) if is_whole else UNKNOWN


def _sliced(op: tf.Operation, states: States) -> State:
    """All rows, one, or some: those are the same ones for any micro-batch."""
    masks = ("new_axis_mask", "shrink_axis_mask")
    if states[0] != Rows(0) or any(op.get_attr(mask) & 1 for mask in masks):
        return UNKNOWN  # as in a loop over rows, one by one
    ends = [tf.get_static_value(t, partial=True) for t in op.inputs[1:]]
    if op.get_attr("ellipsis_mask") & 1 or any(end is None for end in ends):
        return _left(op, states, op.outputs[0])
    start, stop, step = (end[0] for end in ends)
    rows = op.inputs[0].shape[0]
    from_first = op.get_attr("begin_mask") & 1 or start == 0
    is_end = op.get_attr("end_mask") & 1 or stop is None
    to_last = is_end or (rows is not None and stop >= rows)
    if step is None or (from_first and to_last and step == 1):
        return _left(op, states, op.outputs[0])
    return UNKNOWN if start is None else Mixed(op)


def _product(op: tf.Operation, states: States) -> State:
    """A matrix product, of single matrices or of many."""
    name = "transpose" if op.type == "MatMul" else "adj"
    letters = ("a", "b") if op.type == "MatMul" else ("x", "y")
    rank, axes = op.outputs[0].shape.rank, set()
    for i, (tensor, state) in enumerate(zip(op.inputs, states)):
        own = tensor.shape.rank
        if rank is None or own is None:
            return UNKNOWN
        if not isinstance(state, Rows):
            continue
        turned = bool(op.get_attr(f"{name}_{letters[i]}"))
        summed = own - 2 if turned != (i == 1) else own - 1
        if state.axis == summed:
            return Mixed(op)
        is_matrix = state.axis >= own - 2
        axes.add(rank - 2 + i if is_matrix else state.axis + rank - own)
    return Rows(axes.pop()) if len(axes) == 1 else Mixed(op)


def _einsum(op: tf.Operation, states: States) -> State:
    equation = op.get_attr("equation").decode()
    if "." in equation:
        return UNKNOWN
    terms, result = equation.split("->")
    letters = {
        term[state.axis]
        for term, state in zip(terms.split(","), states)
        if isinstance(state, Rows)
    }
    letter = letters.pop()
    if letters or letter not in result:
        return Mixed(op)
    return Rows(result.index(letter))


def _gathered(op: tf.Operation, states: States) -> State:
    """Looked up for each row, or elsewhere than among rows."""
    axes = _axes(op.inputs[2], op.inputs[0].shape.rank)
    table, where = states[0], states[1]
    if axes is None:
        return UNKNOWN if where else _left(op, states, op.outputs[0])
    if table is None and isinstance(where, Rows):
        return Rows(axes[0] + where.axis - op.get_attr("batch_dims"))
    is_row_wise = where is None or op.get_attr("batch_dims")
    is_elsewhere = table == Rows(0) and where in (None, Rows(0)) and axes[0]
    return Rows(0) if is_elsewhere and is_row_wise else UNKNOWN


_BRANCHES = {*"Case If StatelessCase StatelessIf StatelessWhile While".split()}
# Their results have other rows, or it is not known which.
_OTHER_ROWS = _BRANCHES | {
    *"DynamicPartition StringSplit StringSplitV2 Unique UniqueV2 Where".split()
}
_OF_SHAPES = {*"OnesLike Rank Shape ShapeN Size ZerosLike".split()}
# What tells the shape of the result, or which branch is taken.
_ASIDE = {
    **dict.fromkeys(_BRANCHES - {"StatelessWhile", "While"}, 0),
    **dict.fromkeys(
        "Reshape BroadcastTo Tile Bincount DenseBincount".split(), 1
    ),
}
_COUNTS = {"Bincount", "DenseBincount"}
_ELEMENTWISE = {
    *"Add AddV2 BiasAdd Div DivNoNan FloorDiv FloorMod Mul MulNoNan".split(),
    *"Pow RealDiv SquaredDifference Sub Maximum Minimum SelectV2".split(),
    *"Equal NotEqual Greater GreaterEqual Less LessEqual".split(),
    *"LogicalAnd LogicalOr".split(),
}
_KINDS: list[tuple[str, Rule]] = [
    ("Sum Mean Prod Max Min All Any ArgMax ArgMin EuclideanNorm", _along(1)),
    ("Cumprod Cumsum CumulativeLogsumexp ReverseV2", _along(1)),
    ("Roll", _along(2)),
    ("LogSoftmax Softmax TopKV2", _along_last),
    (" ".join(_COUNTS), _counted),
    ("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3", _normalised),
    ("Transpose", _transposed),
    ("Reshape", _reshaped),
    ("StridedSlice", _sliced),
    ("BatchMatMul BatchMatMulV2 BatchMatMulV3 MatMul", _product),
    ("Einsum", _einsum),
    ("GatherV2", _gathered),
]
_RULES = {name: rule for names, rule in _KINDS for name in names.split()}
