"""Models with a `call` of their own, as people write them.

Shapes of keras.io's guides and examples, small. What most have in common: lists
of layers, loops in Python, operations and weights between layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras import ops

from tools.zoo.sample import ROWS, Sample

SAMPLES: dict[str, Sample] = {}


def sample(
    inputs: Callable[[], Any], is_whole: bool = False
) -> Callable[[Callable[[], keras.Model]], Callable[[], keras.Model]]:
    """Adds a model to the samples; arguments as of `Sample`."""

    def add(make: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
        name = make.__name__.replace("_", " ")
        SAMPLES[name] = Sample(make, inputs, is_whole)
        return make

    return add


def normal(*shape: int) -> np.ndarray:
    """Drawn numbers, of shape (rows, ...)."""
    return np.random.default_rng(0).normal(size=(ROWS, *shape))


def words() -> np.ndarray:
    """Drawn ids, of shape (rows, 10)."""
    return np.random.default_rng(1).integers(1, 30, (ROWS, 10))


rows = functools.partial(normal, 8)
images = functools.partial(normal, 16, 16, 3)
series = functools.partial(normal, 6, 8)


class ResBlock(kl.Layer):
    def __init__(self, filters, stride=1, **kwargs):
        super().__init__(**kwargs)
        self.conv1 = kl.Conv2D(
            filters, 3, stride, padding="same", use_bias=False
        )
        self.bn1 = kl.BatchNormalization()
        self.conv2 = kl.Conv2D(filters, 3, padding="same", use_bias=False)
        self.bn2 = kl.BatchNormalization()
        self.down = (
            keras.Sequential(
                [kl.Conv2D(filters, 1, stride), kl.BatchNormalization()]
            )
            if stride > 1
            else None
        )

    def call(self, x, training=False):
        y = ops.relu(self.bn1(self.conv1(x), training=training))
        y = self.bn2(self.conv2(y), training=training)
        return ops.relu(
            y + (x if self.down is None else self.down(x, training=training))
        )


@sample(images, is_whole=True)
def resnet() -> keras.Model:
    class ResNet(keras.Model):
        def __init__(self):
            super().__init__()
            self.stem = kl.Conv2D(8, 3, padding="same")
            self.blocks = [
                ResBlock(8),
                ResBlock(16, 2),
                ResBlock(16),
                ResBlock(32, 2),
            ]
            self.pool = kl.GlobalAveragePooling2D()
            self.head = kl.Dense(4, activation="softmax")

        def call(self, x, training=False):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, training=training)
            return self.head(self.pool(x))

    return ResNet()


class TransformerBlock(kl.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.0):
        super().__init__()
        self.att = kl.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential(
            [kl.Dense(ff_dim, activation="relu"), kl.Dense(embed_dim)]
        )
        self.layernorm1 = kl.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = kl.LayerNormalization(epsilon=1e-6)
        self.dropout1 = kl.Dropout(rate)
        self.dropout2 = kl.Dropout(rate)

    def call(self, inputs, training=None):
        attn_output = self.att(inputs, inputs)
        attn_output = self.dropout1(attn_output, training=training)
        out1 = self.layernorm1(inputs + attn_output)
        ffn_output = self.ffn(out1)
        ffn_output = self.dropout2(ffn_output, training=training)
        return self.layernorm2(out1 + ffn_output)


class TokenAndPositionEmbedding(kl.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = kl.Embedding(
            input_dim=vocab_size, output_dim=embed_dim
        )
        self.pos_emb = kl.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        maxlen = ops.shape(x)[-1]
        positions = ops.arange(start=0, stop=maxlen, step=1)
        positions = self.pos_emb(positions)
        return self.token_emb(x) + positions


@sample(words)
def transformer() -> keras.Model:
    class Classifier(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = TokenAndPositionEmbedding(10, 30, 8)
            self.blocks = [TransformerBlock(8, 2, 16) for _ in range(3)]
            self.pool = kl.GlobalAveragePooling1D()
            self.head = kl.Dense(4, activation="softmax")

        def call(self, tokens, training=None):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, training=training)
            return self.head(self.pool(x))

    return Classifier()


@sample(words)
def causal_lm_with_masks() -> keras.Model:
    """A causal mask, positions as a weight, a head tied to the embedding."""

    class LM(keras.Model):
        def __init__(self):
            super().__init__()
            self.emb = kl.Embedding(30, 8, mask_zero=True)
            self.att = [kl.MultiHeadAttention(2, 4) for _ in range(2)]
            self.norm = [kl.LayerNormalization() for _ in range(2)]
            self.ffn = [kl.Dense(8, "gelu") for _ in range(2)]

        def build(self, shape):
            self.pos = self.add_weight(
                shape=(shape[-1], 8), initializer="normal", name="pos"
            )
            super().build(shape)

        def call(self, tokens, training=None):
            x = self.emb(tokens) + self.pos
            n = ops.shape(tokens)[1]
            causal = ops.expand_dims(ops.tril(ops.ones((n, n), "bool")), 0)
            for att, norm, ffn in zip(self.att, self.norm, self.ffn):
                x = norm(x + att(x, x, attention_mask=causal))
                x = x + ffn(x)
            return ops.softmax(
                ops.matmul(x, ops.transpose(self.emb.embeddings))
            )

    return LM()


class Sampling(kl.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        batch, dim = ops.shape(z_mean)[0], ops.shape(z_mean)[1]
        epsilon = keras.random.normal(
            shape=(batch, dim), seed=self.seed_generator
        )
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


@sample(rows, is_whole=True)
def vae_add_loss() -> keras.Model:
    """The divergence by `self.add_loss` in the model's `call`."""

    class Encoder(kl.Layer):
        def __init__(self):
            super().__init__()
            self.proj, self.mean, self.log_var = (
                kl.Dense(6, "relu"),
                kl.Dense(2),
                kl.Dense(2),
            )
            self.sampling = Sampling()

        def call(self, x):
            x = self.proj(x)
            m, v = self.mean(x), self.log_var(x)
            return m, v, self.sampling((m, v))

    class Decoder(kl.Layer):
        def __init__(self):
            super().__init__()
            self.proj, self.out = kl.Dense(6, "relu"), kl.Dense(8, "sigmoid")

        def call(self, z):
            return self.out(self.proj(z))

    class VAE(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Encoder(), Decoder()

        def call(self, x):
            m, v, z = self.encoder(x)
            out = self.decoder(z)
            self.add_loss(-0.5 * ops.mean(v - ops.square(m) - ops.exp(v) + 1))
            return out

    return VAE()


@sample(images)
def unet_lists() -> keras.Model:
    class UNet(keras.Model):
        def __init__(self):
            super().__init__()
            self.down = [
                kl.Conv2D(f, 3, padding="same", activation="relu")
                for f in (4, 8)
            ]
            self.pool = kl.MaxPooling2D()
            self.mid = kl.Conv2D(16, 3, padding="same", activation="relu")
            self.up = [kl.Conv2DTranspose(f, 2, 2) for f in (8, 4)]
            self.merge = [
                kl.Conv2D(f, 3, padding="same", activation="relu")
                for f in (8, 4)
            ]
            self.out = kl.Conv2D(1, 1)

        def call(self, x):
            skips = []
            for conv in self.down:
                x = conv(x)
                skips.append(x)
                x = self.pool(x)
            x = self.mid(x)
            for up, merge, skip in zip(self.up, self.merge, reversed(skips)):
                x = ops.concatenate([up(x), skip], axis=-1)
                x = merge(x)
            return self.out(x)

    return UNet()


@sample(lambda: {"left": rows(), "right": rows()[::-1]})
def siamese_dict() -> keras.Model:
    class Siamese(keras.Model):
        def __init__(self):
            super().__init__()
            self.tower = keras.Sequential(
                [kl.Dense(16, "relu"), kl.Dense(16, "relu"), kl.Dense(8)]
            )
            self.out = kl.Dense(1)

        def call(self, inputs):
            a, b = self.tower(inputs["left"]), self.tower(inputs["right"])
            return self.out(ops.abs(a - b))

    return Siamese()


@sample(lambda: (rows(), rows()[::-1]), is_whole=True)
def siamese_batchnorm() -> keras.Model:
    class Siamese(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.bn, self.out = (
                kl.Dense(8),
                kl.BatchNormalization(),
                kl.Dense(1),
            )

        def call(self, inputs, training=None):
            left, right = (
                self.bn(self.a(x), training=training) for x in inputs
            )
            return self.out(left * right)

    return Siamese()


@sample(lambda: {"token_ids": words(), "padding_mask": words() > 5})
def encoder_dict_outputs() -> keras.Model:
    class Backbone(keras.Model):
        def __init__(self, num_layers=3):
            super().__init__()
            self.embed = kl.Embedding(30, 8)
            self.layers_ = [
                TransformerBlock(8, 2, 16) for _ in range(num_layers)
            ]
            self.pooler = kl.Dense(8, "tanh")

        def call(self, inputs, training=None):
            mask = ops.cast(inputs["padding_mask"], self.compute_dtype)
            x = self.embed(inputs["token_ids"]) * mask[..., None]
            for layer in self.layers_:
                x = layer(x, training=training)
            return {"sequence": x, "pooled": self.pooler(x[:, 0, :])}

    return Backbone()


@sample(series)
def own_weights() -> keras.Model:
    """A class token for each row, LayerScale, a computed weight."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [kl.Dense(8, "gelu") for _ in range(3)]
            self.head = kl.Dense(4)

        def build(self, shape):
            self.token = self.add_weight(
                shape=(1, 1, 8), initializer="normal", name="token"
            )
            self.scales = [
                self.add_weight(
                    shape=(8,), initializer="ones", name=f"scale_{i}"
                )
                for i in range(3)
            ]
            self.temperature = self.add_weight(
                shape=(), initializer="ones", name="temperature"
            )
            super().build(shape)

        def call(self, x):
            token = ops.repeat(self.token, ops.shape(x)[0], axis=0)
            x = ops.concatenate([token, x], axis=1)
            for scale, block in zip(self.scales, self.blocks):
                x = x + scale * block(x)
            return self.head(x[:, 0]) * ops.exp(self.temperature)

    return Own()


@sample(rows)
def recommender() -> keras.Model:
    """A factorisation machine of weights and operations."""

    class FM(keras.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(
                shape=(8, 1), initializer="normal", name="w"
            )
            self.v = self.add_weight(
                shape=(8, 5), initializer="normal", name="v"
            )
            self.b = self.add_weight(shape=(1,), initializer="zeros", name="b")
            self.deep = [kl.Dense(16, "relu"), kl.Dense(1)]

        def call(self, x):
            linear = ops.matmul(x, self.w) + self.b
            pairs = 0.5 * ops.sum(
                ops.matmul(x, self.v) ** 2 - ops.matmul(x**2, self.v**2),
                axis=1,
                keepdims=True,
            )
            deep = x
            for layer in self.deep:
                deep = layer(deep)
            return linear + pairs + deep

    return FM()


@sample(series)
def time_loop() -> keras.Model:
    class Loop(keras.Model):
        def __init__(self):
            super().__init__()
            self.cell, self.mix, self.out = (
                kl.LSTMCell(6),
                kl.Dense(6, "tanh"),
                kl.Dense(4),
            )

        def call(self, x):
            h = ops.zeros((ops.shape(x)[0], 6), x.dtype)
            state = [h, h]
            for t in range(x.shape[1]):
                h, state = self.cell(x[:, t], state)
                h = self.mix(h)
            return self.out(h)

    return Loop()


@sample(rows, is_whole=True)
def experts() -> keras.Model:
    class MoE(keras.Model):
        def __init__(self):
            super().__init__()
            self.gate = kl.Dense(4, "softmax")
            self.experts = [
                keras.Sequential([kl.Dense(8, "relu"), kl.Dense(4)])
                for _ in range(4)
            ]

        def call(self, x):
            gates = self.gate(x)
            top, _ = ops.top_k(gates, 2)
            gates = gates * ops.cast(gates >= top[:, 1:], gates.dtype)
            outs = ops.stack([e(x) for e in self.experts], axis=1)
            self.add_loss(0.01 * ops.sum(ops.mean(gates, axis=0) ** 2))
            return ops.sum(outs * gates[..., None], axis=1)

    return MoE()


@sample(rows, is_whole=True)
def training_branch() -> keras.Model:
    """Noise in training only, by the model's own generator."""

    class Noisy(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = kl.Dense(8, "relu"), kl.Dense(4)
            self.seed_generator = keras.random.SeedGenerator(3)

        def call(self, x, training=None):
            x = self.a(x)
            if training:
                x = x + 0.1 * keras.random.normal(
                    ops.shape(x), seed=self.seed_generator, dtype=x.dtype
                )
            x = (
                keras.random.dropout(x, 0.3, seed=self.seed_generator)
                if training
                else x
            )
            return self.b(x)

    return Noisy()


@sample(rows, is_whole=True)
def auxiliary_branch() -> keras.Model:
    """A layer that is called in training alone."""

    class Aux(keras.Model):
        def __init__(self):
            super().__init__()
            self.augment, self.a, self.b = (
                kl.GaussianNoise(0.1, seed=1),
                kl.Dense(8, "relu"),
                kl.Dense(4),
            )

        def call(self, x, training=None):
            if training:
                x = self.augment(x, training=True)
            return self.b(self.a(x))

    return Aux()


@sample(rows)
def plain_tensorflow() -> keras.Model:
    """`tf.*` in place of `ops.*`, as in code that is older than Keras 3."""

    class TF(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = kl.Dense(8), kl.Dense(4)

        def call(self, x):
            batch = tf.shape(x)[0]
            x = tf.nn.relu(self.a(x))
            x = tf.reshape(
                tf.transpose(tf.reshape(x, [batch, 2, 4]), [0, 2, 1]),
                [batch, 8],
            )
            return self.b(tf.concat([x, tf.ones([batch, 1], x.dtype)], -1))

    return TF()


@sample(rows)
def nested_functional() -> keras.Model:
    """Models of all kinds inside of one; layers made in `build`."""

    class Head(keras.Model):
        def build(self, shape):
            self.h = [kl.Dense(8, "relu", name=f"h{i}") for i in range(2)]
            for layer in self.h:
                layer.build((None, 8))
            self.built = True

        def call(self, x):
            for h in self.h:
                x = x + h(x)
            return x

    class Whole(keras.Model):
        def __init__(self):
            super().__init__()
            i = keras.Input((8,))
            self.backbone = keras.Model(
                i, [kl.Dense(8, "relu", name="p")(i), kl.Dense(8, name="q")(i)]
            )
            self.mid, self.head = (
                Head(),
                keras.Sequential([kl.Dense(8), kl.Dense(4)]),
            )

        def call(self, x):
            p, q = self.backbone(x)
            return self.head(self.mid(p) + q)

    return Whole()


@sample(lambda: (series(), series()[:, 1:]))
def keyword_tensors() -> keras.Model:
    """Encoder and decoder; keyword tensors, a computed mask."""

    class EncDec(keras.Model):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = kl.Dense(8, "gelu"), kl.Dense(8, "gelu")
            self.cross, self.norm = (
                kl.MultiHeadAttention(2, 4),
                kl.LayerNormalization(),
            )

        def call(self, inputs):
            src, tgt = inputs
            keep = ops.any(ops.greater(src, -1.0), axis=-1)[:, None, :]
            memory = self.enc(src)
            x = self.dec(tgt)
            return self.norm(
                x + self.cross(query=x, value=memory, attention_mask=keep)
            )

    return EncDec()


@sample(rows)
def functional_with_loop_shared() -> keras.Model:
    """One block called several times (weights shared over depth)."""

    class Shared(keras.Model):
        def __init__(self):
            super().__init__()
            self.inp, self.block, self.out = (
                kl.Dense(8),
                kl.Dense(8, "tanh"),
                kl.Dense(4),
            )

        def call(self, x):
            x = self.inp(x)
            for _ in range(4):
                x = x + self.block(x)
            return self.out(x)

    return Shared()


@sample(rows, is_whole=True)
def by_value() -> keras.Model:
    """A Python branch on values under autograph: `tf.cond`."""

    class ByValue(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = kl.Dense(8), kl.Dense(4)

        def call(self, x):
            x = self.a(x)
            x = tf.cond(tf.reduce_mean(x) > 0, lambda: x, lambda: -x)
            return self.b(x)

    return ByValue()


@sample(rows, is_whole=True)
def counts_calls() -> keras.Model:
    """Assigns a variable of its own in `call`."""

    class Counts(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = kl.Dense(8), kl.Dense(4)
            self.mean = self.add_weight(
                shape=(8,), initializer="zeros", trainable=False, name="mean"
            )

        def call(self, x, training=None):
            x = self.a(x)
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
            return self.b(x - self.mean)

    return Counts()


@sample(images, is_whole=True)
def frozen_backbone() -> keras.Model:
    """Transfer learning: `self.base(x, training=False)`."""

    class Transfer(keras.Model):
        def __init__(self):
            super().__init__()
            i = keras.Input((16, 16, 3))
            h = kl.Dropout(0.5)(
                kl.BatchNormalization()(kl.Conv2D(8, 3, activation="relu")(i))
            )
            self.base = keras.Model(i, kl.GlobalAveragePooling2D()(h))
            self.drop, self.head = (
                kl.Dropout(0.2, seed=4),
                kl.Dense(4, "softmax"),
            )

        def call(self, x, training=None):
            return self.head(
                self.drop(self.base(x, training=False), training=training)
            )

    return Transfer()


@sample(series, is_whole=True)
def masks_inside() -> keras.Model:
    """A mask that layers take and hand on; scores of attention."""

    class Keep(kl.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True

        def call(self, x, mask=None):
            return x if mask is None else x * ops.cast(mask, x.dtype)[..., None]

    class Masked(keras.Model):
        def __init__(self):
            super().__init__()
            self.mask, self.keep, self.rnn = (
                kl.Masking(),
                Keep(),
                kl.LSTM(6, return_sequences=True),
            )
            self.att, self.pool, self.out = (
                kl.MultiHeadAttention(2, 3),
                kl.GlobalAveragePooling1D(),
                kl.Dense(4),
            )

        def call(self, x, training=False):
            x = self.mask(ops.where(x[..., :1] > 0, x, 0.0))
            x = self.keep(self.rnn(self.keep(x), training=training))
            y, scores = self.att(x, x, return_attention_scores=True)
            return self.out(self.pool(y)) + ops.mean(scores)

    return Masked()


@sample(rows)
def dict_of_layers() -> keras.Model:
    class Dict(keras.Model):
        def __init__(self):
            super().__init__()
            self.nets = {
                "a": kl.Dense(8, "relu"),
                "b": [kl.Dense(8), kl.Dense(8)],
            }
            self.out = kl.Dense(4)

        def call(self, x, training=None, mask=None):
            parts = {"a": self.nets["a"](x)}
            for i, layer in enumerate(self.nets["b"]):
                parts[f"b{i}"] = layer(parts["a"])
            return self.out(sum(parts.values()))

    return Dict()


@sample(rows)
def python_state() -> keras.Model:
    """Counts its calls in Python, and keeps a tensor in an attribute."""

    class State(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.calls = kl.Dense(8), kl.Dense(4), 0

        def call(self, x):
            self.calls += 1
            self.hidden = self.a(x)
            return self.b(self.hidden) * (1.0 if self.calls else 2.0)

    return State()
