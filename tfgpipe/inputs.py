"""The data of a mini-batch: checked, and made as layers take it.

As in `keras.Sequential`, a `keras.Input` names the dtype to which all data is
cast. Without one, the layers are built for the first data: its dtype stays, but
integers where floats are expected become such. A last axis of size 1 may be
missing, or too many.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe.internals import Nest

# Where examples are merged, as graphs are, rows are not examples.
_MERGED = (
    "Check how the data is batched. Where examples are merged, as graphs of "
    "different sizes are, pass num_micro_batches=1 and no replicas, or pad "
    "them: a row for each example."
)

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
    """Returns a nest of `keras.KerasTensor`s for batches of any size.

    Raises:
        ValueError: If a tensor's number of dimensions is unknown.
    """

    def as_spec(tensor: Any) -> keras.KerasTensor | None:
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


# ------------------------------------------------------------------------- rows
def is_dense(leaf: Any) -> bool:
    """Returns whether a leaf, or a spec, is neither sparse nor ragged."""
    is_of_scipy = hasattr(leaf, "tocoo")
    return not isinstance(leaf, _SPARSE) and not is_of_scipy


def check_dense(nest: Nest, name: str) -> None:
    """Refuses data, or specs of data, that are sparse or ragged.

    Args:
        nest: The data; None leaves are skipped.
        name: Its name in an error.

    Raises:
        ValueError: If a leaf is sparse or ragged.
    """
    for leaf in tree.flatten(nest):
        if is_dense(leaf):
            continue
        kind = type(leaf).__name__.removesuffix("Spec")
        cure = (
            "Make it dense: `tf.sparse.to_dense(tensor)`, or "
            "`matrix.toarray()` of SciPy's; or, where all rows would take too "
            "much memory, each mini-batch: `tf.data.Dataset"
            ".from_tensor_slices((x, y)).batch(32).map(lambda x, y: "
            "(tf.sparse.to_dense(x), y))`, with `x` a `tf.SparseTensor`."
        )
        if kind == "RaggedTensor":
            cure = (
                "Pad it: `tensor.to_tensor()`, or each mini-batch of a dataset "
                "by `dataset.map(lambda x, y: (x.to_tensor(), y))`."
            )
        raise ValueError(
            f"`{name}` must hold dense tensors of shape (batch, ...), whose "
            f"rows fall into micro-batches. Received: a {kind} of shape "
            f"{tuple(leaf.shape)}. {cure}"
        )


def batch_dimension(nest: Nest, name: str, is_split: bool = True) -> int | None:
    """Returns the number of rows of a nest of tensors, None if known later.

    Args:
        nest: Tensors of shape (batch, ...); None leaves are skipped.
        name: Its name in an error.
        is_split: Whether rows are split, so that all leaves must have as many.
            Else the rows of the first leaf count, as for Keras.

    Raises:
        ValueError: If a leaf is no dense tensor with a batch dimension, two
            leaves disagree, or there are no rows.
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
    if is_split and len(different) > 1:
        raise ValueError(
            f"`{name}` must have the same number of rows everywhere. "
            f"Received: {sorted(different)} rows. {_MERGED}"
        )
    if different == {0}:
        raise ValueError(
            f"`{name}` must have at least one row. Received: a batch with "
            f"shapes {[tuple(leaf.shape) for leaf in leaves]}. Drop empty "
            "batches from the data."
        )
    return next(iter(different if is_split else counts), None)


