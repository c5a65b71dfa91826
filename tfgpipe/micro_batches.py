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

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.devices import names

# Of a mini-batch that is merged, as graphs are, no row is one of an example.
_MERGED = (
    "Check how the data is batched. Where examples are merged, as graphs of "
    "different sizes are, pass num_micro_batches=1 and no replicas, or pad "
    "them: a row for each example."
)


def batch_dimension(nest: Any, name: str, is_split: bool = True) -> int | None:
    """Returns the number of rows of a nest of tensors, None if known later.

    Args:
        nest: Tensors of shape (batch, ...); None leaves are skipped.
        name: What to call the nest in an error.
        is_split: Whether rows go apart, so that all leaves must have as many.
            Else those of the first leaf count, as for Keras.

    Raises:
        ValueError: If a leaf is no dense tensor with a batch dimension, two
            leaves disagree, or there are no rows.
    """
    known: list[int | None] = []
    for leaf in tree.flatten(nest):
        if leaf is None:
            continue
        check_dense(leaf, name)
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (0, None):
            raise ValueError(
                f"`{name}` must hold dense tensors of shape (batch, ...). "
                f"Received: {leaf}. Batch the data."
            )
        known.append(leaf.shape[0])
    different = {count for count in known if count is not None}
    if is_split and len(different) > 1:
        raise ValueError(
            f"`{name}` must have the same number of rows everywhere. "
            f"Received: {sorted(different)} rows. {_MERGED}"
        )
    if different == {0}:
        raise ValueError(
            f"`{name}` must have at least one row. Received: a batch with "
            "shapes "
            f"{[tuple(t.shape) for t in tree.flatten(nest) if t is not None]}."
            " Drop empty batches from the data."
        )
    if is_split:
        return next(iter(different), None)
    return next(iter(known), None)


def is_dense(leaf: Any) -> bool:
    """Whether a leaf of data, or a spec of one, is neither sparse nor ragged.

    SciPy's matrices are sparse, too.
    """
    others = (
        tf.SparseTensor,
        tf.SparseTensorSpec,
        tf.RaggedTensor,
        tf.RaggedTensorSpec,
    )
    return not isinstance(leaf, others) and not hasattr(leaf, "tocoo")


def check_dense(nest: Any, name: str) -> None:
    """Refuses data, or specs of data, that are sparse or ragged.

    Args:
        nest: What is checked; None leaves are skipped.
        name: What to call the nest in an error.

    Raises:
        ValueError: If a leaf is sparse or ragged.
    """
    for leaf in tree.flatten(nest):
        if is_dense(leaf):
            continue
        kind = type(leaf).__name__.removesuffix("Spec")
        is_ragged = kind == "RaggedTensor"
        raise ValueError(
            f"`{name}` must hold dense tensors of shape (batch, ...), whose "
            f"rows fall into micro-batches. Received: a {kind} of shape "
            f"{tuple(leaf.shape)}. "
            + (
                "Pad it: `tensor.to_tensor()`, or each mini-batch of a dataset "
                "by `dataset.map(lambda x, y: (x.to_tensor(), y))`."
                if is_ragged
                else "Make it dense: `tf.sparse.to_dense(tensor)`, or "
                "`matrix.toarray()` of SciPy's; or, where all rows would take "
                "too much memory, each mini-batch: `tf.data.Dataset"
                ".from_tensor_slices((x, y)).batch(32).map(lambda x, y: "
                "(tf.sparse.to_dense(x), y))`, with `x` a `tf.SparseTensor`."
            )
        )


def first_tensor(nest: Any) -> Any:
    """The first leaf of a nest that is not None: it has the nest's rows."""
    return next(t for t in tree.flatten(nest) if t is not None)


