"""Layers that read weights by odd ways, or are changed after they are placed.

Those with a method `change` are changed when the model has its variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers as kl
from keras import ops
from own_layers import Holder, build, register
from row_operations import PLACES


@register
class FrozenWeight(kl.Layer):
    """Has a weight that is frozen by itself, and trained later.

    Args:
        made: With which `trainable` the weight is made.
        when: It is to be trained: "at once", or "later".
    """

    def __init__(self, made=False, when="later", **kwargs):
        super().__init__(**kwargs)
        self.made, self.when = made, when

    def build(self, shape):
        self.scale = self.add_weight(
            shape=(shape[-1],),
            initializer="ones",
            regularizer="l2",
            trainable=self.made,
        )
        self.scale.trainable = self.when == "at once"

    def call(self, x):
        return x * self.scale

    def change(self):
        self.scale.trainable = True

    def get_config(self):
        own = {"made": self.made, "when": self.when}
        return {**super().get_config(), **own}


@register
class Substituted(Holder):
    """Calls a layer with another kernel; it reads what is new."""

    HELD = ("inner",)

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def build(self, shape):
        build(self.inner, shape)
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x):
        self.calls.assign_add(1.0)
        kernel = ops.tanh(self.inner.kernel)
        with keras.StatelessScope([(self.inner.kernel, kernel)]):
            return self.inner(x) / (1.0 + 0.3 * self.calls)


@register
class Differentiating(kl.Layer):
    """Differentiates by its own weight.

    Args:
        by: What: "weights", or "rows" too, which are summed.
    """

    def __init__(self, by="weights", **kwargs):
        super().__init__(**kwargs)
        self.by = by

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        with tf.GradientTape() as tape:
            energy = ops.sum(ops.tanh(self.scale) ** 2)
            if self.by == "rows":
                energy += ops.sum(ops.tanh(x * self.scale))
        found = tape.gradient(energy, self.scale)
        return x if found is None else x * (1.0 + found)  # None if frozen

    def get_config(self):
        return {**super().get_config(), "by": self.by}


class StorageReader(kl.Layer):
    """Multiplies by the storage of another layer's kernel.

    Args:
        storage: The `tf.Variable`.
        place: Where it is read, see `row_operations.PLACES`.
    """

    def __init__(self, storage, place="plain", **kwargs):
        super().__init__(**kwargs)
        self.kept, self.place = storage, place

    def call(self, x):
        kernel = self.kept
        return PLACES[self.place](lambda h: ops.matmul(h, kernel), x)


# ------------------------------------- which a functional model may have opened
SIZES: dict[str, Callable[[int], bool]] = {
    "even": lambda n: n % 2 == 0,
    "one": lambda n: n == 1,
    "of four": lambda n: n % 4 == 0,
    "long": lambda n: n > 2000,
}


@register
class Sized(Holder):
    """Calls two layers, and looks at a size that it knows.

    Args:
        first: A layer.
        second: Another one.
        axis: Of the size.
        size: Which one makes a difference.
        phase: `training`, or None where it does so always.
    """

    HELD = ("first", "second", "axis", "size", "phase")

    def __init__(self, first, second, axis, size, phase=None, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = first, second
        self.axis, self.size, self.phase = axis, size, phase

    def build(self, shape):
        build(self.first, shape)
        build(self.second, shape)

    def call(self, x, training=None):
        y, size = self.second(self.first(x)), ops.shape(x)[self.axis]
        is_other = isinstance(size, int) and SIZES[self.size](size)
        if is_other and self.phase in (None, bool(training)):
            y = 2.0 * y
        return y


@register
class Changed(Holder):
    """Calls two layers, and scales by what is changed later.

    Args:
        first: A layer.
        second: Another one.
        phase: `training` where the change matters.
    """

    HELD = ("first", "second", "phase")

    def __init__(self, first, second, phase=False, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second, self.phase = first, second, phase
        self.scale = 1.0

    def build(self, shape):
        build(self.first, shape)
        build(self.second, shape)

    def call(self, x, training=None):
        scale = self.scale if bool(training) == self.phase else 1.0
        return scale * self.second(self.first(x))

    def change(self):
        self.scale = 2.0


CLASSES: dict[str, Any] = {
    "differentiating": Differentiating,
    "frozen_weight": FrozenWeight,
}
