"""Images and their classes as mini-batches, or a part of them, varied."""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from models import augmentation
from params import datasets
from params.batches import batches, steps_per_epoch
from params.datasets import ImageDataset


@dataclasses.dataclass(frozen=True)
class Images:
    """A data set of images, or some classes of it, or some examples of those.

    Attributes:
        name: A data set, see `params.datasets.load`.
        classes: Classes to keep, which become 0, 1, ... in this order; `None`
            for all.
        per_class: Training examples to keep of each class; `None` for all.
            Test examples are all kept.
        subset_seed: Which ones `per_class` keeps.
        flip: Whether a training image is mirrored every other time.
        cutout: Height and width, in pixels, of a square that is blanked out in
            every training image; 0 for none.
    """

    name: str = "fashion_mnist_12k"
    classes: tuple[int, ...] | None = None
    per_class: int | None = None
    subset_seed: int = 0
    flip: bool = False
    cutout: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.classes is not None and (
            not self.classes or len(set(self.classes)) < len(self.classes)
        ):
            problems.append(
                "`classes` must be different classes, at least one. "
                f"Received: classes={self.classes}."
            )
        if self.per_class is not None and self.per_class < 1:
            problems.append(
                "`per_class` must be positive, or None for all examples. "
                f"Received: per_class={self.per_class}."
            )
        if self.subset_seed < 0 or self.cutout < 0:
            problems.append(
                "`subset_seed` and `cutout` must not be negative. Received: "
                f"subset_seed={self.subset_seed} and cutout={self.cutout}."
            )
        if problems:
            raise ValueError("\n".join(problems))

    def source(self) -> "ImageSource":
        """Reads the images.

        Raises:
            ValueError: If there are no such classes, or not so many examples;
                or a file is not what it should be.
            FileNotFoundError: If a file is missing.
        """
        data = datasets.load(self.name)
        if self.classes is not None:
            data = with_classes(data, self.classes)
        if self.per_class is not None:
            data = with_few(data, self.per_class, self.subset_seed)
        return ImageSource(data, self.flip, self.cutout)


def with_classes(data: ImageDataset, classes: tuple[int, ...]) -> ImageDataset:
    """Keeps the examples of some classes, and numbers these from 0.

    Args:
        data: The whole data set.
        classes: The classes to keep, in their new order.

    Raises:
        ValueError: If a class has no example for training or for testing.

    Example:

    >>> images, y = np.zeros((4, 1, 1, 1)), np.array([0, 1, 2, 1])
    >>> with_classes(ImageDataset(images, y, images, y), (2, 1)).y_train
    array([1, 0, 1], dtype=int32)
    """
    parts = []
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        missing = sorted(set(classes) - set(y.tolist()))
        if missing:
            raise ValueError(
                "`classes` must be in the data set, for training and for "
                f"testing. Expected some of {sorted(set(y.tolist()))}. "
                f"Received: classes={classes}; missing: {missing}."
            )
        kept = np.isin(y, classes)
        new = np.zeros(max(classes) + 1, np.int32)
        new[list(classes)] = np.arange(len(classes))
        parts += [x[kept], new[y[kept]]]
    return ImageDataset(*parts)


def with_few(data: ImageDataset, per_class: int, seed: int) -> ImageDataset:
    """Keeps so many training examples of every class, drawn at random.

    Args:
        data: The whole data set.
        per_class: Examples to keep of each class. Positive.
        seed: Which ones.

    Raises:
        ValueError: If a class has fewer.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for label in np.unique(data.y_train):
        (found,) = np.nonzero(data.y_train == label)
        if len(found) < per_class:
            raise ValueError(
                "`per_class` must be at most the examples that there are, "
                f"{len(found)} of class {label}. Received: "
                f"per_class={per_class}."
            )
        rows.append(rng.permutation(found)[:per_class])
    kept = np.sort(np.concatenate(rows))
    return data._replace(x_train=data.x_train[kept], y_train=data.y_train[kept])


class ImageSource:
    """Mini-batches of images, see `params.source.Source`.

    Args:
        data: All images, for training and for testing.
        flip: As in `Images`.
        cutout: As in `Images`.

    Attributes:
        data: The images.
        input_spec: Spec of images (batch, height, width, channels).
    """

    def __init__(
        self, data: ImageDataset, flip: bool = False, cutout: int = 0
    ) -> None:
        self.data = data
        self._flip = flip
        self._cutout = cutout
        shape = data.x_train.shape[1:]
        self.input_spec = keras.KerasTensor((None, *shape), "float32")

    def largest_batch(self, batch_size: int) -> keras.KerasTensor:
        """Spec of a full mini-batch."""
        return keras.KerasTensor(
            (batch_size, *self.input_spec.shape[1:]), "float32"
        )

    def steps_per_epoch(self, batch_size: int) -> int:
        """Mini-batches an epoch; the last one may be smaller."""
        return steps_per_epoch(len(self.data.x_train), batch_size)

    def train(
        self, batch_size: int, *, seed: int, first_step: int, num_steps: int
    ) -> tf.data.Dataset:
        """Pairs of images and classes; every epoch takes each image once."""
        made = batches(
            self.data.x_train,
            self.data.y_train,
            batch_size,
            seed=seed,
            first_step=first_step,
            num_steps=num_steps,
        )
        if not (self._flip or self._cutout):
            return made
        steps = tf.data.Dataset.range(first_step, num_steps)
        numbered = tf.data.Dataset.zip((steps, made))
        return numbered.map(
            lambda step, pair: (self._varied(pair[0], seed, step), pair[1])
        ).prefetch(2)

    def _varied(self, images: Any, seed: int, step: Any) -> Any:
        """Mirrors and blanks out, by a seed that no other step has."""
        own = tf.stack([tf.cast(seed, step.dtype), step])
        if self._flip:
            images = augmentation.horizontal_flip(images, own)
        if self._cutout:
            images = augmentation.cutout(images, own, size=self._cutout)
        return images

    def evaluation(self, batch_size: int) -> tf.data.Dataset:
        """Pairs of test images and classes, in order."""
        pair = (self.data.x_test, self.data.y_test)
        return tf.data.Dataset.from_tensor_slices(pair).batch(batch_size)
