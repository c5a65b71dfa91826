"""Splits a mini-batch into micro-batches and joins what comes out of them.

Micro-batch m of a mini-batch of N rows holds the rows from `N * m // M` to
`N * (m + 1) // M`: sizes differ by one at most, no row is dropped, repeated or
padded.

Where N is known only at run time it may be smaller than M, and some
micro-batches are empty then. Kernels that abort on tensors of zero rows exist
(oneDNN's max-pooling gradient), so an empty micro-batch computes one real row,
and counts for nothing: its size, fraction and outputs are empty.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 2.2
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.devices import names
from tfgpipe.inputs import batch_dimension
from tfgpipe.internals import Nest


class MicroBatches:
    """The micro-batches of one mini-batch: which rows each has.

    Args:
        x: The mini-batch's inputs, a nest of tensors of shape (batch, ...).
        num_micro_batches: M, at least 1. Where the number of rows is known
            and smaller than M, there are only as many micro-batches as rows.

    Attributes:
        count: Micro-batches there are.
        num_rows: Rows of the mini-batch, an int or a scalar int32 tensor.
        uniform: Whether all have the same, known number of rows.
    """

    def __init__(self, x: Nest, num_micro_batches: int):
        is_split = num_micro_batches > 1
        static = batch_dimension(x, "x", is_split)
        if static is None:
            leaves = [t for t in tree.flatten(x) if t is not None]
            rows = [tf.shape(t)[0] for t in leaves[: 1 if is_split else None]]
            with tf.control_dependencies([_assert_rows(tf.add_n(rows))]):
                self.num_rows: Any = tf.identity(rows[0])
            self.count = num_micro_batches
        else:
            self.num_rows = static
            self.count = min(num_micro_batches, static) or 1
        self.is_static = static is not None
        # A merged mini-batch has no row of its first leaf, but others.
        self._all_have_rows = self.is_static or self.count == 1
        self.uniform = static is not None and static % self.count == 0
        self._bounds = [
            self.num_rows * m // self.count for m in range(self.count + 1)
        ]

    def split(self, nest: Nest) -> list[Nest]:
        """Returns the nest's rows of every micro-batch: `count` nests."""
        return [
            tree.map_structure(lambda t, m=m: self._rows(t, m), nest)
            for m in range(self.count)
        ]

    def _rows(self, tensor: tf.Tensor, m: int) -> tf.Tensor:
        if tensor is None or self.count == 1:
            return tensor
        low, high = self._bounds[m], self._bounds[m + 1]
        if not self.is_static:  # an empty micro-batch gets one real row
            low = tf.minimum(low, self.num_rows - 1)
            high = tf.maximum(high, low + 1)
        return tensor[low:high]

    def join(self, nests: list[Nest]) -> Nest:
        """Undoes `split`: `count` nests to one, of the mini-batch's rows."""
        if self.count == 1:
            return nests[0]

        def concatenate(*tensors: Any) -> Any:
            if tensors[0] is None:
                return None
            if not self.is_static:
                tensors = tuple(
                    t[: self.size(m)] for m, t in enumerate(tensors)
                )
            return tf.concat(tensors, 0)

        return tree.map_structure(concatenate, *nests)

    def check_output(self, tensor: tf.Tensor, m: int) -> None:
        """Refuses an output that has not a row for each of micro-batch m.

        Raises:
            ValueError: If that is known. Where it is known only at run time,
                `tf.errors.InvalidArgumentError` then.
        """
        message = (
            "Outputs must have a row for each row of the inputs, if there is "
            "more than one micro-batch. Pass num_micro_batches=1."
        )
        size = tensor.shape[0] if tensor.shape.rank else 0
        if not self.is_static and size is None:
            check_rows_later(tensor, tf.maximum(self.size(m), 1), message)
        elif not self.is_static or size not in (None, self.size(m)):
            raise ValueError(
                f"{message} Received: shape {tuple(tensor.shape)} for "
                f"{'any' if not self.is_static else self.size(m)} rows."
            )

    def size(self, m: int) -> Any:
        """Rows of micro-batch m, an int or a scalar int32 tensor."""
        return self._bounds[m + 1] - self._bounds[m]

    def fraction(self, m: int, dtype: str) -> tf.Tensor:
        """Share of the mini-batch's rows that micro-batch m has."""
        if self.count == 1:
            return tf.ones([], dtype)
        wide = "float64" if dtype in ("float64", "complex128") else "float32"
        rows = tf.cast(self.size(m), wide)
        return tf.cast(rows / tf.cast(self.num_rows, wide), dtype)

    def rank(self, m: int) -> Any:
        """Returns how many micro-batches with rows come before micro-batch m.

        For m = `count` it is the number of micro-batches that have rows.
        """
        return m if self._all_have_rows else tf.minimum(m, self._bounds[m])

    def select(self, m: int, value: Nest, otherwise: Nest) -> Nest:
        """`value` where micro-batch m has rows, else `otherwise`."""
        if self._all_have_rows:
            return value
        return tf.where(self.size(m) > 0, value, otherwise)

    def spec(self, tensor: tf.Tensor) -> tf.TensorSpec:
        """Returns the spec of a tensor of all micro-batches."""
        shape = tensor.shape
        if not self.uniform and shape.rank:
            shape = tf.TensorShape([None, *shape[1:]])
        return tf.TensorSpec(shape, tensor.dtype)


def check_rows_later(
    tensor: tf.Tensor, num_rows: tf.Tensor, message: str
) -> None:
    """Refuses another number of rows of a tensor at run time."""
    rows = tf.shape(tensor)[0]
    # Devices that only compile have no strings.
    with tf.device(names.host_of(rows.device)):
        check = tf.debugging.assert_equal(rows, num_rows, message=message)
    if check is not None:
        internals.run_independently(check)


def _assert_rows(num_rows: tf.Tensor) -> Any:
    return tf.debugging.assert_positive(
        num_rows,
        message="A batch must have at least one row. Received: a batch with "
        "zero rows. Drop empty batches from the data.",
    )


def structure_of(nest: Nest) -> Any:
    """A nest like this one, with the position of each leaf in the flat nest.

    A tensor that comes several times has the position at which it came first:
    if a layer takes off its mask, as attentions do, none of them has one.
    """
    flat = tree.flatten(nest)
    places = {id(leaf): i for i, leaf in reversed([*enumerate(flat)])}
    leaves = [
        places[id(leaf)] if tf.is_tensor(leaf) else i
        for i, leaf in enumerate(flat)
    ]
    return tree.pack_sequence_as(nest, leaves)
