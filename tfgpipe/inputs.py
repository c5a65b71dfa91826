"""The data of a mini-batch: checked, made as layers take it, split and joined.

As in `keras.Sequential`, a `keras.Input` names the dtype to which all data is
cast. Without one, the layers are built for the first data: its dtype stays, but
integers where floats are expected become such. A last axis of size 1 may be
missing, or too many.

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

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.devices import names
from tfgpipe.internals import Nest

# Where examples are merged, as graphs are, rows are not examples.
_MERGED = (
    "Check how the data is batched. Where examples are merged, as graphs of "
    "different sizes are, pass num_micro_batches=1 and no replicas, or pad "
    "them: a row for each example."
)

_NO_ROWS = "Received: a batch with zero rows. Drop empty batches of the data."

_SPARSE = (
    tf.SparseTensor,
    tf.SparseTensorSpec,
    tf.RaggedTensor,
    tf.RaggedTensorSpec,
)


def _leaves(nest: Nest) -> list[Any]:
    return [leaf for leaf in tree.flatten(nest) if leaf is not None]


def first_tensor(nest: Nest) -> tf.Tensor:
    """Returns the first leaf of a nest that is not None."""
    return _leaves(nest)[0]


def shapes(nest: Nest) -> Any:
    """Returns the shapes of a nest of tensors or specs, as tuples."""
    return tree.map_structure(
        lambda t: None if t is None else tuple(t.shape), nest
    )


def as_specs(nest: Nest) -> Any:
    """Returns a nest of `keras.KerasTensor`s for batches of any size."""

    def as_spec(tensor: Any) -> keras.KerasTensor | None:
        if tensor is None:
            return None
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return keras.KerasTensor((None, *tensor.shape[1:]), dtype)

    return tree.map_structure(as_spec, nest)


# ------------------------------------------------------------------------- rows
def is_dense(leaf: Any) -> bool:
    """Returns whether a leaf, or a spec, is neither sparse nor ragged."""
    is_of_scipy = hasattr(leaf, "tocoo")
    return not isinstance(leaf, _SPARSE) and not is_of_scipy


def check_dense(nest: Nest, name: str) -> None:
    """Refuses data, or specs of data, that are sparse or ragged."""
    for leaf in tree.flatten(nest):
        if is_dense(leaf):
            continue
        kind = type(leaf).__name__.removesuffix("Spec")
        raise ValueError(
            f"`{name}` must hold dense tensors of shape (batch, ...). "
            f"Received: a {kind} of shape {tuple(leaf.shape)}. Call "
            "`tf.sparse.to_dense(tensor)`, `ragged.to_tensor()`, or SciPy's "
            "`matrix.toarray()`."
        )


def batch_dimension(nest: Nest, name: str, is_split: bool = True) -> int | None:
    """Returns the number of rows of a nest of tensors, None if known later.

    Args:
        nest: Tensors of shape (batch, ...); None leaves are skipped.
        name: Its name in an error.
        is_split: Whether rows are split, so that all leaves must have as many.
            Else the rows of the first leaf count, as for Keras.
    """
    leaves = _leaves(nest)
    check_dense(leaves, name)
    for leaf in leaves:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (0, None):
            raise ValueError(
                f"`{name}` must hold dense tensors of shape (batch, ...). "
                f"Received: {leaf}. Batch the data."
            )
    counts = [leaf.shape[0] for leaf in leaves]
    different = {*counts} - {None}
    if different == {0}:
        raise ValueError(f"`{name}` must have at least one row. {_NO_ROWS}")
    return next(iter(different if is_split else counts), None)


def check_rows(
    x: Nest, y: Nest, sample_weight: Nest, is_split: bool = True
) -> list[tf.Operation]:
    """Refuses a mini-batch whose nests have different numbers of rows.

    Where it is not split, only one without any rows.

    Returns:
        Operations that check numbers of rows that are known only at run time.
        They fail with a `tf.errors.InvalidArgumentError`.
    """
    first: Any = None
    checks = []
    for name, nest in (("x", x), ("y", y), ("sample_weight", sample_weight)):
        batch_dimension(nest, name, is_split)
        for leaf in _leaves(nest) if is_split else ():
            if first is None:
                first = leaf
                continue
            message = (
                f"`{name}` must have as many rows as `x`, the same number of "
                f"rows everywhere. {_MERGED}"
            )
            rows, others = first.shape[0], leaf.shape[0]
            if None in (rows, others):
                sizes = (tf.shape(t)[0] for t in (leaf, first))
                check = tf.debugging.assert_equal(*sizes, message=message)
                checks.append(check)
            elif rows != others:
                raise ValueError(
                    f"{message} Received: {rows} rows of x and {others} of "
                    f"{name}."
                )
    return [] if tf.executing_eagerly() else checks


def arrival(data: Nest, checks: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns operations that run once a mini-batch is there, and checked.

    Of data of unknown length Keras takes a batch too many: the step begins, and
    fails when there is none. Until then, all runs that does not need the batch:
    a variable that is assigned before stays so.
    """
    if tf.executing_eagerly():
        return []
    with tf.device("CPU:0"), tf.control_dependencies([*_leaves(data), *checks]):
        return [tf.no_op()]


