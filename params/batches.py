"""Mini-batches in an order that follows from the seed and the step alone."""

from typing import Any

import numpy as np
import tensorflow as tf


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Mini-batches an epoch; the last one may be smaller.

    >>> steps_per_epoch(10, 4)
    3
    """
    return -(-num_examples // batch_size)


def batch_rows(
    num_examples: int, batch_size: int, seed: int, step: Any
) -> tf.Tensor:
    """Indices of the examples of one step.

    Args:
        num_examples: How many there are. Every epoch takes each once, in an
            order of its own.
        batch_size: Examples in a mini-batch; the last one of an epoch has what
            is left.
        seed: Determines the order.
        step: The step, from 0; an int64 tensor.
    """
    per_epoch = steps_per_epoch(num_examples, batch_size)
    order = tf.random.experimental.stateless_shuffle(
        tf.range(num_examples), seed=[seed, step // per_epoch]
    )
    start = tf.cast(step % per_epoch, tf.int32) * batch_size
    rows = order[start : start + batch_size]
    if num_examples % batch_size == 0:
        rows = tf.ensure_shape(rows, [batch_size])
    return rows


def batches(
    x: np.ndarray,
    y: np.ndarray,
    batch_size: int,
    *,
    seed: int,
    first_step: int,
    num_steps: int,
) -> tf.data.Dataset:
    """Makes the mini-batches of the steps `first_step` to `num_steps - 1`.

    Every epoch takes every example once, in an order of its own. A run that
    begins at a later step sees what an uninterrupted one sees from there on.

    Args:
        x: Inputs (examples, ...).
        y: Labels (examples, ...).
        batch_size: Examples in a mini-batch. Positive.
        seed: Determines the order.
        first_step: The first step, from 0.
        num_steps: Steps in the whole run.
    """
    num_examples = len(x)
    x, y = tf.constant(x), tf.constant(y)

    def batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows = batch_rows(num_examples, batch_size, seed, step)
        return tf.gather(x, rows), tf.gather(y, rows)

    steps = tf.data.Dataset.range(first_step, num_steps)
    return steps.map(batch).prefetch(2)
