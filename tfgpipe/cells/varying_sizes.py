"""What the sizes of a tensor follow from, apart from its number of rows.

A layer that cuts a batch to its longest row makes the second size of what
follows a matter of the rows. Most sizes are those of what an operation takes;
some are what small integers say, or the values themselves:

    x[:, :n]            follows from the sizes of x, and from n
    reshape(x, (b, n))  from the sizes of x, and from n; b is the first
    boolean_mask(x, m)  from the values
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfgpipe import internals

ARGUMENTS = {"Placeholder", "PlaceholderWithDefault"}
_PADS = {"MirrorPad", "Pad", "PadV2"}
_BY_VALUE = {
    "BooleanMask",
    "DynamicPartition",
    "EagerPyFunc",
    "ListDiff",
    "PyFunc",
    "PyFuncStateless",
    "RaggedTensorToTensor",
    "SparseToDense",
    "Unique",
    "UniqueV2",
    "UniqueWithCounts",
    "UniqueWithCountsV2",
    "Where",
}


class Read(NamedTuple):
    """What something follows from: a tensor, or its sizes after the first."""

    tensor: tf.Tensor
    sizes: bool


def sizes_follow_from(tensor: tf.Tensor) -> list[Read]:
    """What the sizes of a tensor of a graph follow from, after the first."""
    op = tensor.op
    if tensor.shape.rank is not None and None not in tensor.shape[1:].as_list():
        return []
    if op.type in ARGUMENTS:
        return []
    if op.type in _BY_VALUE or internals.takes_functions(op.type):
        return [Read(tensor, False)]
    if op.type == "Transpose":
        order = tf.get_static_value(op.inputs[1])
        stays = order is not None and order[0] == 0
        return [Read(op.inputs[0], stays)]
    return [
        read
        for i, t in enumerate(op.inputs)
        for read in (_sizes_given(t) if _says_sizes(op, i) else [Read(t, True)])
    ]


def _says_sizes(op: tf.Operation, i: int) -> bool:
    """Whether an input is one of a few integers, such as a shape."""
    tensor = op.inputs[i]
    if not tensor.dtype.is_integer:
        return tensor.shape.rank is None
    is_small = tensor.shape.rank is None or tensor.shape.rank < 2
    return is_small or (op.type in _PADS and i == 1)


def _sizes_given(shape: tf.Tensor) -> list[Read]:
    """What the elements of a shape follow from, after the first."""
    op = shape.op
    if op.type in ("Cast", "Identity"):
        return _sizes_given(op.inputs[0])
    if op.type == "Pack":
        return [Read(t, False) for t in op.inputs[1:]]
    if op.type == "Shape":
        return [Read(op.inputs[0], True)]
    if op.type == "StridedSlice" and shape.shape.rank == 1:
        return _sizes_given(op.inputs[0])
    if op.type == "ConcatV2":
        first, *others, _ = op.inputs
        return [*_sizes_given(first), *(Read(t, False) for t in others)]
    return [Read(shape, False)]
