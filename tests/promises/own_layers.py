"""Layers of a user, of the kinds that have gone wrong or might."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers as kl
from keras import ops

register = keras.saving.register_keras_serializable("promises")


def build(layer, shape):
    """Builds an inner layer, but not one that a file had built."""
    if not layer.built:
        layer.build(shape)


class Holder(kl.Layer):
    """Can be read from a file with the layers that it was made of."""

    HELD: tuple[str, ...] = ()

    def get_config(self):
        held = {name: getattr(self, name) for name in self.HELD}
        return {
            **super().get_config(),
            **{
                name: keras.saving.serialize_keras_object(value)
                for name, value in held.items()
            },
        }

    @classmethod
    def from_config(cls, config):
        for name in cls.HELD:
            value = config[name]
            config[name] = keras.saving.deserialize_keras_object(value)
        return cls(**config)


@register
class Fixed(Holder):
    """Calls a layer with `training` fixed, whatever itself is called with."""

    HELD = ("inner", "value")

    def __init__(self, inner, value, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.value = inner, value

    def build(self, shape):
        build(self.inner, shape)

    def call(self, x):
        return self.inner(x, training=self.value)


@register
class Hidden(Holder):
    """Holds a layer that takes `training`, and takes none itself."""

    HELD = ("inner",)

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def build(self, shape):
        build(self.inner, shape)

    def call(self, x):
        return self.inner(x)


@register
class Block(Holder):
    """Some sublayers and a skip connection."""

    HELD = ("norm", "inner", "dense")

    def __init__(self, norm, inner, dense, **kwargs):
        super().__init__(**kwargs)
        self.norm, self.inner, self.dense = norm, inner, dense

    def build(self, shape):
        build(self.norm, shape)
        build(self.inner, shape)
        build(self.dense, shape)

    def call(self, x, training=None):
        h = self.inner(self.norm(x), training=training)
        return x + self.dense(h)


@register
class Attention(kl.Layer):
    def __init__(self, width, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.attention = kl.MultiHeadAttention(
            2, width, use_bias=False, dropout=dropout
        )

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return x + self.attention(x, x, use_causal_mask=True)


@register
class Penalty(kl.Layer):
    """Adds the mean of squares to the loss."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


@register
class ToComplex(kl.Layer):
    def call(self, x):
        return ops.cast(x, "complex128") * np.complex128(1 + 0.5j)


@register
class Rotate(kl.Layer):
    """Works on complex tensors, with real weights."""

    def build(self, shape):
        self.angle = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        angle = ops.cast(self.angle, "complex128")
        return x * ops.exp(angle * np.complex128(1j))


@register
class FromComplex(kl.Layer):
    def call(self, x):
        return ops.real(x) + 0.5 * ops.imag(x)


@register
class Fork(kl.Layer):
    """One tensor to a dict of a float, an int, a bool and a tuple."""

    def call(self, x):
        return {
            "h": x * 2.0,
            "index": ops.argmax(x, -1),
            "positive": x > 0,
            "skip": (x, ops.mean(x, -1, keepdims=True)),
        }


@register
class Step(Holder):
    """Works on the dict; hands most of it on unchanged."""

    HELD = ("inner",)

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def build(self, shapes):
        build(self.inner, shapes["h"])

    def call(self, x):
        skip, mean = x["skip"]
        h = self.inner(x["h"]) + mean
        h = ops.where(x["positive"], h, 0.5 * h + skip)
        return {**x, "h": h, "skip": (h + skip, mean)}


@register
class Join(kl.Layer):
    def call(self, x):
        index = ops.expand_dims(ops.cast(x["index"], x["h"].dtype), -1)
        return ops.tanh(x["h"] * x["skip"][0]) + 0.1 * index


@register
class Combine(kl.Layer):
    """Takes a dict of inputs."""

    def call(self, x):
        return ops.concatenate([x["a"], x["b"]], -1)


@register
class Outputs(Holder):
    """Two outputs, a dict or a list of them."""

    HELD = ("a", "b", "named")

    def __init__(self, a, b, named=True, **kwargs):
        super().__init__(**kwargs)
        self.a, self.b, self.named = a, b, named

    def build(self, shape):
        build(self.a, shape)
        build(self.b, shape)

    def call(self, x):
        first, second = self.a(x), self.b(x)
        return {"a": first, "b": second} if self.named else [first, second]


@register
class Rematerialized(Holder):
    """Recomputes its inner layer by Keras's own means."""

    HELD = ("inner",)

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def build(self, shape):
        build(self.inner, shape)

    def call(self, x):
        return keras.remat(lambda h: ops.tanh(self.inner(h)))(x)
