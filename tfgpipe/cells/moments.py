"""The moments of a micro-batch over replicas: synchronised normalisation.

`BatchNormalization(synchronized=True)` normalises micro-batch i by the moments
of the rows that all replicas have in their i-th micro-batches, its partners.
They follow from three sums over rows: 1, x and (x - c)^2. Each replica sums its
own rows, and the partners' sums are added up. The constant c, the same in all
replicas, is the moving mean: the nearer to the mean, the less is lost to
rounding.

The addition is a point in the graph of a cell, in the forward pass and, as it
is its own derivative, in the backward pass: every replica receives the sum, so
every replica sends back a gradient for it. `stages.py` cuts the graph there,
and `run/partners.py` adds up. Nothing else knows of it.

References: [Ioffe and Szegedy, 2015](https://arxiv.org/abs/1502.03167);
[Peng et al., 2018](https://arxiv.org/abs/1711.07240) on moments over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals

_NAME = "moments_over_replicas"
_TYPE = "PlaceholderWithDefault"


def is_synchronized(layer: Any) -> bool:
    """Whether a layer asks for moments over replicas."""
    return getattr(layer, "synchronized", False) is True


@tf.custom_gradient
def sum_over_replicas(tensor: tf.Tensor) -> Any:
    """The point of a cell's graph where the partners' tensors are added up."""

    def point(value: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.PlaceholderWithDefault(
            input=value, shape=value.shape, name=_NAME
        )

    return point(tensor), point


def is_sum(op: tf.Operation) -> bool:
    """Whether an operation is what `sum_over_replicas` added to the graph."""
    return op.type == _TYPE and op.name.split("/")[-1].startswith(_NAME)


def sums_over_replicas(
    operations: Iterable[tf.Operation],
) -> list[tf.Tensor]:
    """What `sum_over_replicas` returned in the graph of some operations."""
    return [op.outputs[0] for op in operations if is_sum(op)]


def choosing_moments(graph: Any) -> Callable:
    """The moments by which each layer of a cell normalises.

    Args:
        graph: Of the cell. Only there, partners can add up.
    """

    def moments(layer: Any, inputs: Any, mask: Any) -> Any:
        if not is_synchronized(layer):
            return internals.batch_moments(layer, inputs, mask)
        if internals.current_graph() is not graph:
            raise ValueError(
                "A batch normalisation over replicas must be called by a "
                f"layer directly. Received: layer '{layer.name}' with "
                "synchronized=True in a loop, a condition or a `tf.function`, "
                "which cannot be left in the middle. Call it outside of that, "
                "or pass synchronized=False."
            )
        return moments_over_replicas(layer, inputs, mask)

    return moments


def moments_over_replicas(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: Any,
    add_up: Callable[[tf.Tensor], tf.Tensor] = sum_over_replicas,
) -> tuple[tf.Tensor, tf.Tensor]:
    """What a batch normalisation normalises by.

    Args:
        layer: The layer.
        inputs: Its inputs.
        mask: Which positions count, of the shape of the inputs without the
            last dimension; None for all.
        add_up: Adds up a tensor over replicas.

    Returns:
        Mean and variance.
    """
    channels = layer.axis % inputs.shape.rank
    axes = [i for i in range(inputs.shape.rank) if i != channels]
    near = tf.cast(tf.convert_to_tensor(layer.moving_mean), inputs.dtype)
    shape = [1] * len(axes)
    shape.insert(channels, -1)
    squares = tf.math.squared_difference(inputs, tf.reshape(near, shape))
    if mask is None:
        size = tf.size(inputs) // tf.size(near)
        count = tf.fill(tf.shape(near), tf.cast(size, inputs.dtype))
        extra = 0.0
    else:
        mask = tf.cast(mask, "bool")[..., tf.newaxis]
        zeros = tf.zeros_like(inputs)
        inputs = tf.where(mask, inputs, zeros)
        squares = tf.where(mask, squares, zeros)
        count = tf.reduce_sum(tf.cast(mask, inputs.dtype) + zeros, axes)
        extra = keras.config.epsilon()  # as in Keras
    own = [count, tf.reduce_sum(inputs, axes), tf.reduce_sum(squares, axes)]
    count, total, square = tf.unstack(add_up(tf.stack(own)))
    mean = tf.math.divide_no_nan(total, count + extra)
    # sum (x - mean)^2 = sum (x - near)^2 - 2 d sum (x - near) + d^2 sum 1
    d = mean - near
    square += d * (d * count - 2 * (total - count * near))
    variance = tf.math.divide_no_nan(square, count + extra)
    return mean, tf.maximum(variance, 0)
