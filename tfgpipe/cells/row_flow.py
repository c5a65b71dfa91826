"""Follows the rows of a batch through a graph, to where they are mixed.

For each tensor that follows from the batch, it is told along which of its axes
the rows lie. The largest along that axis, a softmax along it or its reversal
mixes rows: `row_rules.py` has what each operation does. Sums over rows, means
and the number of rows are told from others: `row_sums.py`. Loops, branches and
called functions are not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells.row_rules import RULES, left, padded
from tfgpipe.cells.row_states import (
    UNKNOWN,
    Mixed,
    Rows,
    Sizes,
    State,
    States,
    Total,
    is_data,
)
from tfgpipe.cells.row_sums import size, total
from tfgpipe.cells.side_effects import CALLS

# Their results have other rows, or it is not known which.
_OTHER_ROWS = CALLS | {
    *"DynamicPartition StringSplit StringSplitV2 Unique UniqueV2 Where".split()
}
_OF_SHAPES = {*"OnesLike Rank Shape ShapeN Size ZerosLike".split()}
# What tells the shape of the result, or which branch is taken.
_ASIDE = {
    **dict.fromkeys("Case If StatelessCase StatelessIf".split(), 0),
    **dict.fromkeys(
        "Reshape BroadcastTo Tile Bincount DenseBincount".split(), 1
    ),
    "Fill": 0,
}


def follow(
    operations: Iterable[tf.Operation],
    rows: Sequence[tf.Tensor],
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
    num_rows = next((t.shape[0] for t in rows if t.shape.rank), None)
    for op in operations:
        states = [found.get(t.ref()) for t in op.inputs]
        if op.type in _ASIDE:
            states[_ASIDE[op.type]] = None
        if not any(s is not None for s in states):
            continue
        for output in op.outputs:
            if output.ref() not in allowed:
                found[output.ref()] = _state(op, states, output, num_rows)
    return lambda tensor: found.get(tensor.ref())


def _state(
    op: tf.Operation, states: States, output: tf.Tensor, num_rows: int | None
) -> State:
    if op.type in _OF_SHAPES:
        return size(op, states, output)
    mixed = next((s for s in states if isinstance(s, Mixed)), None)
    if mixed is not None:
        return mixed
    if op.type == "RaggedTensorToTensor":
        return padded(op)
    if UNKNOWN in states or op.type in _OTHER_ROWS:
        return UNKNOWN

    def rule(op: tf.Operation, states: States) -> State:
        known = RULES.get(op.type)
        return known(op, states) if known else left(op, states, output)

    if any(isinstance(s, (Total, Sizes)) for s in states):
        found = total(op, states, output, rule, num_rows)
    else:
        found = rule(op, states)
    rank = output.shape.rank or 0
    is_wrong = isinstance(found, Rows) and not 0 <= found.axis < rank
    if is_wrong or (isinstance(found, Mixed) and not is_data(found, output)):
        return UNKNOWN
    return found
