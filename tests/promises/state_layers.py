"""Layers that keep state, and read it before or after they assign it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops
from own_layers import Holder, register


class Kept(Holder):
    """Updates its state while training, and uses it."""

    HELD = ("reads",)
    reads = "none"

    def call(self, x, training=False):
        value = self.value() if self.reads == "before" else None
        if training:
            self.update(x)
        if self.reads == "after":
            value = self.value()
        return x if value is None else self.use(x, value)

    def value(self) -> Any:
        """What others may read."""
        return ops.copy(self.state)

    def use(self, x, value):
        return x - 0.5 * value


def rows_mean(x: Any) -> Any:
    return ops.mean(x, axis=tuple(range(len(x.shape) - 1)))


@register
class Average(Kept):
    """A running mean of activations."""

    def build(self, shape):
        self.state = self.add_weight(
            shape=(shape[-1],), trainable=False, initializer="zeros"
        )

    def update(self, x):
        self.state.assign(0.8 * self.state + 0.2 * rows_mean(x))


@register
class ComplexAverage(Kept):
    """A running mean of complex numbers."""

    def build(self, shape):
        self.state = self.add_weight(
            shape=(shape[-1],),
            dtype="complex128",
            trainable=False,
            initializer="zeros",
            autocast=False,
        )

    def update(self, x):
        share = ops.convert_to_tensor(np.complex128(0.2 + 0.1j), "complex128")
        new = ops.cast(rows_mean(x), "complex128") * share
        self.state.assign(ops.convert_to_tensor(self.state) + new)

    def use(self, x, value):
        return x - 0.3 * ops.cast(ops.real(value) + ops.imag(value), x.dtype)


@register
class FloatCount(Kept):
    """Counts steps in float32, and changes after some."""

    def build(self, shape):
        self.state = self.add_weight(
            shape=(), dtype="float32", trainable=False, initializer="zeros"
        )

    def update(self, x):
        self.state.assign_add(1.0)

    def use(self, x, value):
        return ops.where(value >= 3.0, x, 0.5 * x)


def _zero_and_infinity(shape: Any, dtype: Any = None) -> Any:
    return ops.convert_to_tensor([0.0, np.inf], dtype)


@register
class Infinite(Kept):
    """Counts beside an infinity."""

    def build(self, shape):
        self.state = self.add_weight(
            shape=(2,), trainable=False, initializer=_zero_and_infinity
        )

    def update(self, x):
        self.state.assign(self.state + 1.0)

    def use(self, x, value):
        return x * (1.0 + 0.1 * value[0])


@register
class Codebook(Kept):
    """Codes that follow the rows next to them, as in VQ-VAE."""

    def build(self, shape):
        self.state = self.add_weight(
            shape=(3, shape[-1]), trainable=False, initializer="random_normal"
        )
        self.counts = self.add_weight(
            shape=(3,), trainable=False, initializer="ones"
        )

    def update(self, x):
        x = ops.reshape(x, (-1, x.shape[-1]))
        chosen = ops.one_hot(self._nearest(x, self.state), 3, dtype=x.dtype)
        self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(chosen, axis=0))
        sums = ops.matmul(ops.transpose(chosen), x)
        new = 0.9 * self.state + 0.1 * sums / ops.expand_dims(self.counts, -1)
        self.state.assign(new)

    def _nearest(self, x, codes):
        apart = ops.expand_dims(x, -2) - ops.convert_to_tensor(codes)
        return ops.argmin(ops.sum(ops.square(apart), axis=-1), axis=-1)

    def use(self, x, value):
        return x + ops.take(value, self._nearest(x, value), axis=0)


@register
class Queue(Kept):
    """The newest rows, for a contrastive loss."""

    def build(self, shape):
        self.state = self.add_weight(
            shape=(4, shape[-1]), trainable=False, initializer="zeros"
        )

    def update(self, x):
        x = ops.reshape(x, (-1, x.shape[-1]))
        joined = ops.concatenate([x, ops.convert_to_tensor(self.state)])
        self.state.assign(joined[:4])

    def use(self, x, value):
        return x - 0.5 * ops.mean(value, axis=0)


@register
class Target(Kept):
    """A trained matrix, and a slow copy of it."""

    def build(self, shape):
        width = shape[-1]
        self.online = self.add_weight(shape=(width, width))
        self.state = self.add_weight(
            shape=(width, width), trainable=False, initializer="identity"
        )

    def update(self, x):
        self.state.assign(0.9 * self.state + 0.1 * self.online)

    def call(self, x, training=False):
        return super().call(ops.matmul(x, self.online), training=training)

    def use(self, x, value):
        return x + ops.matmul(x, value)


@register
class Tallied(Kept):
    """Keeps a metric, and scales by its result."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = keras.metrics.Mean(name=f"{self.name}_mean")

    def update(self, x):
        self.mean.update_state(x)

    def value(self):
        return self.mean.result()

    def use(self, x, value):
        return x * (1.0 + ops.cast(value, x.dtype))


@register
class StateReader(Holder):
    """Uses what an earlier layer keeps."""

    HELD = ("other",)

    def call(self, x):
        return self.other.use(x, self.other.value())


CLASSES = {
    "kept_average": Average,
    "kept_codebook": Codebook,
    "kept_complex": ComplexAverage,
    "kept_float_count": FloatCount,
    "kept_infinite": Infinite,
    "kept_metric": Tallied,
    "kept_queue": Queue,
    "kept_target": Target,
}
