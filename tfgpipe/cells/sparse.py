"""Which slices of a sparse gradient are those of rows of the batch.

A lookup by tokens gives a slice for each row and token, so the slices of a
mini-batch are those of its micro-batches, one after the other. A lookup by
positions gives a slice for each position, which is the sum over the rows: there
the slices of the micro-batches have to be added up. Keras's optimizers do not
merge slices with equal indices, so they would tell the difference. Indices that
are drawn, or follow from what a micro-batch itself has made of state, are its
own, as those of rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfgpipe.cells.side_effects import READS, stateful_kinds

_ARGUMENTS = {"Placeholder", "PlaceholderWithDefault"}


def lookups(gradient: tf.IndexedSlices) -> list[tf.IndexedSlices]:
    """The gradients of the single lookups, which TensorFlow has joined.

    Args:
        gradient: Made by TensorFlow, in a graph.
    """
    values, indices = gradient.values.op, gradient.indices.op
    joins = values.type == indices.type == "ConcatV2"
    if not joins or len(values.inputs) != len(indices.inputs):
        return [gradient]
    *pairs, _ = zip(values.inputs, indices.inputs)  # the last is the axis
    return [
        part
        for value, index in pairs
        for part in lookups(
            tf.IndexedSlices(value, index, gradient.dense_shape)
        )
    ]


class RowDependence:
    """Tells tensors of a graph that follow from the rows of a batch.

    From their values or their number, that is. What follows from the other
    sizes of a batch is the same for all micro-batches.

    Args:
        known: Pairs of tensors and whether they do.
        is_source: Whether the results of an operation do by themselves,
            whatever it takes. None for no.
    """

    def __init__(
        self,
        known: Iterable[tuple[tf.Tensor, bool]],
        is_source: Callable[[tf.Operation], bool] | None = None,
    ):
        self._known = {tensor.ref(): does for tensor, does in known}
        self._is_source = is_source or (lambda op: False)

    def __call__(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor does."""
        waiting = [tensor]
        while waiting:
            if waiting[-1].ref() in self._known:
                waiting.pop()
                continue
            op = waiting[-1].op
            inputs = _read(op)
            unknown = [t for t in inputs if t.ref() not in self._known]
            if not unknown:
                found = any(self._known[t.ref()] for t in inputs)
                found = found or self._is_source(op)
                self._known[waiting.pop().ref()] = found
            waiting.extend(unknown)
        return self._known[tensor.ref()]


def variation(graph: Any, same: Iterable[tf.Tensor]) -> RowDependence:
    """Tells tensors that may be others for each micro-batch.

    All that cannot be shown to be the same for all of them: what follows from
    rows, from draws, from state that a micro-batch changes, from Python.

    Args:
        graph: That of a cell.
        same: The arguments of the cell that are the same for all.
    """
    # What it takes from outside, a task has no part in.
    captured = [inner for _, inner in graph.captures]
    known = [(tensor, False) for tensor in [*same, *captured]]
    return RowDependence(known, _may_vary)


def _may_vary(op: tf.Operation) -> bool:
    """Whether the results of an operation may be others in each run."""
    if op.type in _ARGUMENTS or stateful_kinds([op]):
        return True
    read = [t for t in op.inputs if t.dtype == tf.resource]
    return any(user.type not in READS for t in read for user in t.consumers())


def _read(op: tf.Operation) -> list[tf.Tensor]:
    """What an operation's result follows from."""
    is_size = op.type == "StridedSlice" and op.inputs[0].op.type == "Shape"
    if is_size and not _takes_first(op):
        return []
    return list(op.inputs)


def _takes_first(op: tf.Operation) -> bool:
    """Whether a slice of a vector may have the vector's first element."""
    masks = ("begin_mask", "ellipsis_mask", "new_axis_mask")
    begin, stride = (tf.get_static_value(op.inputs[i]) for i in (1, 3))
    if begin is None or stride is None or any(map(op.get_attr, masks)):
        return True
    first = int(begin[0])
    if first < 0:
        first += op.inputs[0].shape[0] or -first  # of unknown rank: 0
    return first < 1 or int(stride[0]) < 1