def check_rows(
    x: Nest, y: Nest, sample_weight: Nest, is_split: bool = True
) -> list[tf.Operation]:
    """Refuses a mini-batch whose nests have different numbers of rows.

    Where it is not split, only one without any rows.

    Returns:
        Operations that check numbers of rows that are known only at run time.
        They fail with a `tf.errors.InvalidArgumentError`.

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
        checks += [
            tf.debugging.assert_equal(
                tf.shape(leaf)[0],
                tf.shape(first)[0],
                message=f"{message} {_MERGED}",
            )
            for leaf in _leaves(nest)
            if leaf is not first and None in (first.shape[0], leaf.shape[0])
        ]
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
    """Returns the inputs and labels of one mini-batch as tensors.

    Raises:
        ValueError: If there are none, or they are something else.
    """

    def described(value: Any) -> str:
        shape = getattr(value, "shape", None)
        kind = type(value).__name__
        return kind if shape is None else f"{kind} of shape {tuple(shape)}"

    received = f"Received: x={described(x)}, y={described(y)}"
    try:
        x, y = tree.map_structure(
            lambda t: None if t is None else tf.convert_to_tensor(t), (x, y)
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            "`x` and `y` must be arrays or tensors, or nests of them. "
            f"{received}, and this {type(error).__name__}: {error}. Take a "
            "batch out of a dataset: `x, y = next(iter(dataset))`."
        ) from error
    check_there(x)
    return x, y


def check_there(x: Nest) -> None:
    """Refuses a mini-batch without inputs."""
    if not _leaves(x):
        raise ValueError(
            "`x` must hold the inputs of a mini-batch. "
            f"Received: x={x!r}, without any tensor. Pass real rows."
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
            tensor = _of_rank(_cast(tensor, spec, is_declared), spec)
        tensors.append(tensor)  # a layer may take more than it was built for
    return tree.pack_sequence_as(x, tensors)


def _cast(
    tensor: tf.Tensor, spec: keras.KerasTensor, is_declared: bool
) -> tf.Tensor:
    if is_declared:
        return keras.ops.convert_to_tensor(tensor, spec.dtype)
    is_float = keras.backend.is_float_dtype
    if is_float(spec.dtype) and not is_float(tensor.dtype):
        return keras.ops.cast(tensor, keras.config.floatx())
    return tensor


def _of_rank(tensor: tf.Tensor, spec: keras.KerasTensor) -> tf.Tensor:
    rank = tensor.shape.rank
    if rank is None:
        return tensor
    if rank == len(spec.shape) + 1 and tensor.shape[-1] == 1:
        return keras.ops.squeeze(tensor, -1)
    if rank == len(spec.shape) - 1 and spec.shape[-1] == 1:
        return keras.ops.expand_dims(tensor, -1)
    return tensor


def check_shapes(x: Nest, specs: Nest, is_exact: bool) -> None:
    """Refuses data of other shapes where Keras does; None may be a leaf.

    Sizes must be as declared if `is_exact`. Layers one after the other check
    sizes themselves.

    Raises:
        ValueError: If a tensor is of another rank, or of other sizes.
    """
    if is_exact or not tree.is_nested(specs):
        for spec, tensor in unlike(x, specs):
            if is_exact or len(tensor.shape) != len(spec.shape):
                raise ValueError(_shape_problem(spec, tensor, specs))


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


def _shape_problem(
    spec: keras.KerasTensor, tensor: tf.Tensor, specs: Nest
) -> str:
    of = f" for the input '{spec.name}'" if tree.is_nested(specs) else ""
    return (
        "`x` must have the shape that the model was built for. Expected: "
        f"{tuple(spec.shape)}{of}. Received: {tuple(tensor.shape)}."
    )


@contextlib.contextmanager
def explaining_sizes(x: Nest, specs: Nest) -> Iterator[None]:
    """Inside, errors say how inputs differ from what the layers were built for.

    Raises:
        ValueError: Instead of what a layer raises, if a size differs.
    """
    try:
        yield
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        pairs = unlike(x, specs)
        if not pairs:
            raise
        words = [_shape_problem(*pairs[0], specs), str(error)]
        words += getattr(error, "__notes__", [])
        raise ValueError("\n".join(words)) from error


def warn_of_unknown_sizes(x: Nest, specs: Nest) -> None:
    """Warns that XLA compiles anew for each size of an axis."""
    for tensor, spec in zip(tree.flatten(x), tree.flatten(specs)):
        if tensor is None or spec is None:
            continue
        shape = tensor.shape.merge_with([None, *spec.shape[1:]])
        if None in shape[1:]:
            warnings.warn(
                "XLA compiles every cell anew for each size that an axis of "
                "the inputs has, which takes seconds, and memory until the "
                f"process ends. Received: inputs of shape {tuple(shape)}, "
                f"whose axis {[*shape].index(None, 1)} may differ from one "
                "mini-batch to the next. Pad it to one size, or to a few, by "
                "`tf.data.Dataset.bucket_by_sequence_length` with "
                "`pad_to_bucket_boundary=True` or `keras.utils.pad_sequences`; "
                "where it is one size, say so: `tf.ensure_shape`.",
                stacklevel=2,
            )
            return
