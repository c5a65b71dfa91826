"""Inputs of a model, as `keras.Sequential` takes them.

A `keras.Input` names the dtype to which all data is cast. Without one, the
layers are built for the first data: its dtype stays, but integers where floats
are expected become such. A last axis of size 1 may be missing, or too many.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe.micro_batches import as_specs


def data_spec(x: Any, dtype: str) -> Any:
    """What layers are built for, where there is no `keras.Input`.

    Bytes become floats: pixels, above all. `dtype` is what the first layer
    computes in.
    """
    spec = as_specs(x)
    is_bytes = not tree.is_nested(spec) and spec.dtype in ("uint8", "bool")
    if is_bytes and keras.backend.is_float_dtype(dtype):
        return keras.KerasTensor(spec.shape, keras.config.floatx())
    return spec


def as_tensors(x: Any, y: Any) -> tuple[Any, Any]:
    """The inputs and labels of one mini-batch as tensors.

    Raises:
        ValueError: If there are none, or they are something else.
    """
    received = f"Received: x={_named(x)}, y={_named(y)}"
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


def check_there(x: Any) -> None:
    """Refuses a mini-batch without inputs."""
    if all(t is None for t in tree.flatten(x)):
        raise ValueError(
            "`x` must hold the inputs of a mini-batch, for layers take what is "
            f"there. Received: x={x!r}, without any tensor. Pass real rows."
        )


def _named(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return kind if shape is None else f"{kind} of shape {tuple(shape)}"


def arrival(data: Any, checks: Sequence[tf.Operation]) -> list[tf.Operation]:
    """What has run once a mini-batch is there, and is as it must be.

    Of data of unknown length Keras takes a batch too many: the step begins, and
    fails when there is none. Until then, whatever does not need the batch runs:
    a variable that is assigned before stays so. `checks` fail if the mini-batch
    is not as it must be.
    """
    if tf.executing_eagerly():
        return []
    tensors = [t for t in tree.flatten(data) if t is not None]
    with tf.device("CPU:0"), tf.control_dependencies([*tensors, *checks]):
        return [tf.no_op()]


def warn_of_unknown_sizes(x: Any, specs: Any) -> None:
    """Tells that XLA compiles anew for each size of an axis."""
    for tensor, spec in zip(tree.flatten(x), tree.flatten(specs)):
        if tensor is None or spec is None:
            continue
        shape = tensor.shape.merge_with([None, *spec.shape[1:]])
        if None in shape[1:]:
            axis = [*shape].index(None, 1)
            warnings.warn(
                "XLA compiles every cell anew for each size that an axis of "
                "the inputs has, which takes seconds, and memory until the "
                f"process ends. Received: inputs of shape {tuple(shape)}, "
                f"whose axis {axis} may differ from one mini-batch to the "
                "next. Pad it to one size, or to a few, by "
                "`tf.data.Dataset.bucket_by_sequence_length` with "
                "`pad_to_bucket_boundary=True` or `keras.utils.pad_sequences`; "
                "where it is one size, say so: `tf.ensure_shape`.",
                stacklevel=2,
            )
            return


def as_expected(x: Any, specs: Any, is_declared: bool) -> Any:
    """Data, None as a leaf, in the dtypes and ranks that the layers expect.

    `is_declared` if the user gave the specs, as a `keras.Input`.
    """
    known = dict(tree.flatten_with_path(specs))
    tensors = []
    for path, tensor in tree.flatten_with_path(x):
        spec = known.get(path)
        if tensor is not None and spec is not None:
            tensor = _of_rank(_cast(tensor, spec, is_declared), spec)
        tensors.append(tensor)  # more than was built for is the layer's affair
    return tree.pack_sequence_as(x, tensors)


def check_shapes(x: Any, specs: Any, is_exact: bool) -> None:
    """Refuses data, None as a leaf, of other shapes where Keras does.

    Sizes must be as declared if `is_exact`. For layers one after the other they
    are their own affair.

    Raises:
        ValueError: If a tensor is of another rank, or of other sizes.
    """
    if is_exact or not tree.is_nested(specs):
        for spec, tensor in unlike(x, specs):
            if is_exact or len(tensor.shape) != len(spec.shape):
                raise ValueError(_shape_problem(spec, tensor, specs))


def unlike(x: Any, specs: Any) -> list[tuple[Any, Any]]:
    """Pairs of spec and tensor, where a size other than the batch's differs."""
    known = dict(tree.flatten_with_path(specs))
    pairs = [(known.get(p), t) for p, t in tree.flatten_with_path(x)]
    return [
        (spec, tensor)
        for spec, tensor in pairs
        if spec is not None
        and tensor is not None
        and not tf.TensorShape(tensor.shape).is_compatible_with(
            [None, *spec.shape[1:]]
        )
    ]


def _shape_problem(spec: Any, tensor: Any, specs: Any) -> str:
    of = f" for the input '{spec.name}'" if tree.is_nested(specs) else ""
    return (
        "`x` must have the shape that the model was built for. Expected: "
        f"{tuple(spec.shape)}{of}. Received: {tuple(tensor.shape)}."
    )


@contextlib.contextmanager
def explaining_sizes(x: Any, specs: Any) -> Iterator[None]:
    """Says of an error that the inputs are not what the layers were built for.

    Raises:
        ValueError: Instead of what a layer raises, if a size differs.
    """
    try:
        yield
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        others = unlike(x, specs)
        if not others:
            raise
        words = [_shape_problem(*others[0], specs), str(error)]
        words += getattr(error, "__notes__", [])
        raise ValueError("\n".join(words)) from error


def _cast(tensor: Any, spec: Any, is_declared: bool) -> Any:
    if is_declared:
        return keras.ops.convert_to_tensor(tensor, spec.dtype)
    is_float = keras.backend.is_float_dtype
    if is_float(spec.dtype) and not is_float(tensor.dtype):
        return keras.ops.cast(tensor, keras.config.floatx())
    return tensor


def _of_rank(tensor: Any, spec: Any) -> Any:
    rank = tensor.shape.rank
    if rank is None:
        return tensor
    if rank == len(spec.shape) + 1 and tensor.shape[-1] == 1:
        return keras.ops.squeeze(tensor, -1)
    if rank == len(spec.shape) - 1 and spec.shape[-1] == 1:
        return keras.ops.expand_dims(tensor, -1)
    return tensor
