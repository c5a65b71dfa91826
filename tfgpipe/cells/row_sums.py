"""What operations do with sums over the rows of a batch, and their number.

Of each the power of the number of rows is followed, see `Total`: it falls where
something is divided by the number. What is not linear in sums, or adds sums of
different powers, is as good as mixed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfgpipe.cells.row_states import (
    UNKNOWN,
    Mixed,
    Rows,
    Rule,
    Sizes,
    State,
    States,
    Total,
    is_data,
)

_PRODUCTS = {
    *"BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum MatMul".split(),
    *"Div DivNoNan Mul MulNoNan RealDiv".split(),
}
_QUOTIENTS = {"Div", "DivNoNan", "RealDiv"}
_SUMS = {*"Add AddN AddV2 BiasAdd ConcatV2 Pack SelectV2 Sub".split()}
# Linear in their first input, and given no other that follows from rows.
_LINEAR = {
    *"Cast CheckNumerics EnsureShape ExpandDims GatherV2 Identity".split(),
    *"Mean Neg Pad PlaceholderWithDefault PreventGradient Reshape".split(),
    *"Slice Snapshot Split SplitV Squeeze StopGradient".split(),
    *"StridedSlice Sum Transpose Unpack".split(),
}
_POWERS = {"Inv": -1, "Reciprocal": -1, "Rsqrt": -0.5, "Sqrt": 0.5, "Square": 2}
_OF_CONSTANTS: dict[str, Any] = {
    "AddV2": np.add,
    "Cast": np.asarray,
    "Maximum": np.maximum,
    "Mul": np.multiply,
    "RealDiv": np.divide,
}
_SMALL = 1e-3  # such as keeps from dividing by zero


def size(op: tf.Operation, states: States, output: tf.Tensor) -> State:
    """What an operation tells of the shape of a tensor."""
    state = states[output.value_index if op.type == "ShapeN" else 0]
    axis = state.axis if isinstance(state, (Rows, Total)) else None
    if axis is None or op.type not in ("Shape", "ShapeN", "Size"):
        return None
    if op.type == "Size":
        return Total(op, 1, is_count=True)
    return Sizes(op, axis)


def total(
    op: tf.Operation,
    states: States,
    output: tf.Tensor,
    rule: Rule,
    num_rows: int | None,
) -> State:
    """The state of a result, where one of the inputs is a `Total` or `Sizes`.

    Args:
        op: The operation.
        states: Those of its inputs.
        output: Which of its results.
        rule: What it does with rows.
        num_rows: That of the batch, or None if it is not known.
    """
    first = states[0]
    if isinstance(first, Sizes):
        return _of_sizes(op, first, output)
    states = [None if isinstance(s, Sizes) else s for s in states]
    if not any(isinstance(s, Total) for s in states):
        return rule(op, states) if any(states) else None
    if op.type == "IdentityN":
        return states[output.value_index]
    if isinstance(first, Total):
        if op.type in _LINEAR and not any(states[1:]):
            return _scaled(op, states, rule, 0)
        if op.type in _POWERS and first.is_count:
            return first._replace(power=first.power * _POWERS[op.type])
    if op.type in _SUMS:
        return _added(op, states)
    if op.type in _PRODUCTS:
        return _multiplied(op, states, rule, num_rows)
    return _other(op, states, rule)


def _of_sizes(op: tf.Operation, sizes: Sizes, output: tf.Tensor) -> State:
    """What is taken out of a shape: the number of rows, or not."""
    if op.type in ("Cast", "Identity"):
        return sizes
    index: Any = None
    if op.type == "Prod":
        return Total(sizes.op, 1, is_count=True)
    elif op.type == "Unpack":
        index = output.value_index
    elif op.type == "GatherV2":
        index = tf.get_static_value(op.inputs[1])
    elif op.type == "StridedSlice":
        places = np.arange(op.inputs[0].shape[0] or 0)
        where = _sliced(op, places) if len(places) else None
        if where is not None and np.ndim(where):
            found = np.flatnonzero(where == sizes.axis)
            return Sizes(sizes.op, int(found[0])) if len(found) else None
        index = where
    if index is None or np.ndim(index):
        return None
    is_rows = int(index) % (op.inputs[0].shape[0] or 1) == sizes.axis
    return Total(sizes.op, 1, is_count=True) if is_rows else None


def _sliced(op: tf.Operation, vector: Any) -> Any:
    """What a slice takes of a vector, or None if that is not known."""
    ends = [tf.get_static_value(t) for t in op.inputs[1:]]
    masks = ("ellipsis_mask", "new_axis_mask")
    if any(end is None or len(end) != 1 for end in ends):
        return None
    if any(map(op.get_attr, masks)):
        return None
    start, stop, step = (int(end[0]) for end in ends)
    if op.get_attr("shrink_axis_mask"):
        return vector[start]
    from_first = bool(op.get_attr("begin_mask"))
    to_last = bool(op.get_attr("end_mask"))
    return vector[
        None if from_first else start : None if to_last else stop : step
    ]


def _scaled(
    op: tf.Operation, states: States, rule: Rule, power: float
) -> State:
    """What becomes of a total that is moved, added up, or multiplied."""
    of_rows = [
        Rows(s.axis) if isinstance(s, Total) and s.axis is not None else s
        for s in states
    ]
    own = next(s for s in states if isinstance(s, Total))
    power += own.power
    if own.axis is None:
        return own._replace(power=power)
    found = rule(op, of_rows)
    if isinstance(found, Total):
        return found._replace(power=found.power + power)
    if isinstance(found, Rows) and power:
        return Total(own.op, power, found.axis)
    return found


def _added(op: tf.Operation, states: States) -> State:
    """The sum of several, or all of them side by side."""
    totals = [s for s in states if isinstance(s, Total)]
    is_joined = op.type in ("ConcatV2", "Pack")
    if is_joined and all(t.is_count for t in totals):
        return None  # a shape
    worst = next((t for t in totals if t.power), totals[0])
    pairs = [*zip(op.inputs, states)]
    if op.type == "SelectV2" and pairs.pop(0)[1] is not None:
        return Mixed(worst.op)
    if op.type == "ConcatV2":
        pairs.pop()
    others = [s for _, s in pairs if s is not None and s not in totals]
    constants = [tensor for tensor, s in pairs if s is None]
    is_alike = len({(t.power, t.axis) for t in totals}) == 1
    if others or not is_alike:
        return Mixed(worst.op)
    if constants and worst.power and not all(map(_is_small, constants)):
        return Mixed(worst.op)
    return worst._replace(is_count=all(t.is_count for t in totals))


def _is_small(tensor: tf.Tensor) -> bool:
    value = _constant(tensor)
    return value is not None and bool(np.all(np.abs(value) < _SMALL))


def _multiplied(
    op: tf.Operation, states: States, rule: Rule, num_rows: int | None
) -> State:
    """A product or a quotient."""
    power, counts, others = 0.0, [], []
    for i, s in enumerate(states):
        is_below = i == 1 and op.type in _QUOTIENTS
        if isinstance(s, Total) and s.is_count:
            power += -s.power if is_below else s.power
            counts.append(s)
        elif s is not None:
            others.append(s)
            if is_below and isinstance(s, Total):
                return Mixed(s.op)
    if not others:
        return counts[0]._replace(power=power) if power else None
    totals = [s for s in others if isinstance(s, Total)]
    if totals and len(others) > 1:
        return Mixed(totals[0].op)
    if totals and not counts:
        power -= _divides(op, states, num_rows) * (totals[0].power > 0)
    rest = [None if s in counts else s for s in states]
    if totals:
        return _scaled(op, rest, rule, power)
    found = rule(op, rest)
    if isinstance(found, Total):
        return found._replace(power=found.power + power)
    if isinstance(found, Rows) and power:
        return Total(counts[0].op, power, found.axis)
    return found


def _divides(op: tf.Operation, states: States, num_rows: int | None) -> bool:
    """Whether a constant is a known number of rows, or one divided by it."""
    if not num_rows or None not in states:
        return False
    value = _constant(op.inputs[states.index(None)])
    if value is None or np.size(value) != 1 or not np.all(np.isreal(value)):
        return False
    number = float(np.real(np.ravel(value)[0]))
    if not number:
        return False
    quotient = (number if op.type in _QUOTIENTS else 1 / number) / num_rows
    return round(quotient) > 0 and abs(quotient - round(quotient)) < 1e-5


def _constant(tensor: tf.Tensor) -> Any:
    """The value of a tensor that follows from constants, or None."""
    value = tf.get_static_value(tensor)
    function = _OF_CONSTANTS.get(tensor.op.type)
    if value is not None or function is None:
        return value
    values = [_constant(t) for t in tensor.op.inputs]
    if any(v is None for v in values):
        return None
    with np.errstate(all="ignore"):
        return function(*values)


def _other(op: tf.Operation, states: States, rule: Rule) -> State:
    """What is not linear; the number of rows may tell a shape, though."""
    rest: list[State] = []
    for tensor, s in zip(op.inputs, states):
        if not isinstance(s, Total):
            rest.append(s)
        elif is_data(s, tensor):
            is_guard = op.type in ("Maximum", "Minimum") and None in states
            return s if s.is_count and is_guard else Mixed(s.op)
        elif s.is_count:
            rest.append(None)
        else:
            return UNKNOWN
    if not any(s is not None for s in rest):
        is_guard = op.type in ("Maximum", "Minimum")
        return next(s for s in states if s is not None) if is_guard else None
    return rule(op, rest)
