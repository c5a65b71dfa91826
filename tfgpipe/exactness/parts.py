"""Micro-batches as parts of a whole: their rows, along some axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells import Boundary, as_tensor

HOST = "CPU:0"


def first_axes(boundary: Boundary) -> Boundary:
    """Rows along axis 0, as the data have them."""
    return Boundary([0] * len(boundary.tensors), [0] * len(boundary.masks))


def axes_of(parts: Sequence[Boundary], whole: Boundary) -> Boundary:
    """Along which axes parts make a whole.

    None where a tensor is the same in all parts and in the whole, such as
    positions, or a number.
    """
    return Boundary(
        *(
            [_axis(own, all_rows) for *own, all_rows in zip(*boundaries)]
            for boundaries in zip(*parts, whole)
        )
    )


def _axis(parts: Sequence[Any], whole: Any) -> int | None:
    if whole is None or any(t is None for t in parts):
        return None
    shapes = [tuple(t.shape) for t in parts]
    if any(len(shape) != len(whole.shape) for shape in shapes):
        return None
    for axis, size in enumerate(whole.shape):
        sizes = [shape[axis] for shape in shapes]
        if size == sum(sizes) != sizes[0]:
            return axis
    return None


def joined(parts: Sequence[Boundary], axes: Boundary) -> Boundary:
    """The rows of all parts."""
    return Boundary(
        *(
            [_all_of(own, axis) for *own, axis in zip(*boundaries)]
            for boundaries in zip(*parts, axes)
        )
    )


def _all_of(parts: Sequence[Any], axis: int | None) -> Any:
    if axis is None or parts[0] is None or len(parts) == 1:
        return parts[0]
    with tf.device(HOST):
        return tf.concat(parts, axis)


def joined_gradients(parts: Sequence[Any], axis: int | None) -> tf.Tensor:
    """Gradients by rows, or by what all parts have in common."""
    with tf.device(HOST):
        dense = [as_tensor(d) for d in parts]
        return tf.add_n(dense) if axis is None else tf.concat(dense, axis)


def summed(gradients: Sequence[Any]) -> Any:
    """The sum of those that are not None, or None."""
    known = [d for d in gradients if d is not None]
    with tf.device(HOST):
        return tf.add_n(known) if known else None


def first_repeated(
    whole: Boundary, first: Boundary, axes: Boundary
) -> Boundary:
    """The whole, with the rows of the first part in the place of others."""

    def repeated(tensor: Any, part: Any, axis: int | None) -> Any:
        if axis is None or tensor is None:
            return tensor
        with tf.device(HOST):
            indices = tf.range(tensor.shape[axis]) % part.shape[axis]
            return tf.gather(part, indices, axis=axis)

    return Boundary(
        *(
            [repeated(*own) for own in zip(*boundaries)]
            for boundaries in zip(whole, first, axes)
        )
    )


def first_rows(whole: Boundary, first: Boundary, axes: Boundary) -> list[Any]:
    """The tensors of a whole, of which the rows of the first part alone."""
    with tf.device(HOST):
        return [
            tensor
            if axis is None
            else tf.gather(tensor, tf.range(part.shape[axis]), axis=axis)
            for tensor, part, axis in zip(
                whole.tensors, first.tensors, axes.tensors
            )
        ]
