"""Layers that differentiate, or are changed after they are placed.

Those with a method `change` are changed when the model has its variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import ops
from own_layers import Around, Holder, build, register


@register
class FrozenWeight(Holder):
    """Has a weight that is frozen by itself, and trained later."""

    HELD = ("made", "when")
    made, when = False, "later"

    def build(self, shape):
        self.scale = self.add_weight(
            shape=(shape[-1],),
            initializer="ones",
            regularizer="l2",
            name="scale",
            trainable=self.made,
        )
        self.scale.trainable = self.when == "at once"

    def call(self, x):
        return x * self.scale

    def change(self):
        self.scale.trainable = True


@register
class Differentiating(Holder):
    """Differentiates by its input."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = ops.sum(ops.tanh(x * self.scale))
        return x * (1.0 + tape.gradient(energy, x))


# ------------------------------------- which a functional model may have opened
SIZES: dict[str, Callable[[int], bool]] = {
    "even": lambda n: n % 2 == 0,
    "one": lambda n: n == 1,
    "of four": lambda n: n % 4 == 0,
    "long": lambda n: n > 2000,
}


class OfTwo(Holder):
    """Calls two layers, and does more in training, or in inference."""

    def build(self, shape):
        build(self.first, shape)
        build(self.second, shape)


@register
class Sized(OfTwo):
    """Looks at a size that it knows."""

    HELD = ("first", "second", "axis", "size", "phase")
    phase = None

    def call(self, x, training=None):
        y, size = self.second(self.first(x)), ops.shape(x)[self.axis]
        is_other = isinstance(size, int) and SIZES[self.size](size)
        if is_other and self.phase in (None, bool(training)):
            y = 2.0 * y
        return y


@register
class Changed(OfTwo):
    """Scales by what is changed later."""

    HELD = ("first", "second", "phase")
    phase, scale = False, 1.0

    def call(self, x, training=None):
        scale = self.scale if bool(training) == self.phase else 1.0
        return scale * self.second(self.first(x))

    def change(self):
        self.scale = 2.0


@register
class Resource(Holder):
    """Multiplies by a `tf.Variable` that is no weight; see `mid_run.py`."""

    def __init__(self, *held, **kwargs):
        super().__init__(*held, **kwargs)
        self.read_later = tf.Variable(1.0, trainable=False)

    def call(self, x):
        return x / ops.cast(self.read_later, x.dtype)


@register
class Spare(Around):
    """Holds a layer that it never calls, so that it is never built."""

    def build(self, shape):
        pass

    def call(self, x):
        return x


CLASSES: dict[str, Any] = {
    "differentiating": Differentiating,
    "frozen_weight": FrozenWeight,
    "resource": Resource,
}
