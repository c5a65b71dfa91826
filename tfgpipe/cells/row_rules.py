"""What operations do with the rows of a batch.

The rows lie along an axis of a tensor, in their order, each with one element or
several. An operation leaves them there, moves them to another axis, or mixes
them. What is not listed is taken to leave them, if the shapes of its results
allow that; where not, nothing is claimed.
"""

from __future__ import annotations

import tensorflow as tf

from tfgpipe.cells.row_states import (
    UNKNOWN,
    Mixed,
    Rows,
    Rule,
    State,
    States,
    Total,
)


def left(op: tf.Operation, states: States, output: tf.Tensor) -> State:
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
            is_sum = op.type in ("Mean", "Sum")
            return Total(op, int(op.type == "Sum")) if is_sum else Mixed(op)
        if op.outputs[0].shape.rank == rank:
            return state
        return Rows(state.axis - sum(axis < state.axis for axis in axes))

    return rule


def _whole(op: tf.Operation, states: States) -> State:
    return Total(op, 1)


def _along_last(op: tf.Operation, states: States) -> State:
    rank = op.inputs[0].shape.rank
    return Mixed(op) if rank and states[0] == Rows(rank - 1) else states[0]


def _counted(op: tf.Operation, states: States) -> State:
    """Counts over all elements, or over the second of two axes."""
    is_whole = op.type == "Bincount" or op.inputs[0].shape.rank == 1
    return Total(op, 1) if is_whole else states[0]


def padded(op: tf.Operation) -> State:
    """Ragged rows, made as long as the longest one, or as is told."""
    told = tf.get_static_value(op.inputs[0], partial=True)
    if told is None or None in (sizes := told.flatten().tolist()):
        return UNKNOWN
    return Mixed(op) if told.ndim == 0 or -1 in sizes[1:] else Rows(0)


def _normalised(op: tf.Operation, states: States) -> State:
    channels = {b"NHWC": 3, b"NDHWC": 4}.get(op.get_attr("data_format"), 1)
    is_one = states[0] == Rows(0) and op.inputs[0].shape[0] == 1
    is_apart = is_one or states[0] in (None, Rows(channels))
    if op.get_attr("is_training"):
        return UNKNOWN if is_apart else Mixed(op)
    return states[0]


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
    if not rows or not after[axis]:
        return Rows(axis)
    is_whole = 0 in (after[axis] % rows, rows % after[axis])
    return Rows(axis) if is_whole else UNKNOWN


def _packed(op: tf.Operation, states: States) -> State:
    axes = {s.axis for s in states if isinstance(s, Rows)}
    rank = op.outputs[0].shape.rank
    if len(axes) != 1 or not rank:
        return UNKNOWN
    axis = axes.pop()
    return Rows(axis + (op.get_attr("axis") % rank <= axis))


def _unpacked(op: tf.Operation, states: States) -> State:
    state, rank = states[0], op.inputs[0].shape.rank
    axis = op.get_attr("axis") % rank if rank else None
    if axis is None or not isinstance(state, Rows) or axis == state.axis:
        return UNKNOWN
    return Rows(state.axis - (axis < state.axis))


def _expanded(op: tf.Operation, states: States) -> State:
    state, axes = states[0], _axes(op.inputs[1], op.outputs[0].shape.rank)
    if axes is None or not isinstance(state, Rows):
        return UNKNOWN
    return Rows(state.axis + (axes[0] <= state.axis))


