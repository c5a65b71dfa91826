"""Random changes to images, for training on more of them than there are.

Pure functions for `tf.data`: what they draw follows from `seed` alone. Give
each batch a seed of its own, from the run's seed and the number of the step;
then a run that is resumed sees the images of one that was not interrupted:

>>> import tensorflow as tf
>>> images = tf.data.Dataset.from_tensors(tf.ones((8, 28, 28, 1))).repeat(3)
>>> def augment(step, batch):
...     batch = horizontal_flip(batch, (7, step))
...     return cutout(batch, (7, step), size=8)
>>> for batch in images.enumerate().map(augment):
...     print(batch.shape)
(8, 28, 28, 1)
(8, 28, 28, 1)
(8, 28, 28, 1)

The functions draw independently of each other from the same seed.
"""

from typing import Any

import tensorflow as tf

# Folded into the seed, so that no two draws are the same.
_FLIP, _ROW, _COLUMN = range(3)


def horizontal_flip(images: tf.Tensor, seed: Any) -> tf.Tensor:
    """Mirrors about half of the images left to right.

    Args:
        images: (batch, height, width, channels), of any dtype.
        seed: Two integers, as a tensor or a tuple.

    Returns:
        Tensor like `images`.
    """
    shape = (tf.shape(images)[0], 1, 1, 1)
    flipped = _uniform(shape, seed, _FLIP, 2) == 1
    return tf.where(flipped, tf.reverse(images, axis=[2]), images)


def cutout(
    images: tf.Tensor, seed: Any, *, size: int, fill: float = 0.0
) -> tf.Tensor:
    """Fills a square of each image.

    Its centre is a pixel of the image, all of them as likely; where it is near
    the border, part of the square lies outside.

    Args:
        images: (batch, height, width, channels), of any dtype.
        seed: Two integers, as a tensor or a tuple.
        size: Height and width of the square, in pixels. Not negative.
        fill: What the square is filled with.

    Returns:
        Tensor like `images`.

    Raises:
        ValueError: If `size` is negative.

    Reference: [DeVries and Taylor, 2017](https://arxiv.org/abs/1708.04552)
    """
    if size < 0:
        raise ValueError(f"`size` must not be negative. Received: size={size}.")
    batch, height, width = (tf.shape(images)[axis] for axis in range(3))
    rows = _covered(batch, height, size, seed, _ROW)
    columns = _covered(batch, width, size, seed, _COLUMN)
    square = rows[:, :, None, None] & columns[:, None, :, None]
    return tf.where(square, tf.cast(fill, images.dtype), images)


def _covered(
    batch: tf.Tensor, length: tf.Tensor, size: int, seed: Any, draw: int
) -> tf.Tensor:
    """Whether pixels lie in a random interval: (batch, length), boolean."""
    first = _uniform((batch, 1), seed, draw, length) - size // 2
    pixels = tf.range(length)
    return (first <= pixels) & (pixels < first + size)


def _uniform(shape: Any, seed: Any, draw: int, limit: Any) -> tf.Tensor:
    """Integers from 0 to below `limit`; other ones for every `draw`."""
    seed = tf.random.experimental.stateless_fold_in(
        tf.cast(seed, tf.int64), draw
    )
    return tf.random.stateless_uniform(shape, seed, 0, limit, tf.int32)
