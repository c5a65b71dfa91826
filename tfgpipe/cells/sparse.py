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
from tfgpipe.cells.varying_sizes import ARGUMENTS, Read, sizes_follow_from


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
    sizes of a batch is the same for all micro-batches, unless the sizes follow
    from rows, see `varying_sizes.py`.

    Args:
        known: Pairs of tensors and whether they do.
        is_source: Whether the results of an operation do by themselves,
            whatever it takes. None for no.
        resized: Arguments whose other sizes follow from rows.
    """

    def __init__(
        self,
        known: Iterable[tuple[tf.Tensor, bool]],
        is_source: Callable[[tf.Operation], bool] | None = None,
        resized: Iterable[tf.Tensor] = (),
    ):
        self._known = {(t.ref(), False): does for t, does in known}
        self._known.update({(t.ref(), True): True for t in resized})
        self._is_source = is_source or (lambda op: False)

    def __call__(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor does."""
        return self._follow(Read(tensor, False))

    def resizes(self, tensor: tf.Tensor) -> bool:
        """Whether the sizes of a tensor do, other than its first."""
        return self._follow(Read(tensor, True))

    def _follow(self, start: Read) -> bool:
        waiting = [start]
        while waiting:
            tensor, sizes = waiting[-1]
            key = tensor.ref(), sizes
            if key in self._known:
                waiting.pop()
                continue
            reads = sizes_follow_from(tensor) if sizes else _reads(tensor.op)
            keys = [(r.tensor.ref(), r.sizes) for r in reads]
            unknown = [r for r, k in zip(reads, keys) if k not in self._known]
            if not unknown:
                found = any(self._known[k] for k in keys)
                own = not sizes and self._is_source(tensor.op)
                self._known[key] = found or own
                waiting.pop()
            waiting.extend(unknown)
        return self._known[start.tensor.ref(), start.sizes]


def variation(
    graph: Any, same: Iterable[tf.Tensor], resized: Iterable[tf.Tensor]
) -> RowDependence:
    """Tells tensors that may be others for each micro-batch.

    All that cannot be shown to be the same for all of them: what follows from
    rows, from draws, from state that a micro-batch changes, from Python.

    Args:
        graph: That of a cell.
        same: The arguments of the cell that are the same for all.
        resized: Those whose sizes may be others, apart from the first.
    """
    # What it takes from outside, a task has no part in.
    captured = [inner for _, inner in graph.captures]
    known = [(tensor, False) for tensor in [*same, *captured]]
    return RowDependence(known, _may_vary, resized)


def _may_vary(op: tf.Operation) -> bool:
    """Whether the results of an operation may be others in each run."""
    if op.type in ARGUMENTS or stateful_kinds([op]):
        return True
    read = [t for t in op.inputs if t.dtype == tf.resource]
    return any(user.type not in READS for t in read for user in t.consumers())


def _reads(op: tf.Operation) -> list[Read]:
    """What an operation's result follows from."""
    is_size = op.type == "StridedSlice" and op.inputs[0].op.type == "Shape"
    if is_size and not _takes_first(op):
        return [Read(op.inputs[0].op.inputs[0], True)]
    return [Read(t, False) for t in op.inputs]


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