def as_tensors(x: Nest, y: Nest) -> tuple[Any, Any]:
    """Returns the inputs and labels of one mini-batch as tensors."""
    x, y = tree.map_structure(
        lambda t: None if t is None else tf.convert_to_tensor(t), (x, y)
    )
    check_there(x)
    return x, y


def check_there(x: Nest) -> None:
    """Refuses a mini-batch without inputs."""
    if not _leaves(x):
        raise ValueError(
            f"`x` must hold the inputs of a mini-batch. Received: x={x!r}, "
            "without any tensor."
        )


# ----------------------------------------------------- as the first layer takes
def data_spec(x: Nest, dtype: str) -> Any:
    """Returns specs for which layers are built, without a `keras.Input`.

    Bytes, above all pixels, become floats where the first layer computes in a
    `dtype` of floats.
    """
    spec = as_specs(x)
    is_bytes = not tree.is_nested(spec) and spec.dtype in ("uint8", "bool")
    if is_bytes and keras.backend.is_float_dtype(dtype):
        return keras.KerasTensor(spec.shape, keras.config.floatx())
    return spec


def as_expected(x: Nest, specs: Nest, is_declared: bool) -> Any:
    """Returns data in the dtypes and ranks that the layers expect.

    None may be a leaf. `is_declared` if the user gave the specs, as a
    `keras.Input`.
    """
    by_path = dict(tree.flatten_with_path(specs))
    tensors = []
    for path, tensor in tree.flatten_with_path(x):
        spec = by_path.get(path)
        if tensor is not None and spec is not None:
            tensor = _fitted(tensor, spec, is_declared)
        tensors.append(tensor)  # a layer may take more than it was built for
    return tree.pack_sequence_as(x, tensors)


def _fitted(
    tensor: tf.Tensor, spec: keras.KerasTensor, is_declared: bool
) -> tf.Tensor:
    """Returns a tensor in the dtype and the rank of a spec."""
    is_float = keras.backend.is_float_dtype
    if is_declared:
        tensor = keras.ops.convert_to_tensor(tensor, spec.dtype)
    elif is_float(spec.dtype) and not is_float(tensor.dtype):
        tensor = keras.ops.cast(tensor, keras.config.floatx())
    rank, expected = tensor.shape.rank, len(spec.shape)
    if rank == expected + 1 and tensor.shape[-1] == 1:
        return keras.ops.squeeze(tensor, -1)
    if rank == expected - 1 and spec.shape[-1] == 1:
        return keras.ops.expand_dims(tensor, -1)
    return tensor


def check_shapes(x: Nest, specs: Nest, is_exact: bool) -> None:
    """Refuses data of other shapes where Keras does; None may be a leaf.

    Sizes must be as declared if `is_exact`. Layers one after the other check
    sizes themselves.
    """
    for spec, tensor in unlike(x, specs):
        is_other_rank = len(tensor.shape) != len(spec.shape)
        if is_exact or (is_other_rank and not tree.is_nested(specs)):
            raise ValueError(
                f"`x` must have the shape {tuple(spec.shape)} of the input "
                f"'{spec.name}'. Received: {tuple(tensor.shape)}."
            )


def unlike(x: Nest, specs: Nest) -> list[tuple[keras.KerasTensor, tf.Tensor]]:
    """Returns pairs of spec and tensor that differ in more than the batch."""
    by_path = dict(tree.flatten_with_path(specs))
    pairs = [(by_path.get(p), t) for p, t in tree.flatten_with_path(x)]
    return [
        (spec, tensor)
        for spec, tensor in pairs
        if spec is not None
        and tensor is not None
        and not tf.TensorShape(tensor.shape).is_compatible_with(
            [None, *spec.shape[1:]]
        )
    ]


# ---------------------------------------------------------------- micro-batches
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
            some = tf.debugging.assert_positive(
                tf.add_n(rows),
                f"A batch must have at least one row. {_NO_ROWS}",
            )
            with tf.control_dependencies([some]):
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
        """Refuses an output that has not a row for each of micro-batch m."""
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
