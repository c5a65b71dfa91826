"""Follows the rows of a batch through a graph, to where they are mixed.

For each tensor that follows from the batch, it is told along which of its axes
the rows lie. A sum over that axis, a matrix product along it or its reversal
mixes rows: `row_rules.py` has what each operation does. Loops, branches and
called functions are not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import tensorflow as tf

from tfgpipe.cells.row_rules import (
    RULES,
    UNKNOWN,
    Mixed,
    Rows,
    State,
    States,
    left,
    padded,
)
from tfgpipe.cells.values import is_continuous

_BRANCHES = {*"Case If StatelessCase StatelessIf StatelessWhile While".split()}
# Their results have other rows, or it is not known which.
_OTHER_ROWS = _BRANCHES | {
    *"DynamicPartition StringSplit StringSplitV2 Unique UniqueV2 Where".split(),
    *"PartitionedCall StatefulPartitionedCall".split(),
}
_OF_SHAPES = {*"OnesLike Rank Shape ShapeN Size ZerosLike".split()}
# What tells the shape of the result, or which branch is taken.
_ASIDE = {
    **dict.fromkeys(_BRANCHES - {"StatelessWhile", "While"}, 0),
    **dict.fromkeys(
        "Reshape BroadcastTo Tile Bincount DenseBincount".split(), 1
    ),
}
# Of integers, which are data all the same.
_COUNTS = {"Bincount", "DenseBincount"}


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
        return padded(op)
    if UNKNOWN in states or op.type in _OTHER_ROWS:
        return UNKNOWN
    if op.type in RULES:
        found = RULES[op.type](op, states)
    else:
        found = left(op, states, output)
    rank = output.shape.rank or 0
    is_wrong = isinstance(found, Rows) and not 0 <= found.axis < rank
    if is_wrong or (isinstance(found, Mixed) and not _is_data(output)):
        return UNKNOWN
    return found


def _is_data(tensor: tf.Tensor) -> bool:
    """Not a length or an index, by which nothing but a shape may follow."""
    return is_continuous(tensor) or tensor.op.type in _COUNTS
