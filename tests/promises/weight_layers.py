"""Layers that look weights up, overwrite, quantise or normalise by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras import ops
from own_layers import Holder, register

SIZE = 5  # of the tables


@register
class Lookup(Holder):
    """Adds rows of a table."""

    HELD = ("by",)
    by = "inputs"

    def __init__(self, *held, **kwargs):
        super().__init__(*held, **kwargs)
        self.seed_generator = keras.random.SeedGenerator(3)

    def build(self, shape):
        self.table = self.add_weight(shape=(SIZE, shape[-1]))

    def call(self, x):
        if self.by == "constants":
            return x + self._mean(np.array([0, 2]))
        if self.by == "draws":
            return x + ops.tanh(x) * self._mean(self._draw((3,)))
        if self.by == "drawn rows":
            return x + ops.take(self.table, self._draw(ops.shape(x)[:-1]), 0)
        h = x + ops.take(self.table, ops.argmax(x, -1) % SIZE, axis=0)
        return h + self._mean(np.array([1])) if self.by == "both" else h

    def _mean(self, indices):
        return ops.mean(ops.take(self.table, indices, axis=0), axis=0)

    def _draw(self, shape):
        return keras.random.randint(shape, 0, SIZE, seed=self.seed_generator)


@register
class Overwritten(kl.Layer):
    """Keeps the largest input in a variable, by its gradient."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.largest = self.add_weight(
            shape=(), initializer="zeros", overwrite_with_gradient=True
        )

    def call(self, x):
        @ops.custom_gradient
        def divide(x, largest):
            def gradient(*args, upstream=None):
                if upstream is None:
                    (upstream,) = args
                return upstream / (1.0 + largest), ops.max(ops.abs(x))

            return x / (1.0 + largest), gradient

        # An eager custom gradient does not take a variable.
        return self.scale * divide(x, 1.0 * self.largest)


@register
class Idle(kl.Layer):
    """Has a weight that is in a loss only."""

    def build(self, shape):
        self.idle = self.add_weight(shape=(3,), initializer="ones")

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(self.idle)))
        return x


@register
class UnorderedNoise(kl.Layer):
    """Draws in no order."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, x, training=False):
        if not training:
            return x
        seed = self.seed_generator.next(ordered=False)
        seed = tf.cast(seed, "int32")
        noise = tf.random.stateless_normal(tf.shape(x), seed, dtype=x.dtype)
        return x + 0.1 * noise


@register
class TensorFlowNoise(kl.Layer):
    """Draws from TensorFlow's own state; keeps what it drew."""

    def build(self, shape):
        self.drawn = self.add_weight(
            shape=(shape[-1],),
            trainable=False,
            initializer="zeros",
            name="drawn",
        )
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x, training=False):
        noise = tf.random.normal((x.shape[-1],), dtype=x.dtype)
        if training:
            self.drawn.assign(noise)
        return x + self.scale * noise


@register
class MomentsReader(Holder):
    """Takes off the moving mean of a batch normalisation."""

    HELD = ("other",)

    def call(self, x):
        return x - self.other.moving_mean


@register
class UnbiasedNorm(kl.BatchNormalization):
    """Keeps the unbiased variance, as PyTorch does."""

    def call(self, x, training=False):
        before = ops.convert_to_tensor(self.moving_variance)
        found = super().call(x, training=training)
        if training:
            axes = tuple(range(len(x.shape) - 1))
            count = ops.cast(ops.size(x) / x.shape[-1], x.dtype)
            new = ops.var(x, axis=axes) * count / ops.maximum(count - 1, 1)
            kept = self.momentum * before + (1 - self.momentum) * new
            self.moving_variance.assign(kept)
        return found


@register
class WarmNorm(kl.BatchNormalization):
    """Sets its momentum when it is called."""

    def call(self, x, training=False):
        self.momentum = 0.6
        return super().call(x, training=training)


@keras.saving.register_keras_serializable("promises")
class Near(keras.regularizers.Regularizer):
    """Draws a kernel to another one."""

    def __init__(self, other):
        self.other = other

    def __call__(self, w):
        other = ops.mean(ops.square(self.other.kernel))
        return 0.1 * ops.mean(ops.square(w)) * (1.0 + other)


def near_dense(made: Any, common: Any, of: str, units: int) -> Any:
    return kl.Dense(units, kernel_regularizer=Near(made[of]), **common)


def _changed_dense(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(made: Any, common: Any, units: int, width: int) -> Any:
        layer = kl.Dense(units, **common)
        layer.build((None, width))
        change(layer)
        return layer

    return make


CLASSES = {
    "idle": Idle,
    "lookup": Lookup,
    "overwritten": Overwritten,
    "tf_noise": TensorFlowNoise,
    "unbiased_norm": UnbiasedNorm,
    "unordered_noise": UnorderedNoise,
    "warm_norm": WarmNorm,
}
KINDS: dict[str, Callable[..., Any]] = {
    "float8_dense": _changed_dense(lambda d: d.quantize("float8")),
    "int8_dense": _changed_dense(lambda d: d.quantize("int8")),
    "lora_dense": _changed_dense(lambda d: d.enable_lora(2)),
    "near_dense": near_dense,
}