class MicroBatches:
    """How the rows of one mini-batch fall into micro-batches.

    Args:
        x: The mini-batch's inputs, a nest of tensors of shape (batch, ...).
        num_micro_batches: M, at least 1. Where the number of rows is known
            and smaller than M, there are only as many micro-batches as rows.

    Attributes:
        count: Micro-batches there are.
        num_rows: Rows of the mini-batch, an int or a scalar int32 tensor.
        uniform: Whether all have the same, known number of rows.
    """

    def __init__(self, x: Any, num_micro_batches: int):
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

    def split(self, nest: Any) -> list[Any]:
        """The nest's rows of every micro-batch: `count` nests."""
        return [
            tree.map_structure(lambda t, m=m: self._rows(t, m), nest)
            for m in range(self.count)
        ]

    def _rows(self, tensor: Any, m: int) -> Any:
        if tensor is None or self.count == 1:
            return tensor
        low, high = self._bounds[m], self._bounds[m + 1]
        if not self.is_static:  # an empty micro-batch gets one real row
            low = tf.minimum(low, self.num_rows - 1)
            high = tf.maximum(high, low + 1)
        return tensor[low:high]

    def join(self, nests: list[Any]) -> Any:
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
            rows, size = tf.maximum(self.size(m), 1), tf.shape(tensor)[0]
            # Devices that only compile have no strings.
            with tf.device(names.host_of(size.device)):
                check = tf.debugging.assert_equal(size, rows, message=message)
            if check is not None:
                internals.run_independently(check)
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
        """How many micro-batches that have rows come before micro-batch m.

        For m = `count` it is the number of micro-batches that have rows.
        """
        return m if self._all_have_rows else tf.minimum(m, self._bounds[m])

    def select(self, m: int, value: Any, otherwise: Any) -> Any:
        """`value` where micro-batch m has rows, else `otherwise`."""
        if self._all_have_rows:
            return value
        return tf.where(self.size(m) > 0, value, otherwise)

    def spec(self, tensor: tf.Tensor) -> tf.TensorSpec:
        """What one traced function for all micro-batches expects."""
        shape = tensor.shape
        if not self.uniform and shape.rank:
            shape = tf.TensorShape([None, *shape[1:]])
        return tf.TensorSpec(shape, tensor.dtype)


def check_rows(
    x: Any, y: Any, sample_weight: Any, is_split: bool = True
) -> list[tf.Operation]:
    """Refuses a mini-batch whose parts have different numbers of rows.

    Where it is not split, only one without any rows.

    Returns:
        What checks numbers of rows that are known only at run time. It fails
        with a `tf.errors.InvalidArgumentError`.

    Raises:
        ValueError: If the numbers are known and differ.
    """
    rows = batch_dimension(x, "x", is_split)
    first = first_tensor(x)
    checks = []
    for name, nest in (("x", x), ("y", y), ("sample_weight", sample_weight)):
        other = batch_dimension(nest, name, is_split)
        if not is_split:
            continue
        message = f"`{name}` must have as many rows as `x`."
        if rows is not None and other is not None and rows != other:
            raise ValueError(
                f"{message} Received: {rows} rows of x and {other} of {name}. "
                f"{_MERGED}"
            )
        if name == "x":
            message = "`x` must have the same number of rows everywhere."
        for leaf in tree.flatten(nest):
            if leaf is None or leaf is first:
                continue
            if None in (first.shape[0], leaf.shape[0]):
                checks.append(
                    tf.debugging.assert_equal(
                        tf.shape(leaf)[0],
                        tf.shape(first)[0],
                        message=f"{message} {_MERGED}",
                    )
                )
    return [] if tf.executing_eagerly() else checks


def _assert_rows(num_rows: tf.Tensor) -> Any:
    return tf.debugging.assert_positive(
        num_rows,
        message="A batch must have at least one row. Received: a batch with "
        "zero rows. Drop empty batches from the data.",
    )


def as_specs(nest: Any) -> Any:
    """Shapes and dtypes of a nest as `keras.KerasTensor`s, any batch size.

    Raises:
        ValueError: If a tensor's number of dimensions is unknown.
    """

    def as_spec(tensor: Any) -> Any:
        if tensor is None:
            return None
        if tf.TensorShape(tensor.shape).rank is None:
            raise ValueError(
                "Data must have a known number of dimensions. Received: "
                f"{tensor}. Call `set_shape` on it where the dataset is made, "
                "or give `from_generator` an `output_signature`."
            )
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return keras.KerasTensor((None, *tensor.shape[1:]), dtype)

    return tree.map_structure(as_spec, nest)


def shapes(nest: Any) -> Any:
    """The shapes of a nest of tensors or specs, as tuples."""
    return tree.map_structure(
        lambda t: None if t is None else tuple(t.shape), nest
    )


def structure_of(nest: Any) -> Any:
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
