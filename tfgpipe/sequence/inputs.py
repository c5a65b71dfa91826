"""Inputs of a model, as `keras.Sequential` takes them.

A `keras.Input` names the dtype to which all data is cast. Without one, the
layers are built for the first data: its dtype stays, but integers where floats
are expected become such. A last axis of size 1 may be missing, or too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe.cells import as_specs


def data_spec(x: Any, dtype: str) -> Any:
    """What layers are built for, where there is no `keras.Input`.

    Bytes become floats: pixels, above all.

    Args:
        x: Nest of tensors or of their specs.
        dtype: What the first layer computes in.
    """
    spec = as_specs(x)
    is_bytes = not tree.is_nested(spec) and spec.dtype in ("uint8", "bool")
    if is_bytes and keras.backend.is_float_dtype(dtype):
        return keras.KerasTensor(spec.shape, keras.config.floatx())
    return spec


def arrival(data: Any, checks: Sequence[tf.Operation]) -> list[tf.Operation]:
    """What has run once a mini-batch is there, and is as it must be.

    Of data of unknown length Keras takes a batch too many: the step begins, and
    fails when there is none. Until then, whatever does not need the batch runs:
    a variable that is assigned before stays so.

    Args:
        data: Nest of tensors.
        checks: Operations that fail if the mini-batch is not as it must be.
    """
    if tf.executing_eagerly():
        return []
    tensors = [t for t in tree.flatten(data) if t is not None]
    with tf.device("CPU:0"), tf.control_dependencies([*tensors, *checks]):
        return [tf.no_op()]


def as_expected(x: Any, specs: Any, is_declared: bool) -> Any:
    """Data in the dtypes and ranks that the layers expect.

    Args:
        x: Nest of tensors; None as a leaf.
        specs: What the layers were built for, a nest of `keras.KerasTensor`.
        is_declared: Whether the user gave the specs, as a `keras.Input`.
    """
    known = dict(tree.flatten_with_path(specs))
    tensors = []
    for path, tensor in tree.flatten_with_path(x):
        spec = known.get(path)
        if tensor is not None and spec is not None:
            tensor = _of_rank(_cast(tensor, spec, is_declared), spec)
        tensors.append(tensor)  # more than was built for is the layer's affair
    return tree.pack_sequence_as(x, tensors)


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