def _sliced(op: tf.Operation, states: States) -> State:
    """Some places of a micro-batch are other rows than of a mini-batch."""
    masks = ("new_axis_mask", "shrink_axis_mask")
    if states[0] != Rows(0) or any(op.get_attr(mask) & 1 for mask in masks):
        return UNKNOWN  # as in a loop over rows, one by one
    ends = [tf.get_static_value(t, partial=True) for t in op.inputs[1:]]
    is_known = all(end is not None and len(end) for end in ends)
    if op.get_attr("ellipsis_mask") & 1 or not is_known:
        return left(op, states, op.outputs[0])
    start, stop, step = (end[0] for end in ends)
    rows = op.inputs[0].shape[0]
    from_first = op.get_attr("begin_mask") & 1 or start == 0
    is_end = op.get_attr("end_mask") & 1 or stop is None
    to_last = is_end or (rows is not None and stop >= rows)
    if step is None or (from_first and to_last and step == 1):
        return left(op, states, op.outputs[0])
    if start is None or step not in (1, -1):  # of several elements of each?
        return UNKNOWN
    return Mixed(op)


def _product(op: tf.Operation, states: States) -> State:
    """A matrix product, of single matrices or of many."""
    name = "transpose" if op.type == "MatMul" else "adj"
    letters = ("a", "b") if op.type == "MatMul" else ("x", "y")
    rank, axes, is_sum = op.outputs[0].shape.rank, set(), False
    for i, (tensor, state) in enumerate(zip(op.inputs, states)):
        own = tensor.shape.rank
        if rank is None or own is None:
            return UNKNOWN
        if not isinstance(state, Rows):
            continue
        turned = bool(op.get_attr(f"{name}_{letters[i]}"))
        summed = own - 2 if turned != (i == 1) else own - 1
        is_sum |= state.axis == summed
        if state.axis != summed:
            is_matrix = state.axis >= own - 2
            axes.add(rank - 2 + i if is_matrix else state.axis + rank - own)
    if is_sum:
        return Mixed(op) if axes else Total(op, 1)
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
    if letters:
        return Mixed(op)
    if letter not in result:
        return Total(op, 1)
    return Rows(result.index(letter))


def _gathered(op: tf.Operation, states: States) -> State:
    """Looked up for each row, or elsewhere than among rows."""
    axes = _axes(op.inputs[2], op.inputs[0].shape.rank)
    table, where = states[0], states[1]
    if axes is None:
        return UNKNOWN if where else left(op, states, op.outputs[0])
    if table is None and isinstance(where, Rows):
        batch = op.get_attr("batch_dims")
        batch += (op.inputs[1].shape.rank or 0) * (batch < 0)
        is_batch = where.axis < batch
        return where if is_batch else Rows(axes[0] + where.axis - batch)
    is_row_wise = where is None or op.get_attr("batch_dims")
    is_elsewhere = table == Rows(0) and where in (None, Rows(0)) and axes[0]
    return Rows(0) if is_elsewhere and is_row_wise else UNKNOWN


_KINDS: list[tuple[str, Rule]] = [
    ("Add AddV2 BiasAdd Sub Mul MulNoNan SquaredDifference", _broadcast),
    ("Div DivNoNan FloorDiv FloorMod RealDiv TruncateDiv", _broadcast),
    ("Atan2 Complex Pow Maximum Minimum SelectV2 Xdivy Xlogy", _broadcast),
    ("Equal NotEqual Greater GreaterEqual Less LessEqual", _broadcast),
    ("LogicalAnd LogicalOr BroadcastTo", _broadcast),
    ("Sum Mean Prod Max Min All Any ArgMax ArgMin EuclideanNorm", _along(1)),
    ("Cumprod Cumsum CumulativeLogsumexp ReverseV2", _along(1)),
    ("Roll", _along(2)),
    ("L2Loss", _whole),
    ("LogSoftmax Softmax TopKV2", _along_last),
    ("Bincount DenseBincount", _counted),
    ("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3", _normalised),
    ("Transpose ConjugateTranspose", _transposed),
    ("Reshape", _reshaped),
    ("Pack", _packed),
    ("Unpack", _unpacked),
    ("ExpandDims", _expanded),
    ("StridedSlice", _sliced),
    ("BatchMatMul BatchMatMulV2 BatchMatMulV3 MatMul", _product),
    ("Einsum", _einsum),
    ("GatherV2", _gathered),
]
RULES = {name: rule for names, rule in _KINDS for name in names.split()}
