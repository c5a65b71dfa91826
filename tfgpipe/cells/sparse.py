"""Which slices of a sparse gradient are those of rows of the batch.

A lookup by tokens gives a slice for each row and token, so the slices of a
mini-batch are those of its micro-batches, one after the other. A lookup by
positions gives a slice for each position, which is the sum over the rows: there
the slices of the micro-batches have to be added up. Keras's optimizers do not
merge slices with equal indices, so they would tell the difference.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf


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
        sources: The tensors of the batch.
    """

    def __init__(self, sources: Iterable[tf.Tensor]):
        self._known = {tensor.ref(): True for tensor in sources}

    def __call__(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor does."""
        waiting = [tensor]
        while waiting:
            if waiting[-1].ref() in self._known:
                waiting.pop()
                continue
            inputs = _read(waiting[-1].op)
            unknown = [t for t in inputs if t.ref() not in self._known]
            if not unknown:
                found = any(self._known[t.ref()] for t in inputs)
                self._known[waiting.pop().ref()] = found
            waiting.extend(unknown)
        return self._known[tensor.ref()]


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
