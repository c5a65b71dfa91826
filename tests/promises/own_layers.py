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
    """Is made of layers and options, with which it can be read from a file.

    Those named by `HELD` are its arguments, in this order, and its attributes.
    A class attribute of the name is the default.
    """

    HELD: tuple[str, ...] = ()

    def __init__(self, *held, **kwargs):
        given = dict(zip(self.HELD, held, strict=False))
        given |= {key: kwargs.pop(key) for key in self.HELD if key in kwargs}
        super().__init__(*held[len(self.HELD) :], **kwargs)
        for name in self.HELD:
            is_given = name in given
            value = given[name] if is_given else getattr(type(self), name)
            setattr(self, name, value)

    def get_config(self):
        write = keras.saving.serialize_keras_object
        held = {name: write(getattr(self, name)) for name in self.HELD}
        return {**super().get_config(), **held}

    @classmethod
    def from_config(cls, config):
        read = keras.saving.deserialize_keras_object
        return cls(**config | {name: read(config[name]) for name in cls.HELD})


class Around(Holder):
    """Has a layer inside."""

    HELD = ("inner",)

    def build(self, shape):
        build(self.inner, shape)


@register
class Fixed(Around):
    """Calls a layer with `training` fixed, whatever itself is called with."""

    HELD = ("inner", "value")

    def call(self, x):
        return self.inner(x, training=self.value)


@register
class Hidden(Around):
    """Holds a layer that takes `training`, and takes none itself."""

    def call(self, x):
        return self.inner(x)


@register
class Block(Holder):
    """Some sublayers and a skip connection."""

    HELD = ("norm", "inner", "dense")

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
class Step(Around):
    """Works on the dict; hands most of it on unchanged."""

    def build(self, shapes):
        super().build(shapes["h"])

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
    named = True

    def build(self, shape):
        build(self.a, shape)
        build(self.b, shape)

    def call(self, x):
        first, second = self.a(x), self.b(x)
        return {"a": first, "b": second} if self.named else [first, second]


@register
class Rematerialized(Around):
    """Recomputes its inner layer by Keras's own means."""

    def call(self, x):
        return keras.remat(lambda h: ops.tanh(self.inner(h)))(x)
