"""Layers that share weights, state or seeds with others."""

from __future__ import annotations

import keras
from keras import layers as kl
from keras import ops
from own_layers import Holder, register


@register
class Tied(Holder):
    """Multiplies by the kernel of another layer, or of the one inside it."""

    HELD = ("other",)

    def call(self, x):
        layer = getattr(self.other, "layer", self.other)
        return ops.matmul(x, ops.transpose(layer.kernel))


@register
class Logits(Holder):
    """A softmax layer whose matrix is an embedding's."""

    HELD = ("embedding",)

    def build(self, shape):
        if not self.embedding.built:
            self.embedding.build(None)

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


@register
class Counter(kl.Layer):
    """Counts steps, averages activations and keeps a metric."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = keras.metrics.Mean(name=f"{self.name}_mean")

    def build(self, shape):
        self.steps = self.add_weight(
            shape=(), dtype="int32", trainable=False, initializer="zeros"
        )
        self.average = self.add_weight(
            shape=(shape[-1],), trainable=False, initializer="zeros"
        )

    def call(self, x, training=False):
        self.mean.update_state(x)
        if training:
            self.steps.assign_add(1)
            new = ops.mean(x, axis=tuple(range(len(x.shape) - 1)))
            self.average.assign(0.9 * self.average + 0.1 * new)
        return x * 1.5


@register
class CountReader(Holder):
    """Scales by how many steps another layer has counted."""

    HELD = ("counter",)

    def call(self, x):
        steps = ops.cast(self.counter.steps, x.dtype)
        return x * (1.0 + 0.1 * steps)


@register
class Noise(Holder):
    """Draws from a seed generator, its own or a shared one."""

    HELD = ("seed",)
    seed = None

    def __init__(self, *held, seed_generator=None, **kwargs):
        super().__init__(*held, **kwargs)
        self.seed_generator = seed_generator or keras.random.SeedGenerator(
            self.seed
        )

    def call(self, x, training=False):
        if not training:
            return x
        noise = keras.random.normal(
            ops.shape(x), dtype=x.dtype, seed=self.seed_generator
        )
        return x + 0.1 * noise


@register
class Branch(Noise):
    """Draws in one branch of a condition only."""

    seed = 3

    def call(self, x, training=False):
        if not training:
            return x
        draw = super().call
        return ops.cond(ops.sum(x) > 0, lambda: draw(x, True), lambda: x * 0.5)


@register
class Choice(kl.Layer):
    """Scales in one of two ways, by the sign of a weight."""

    def build(self, shape):
        self.scale = self.add_weight(
            shape=shape[-1:], initializer="random_normal"
        )

    def call(self, x):
        return ops.cond(
            self.scale[0] > 0,
            lambda: x * self.scale,
            lambda: ops.tanh(x) + self.scale,
        )
