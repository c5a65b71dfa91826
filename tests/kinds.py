"""Small models of every kind of layer, for the tests of exactness.

Each is a function that returns fresh layers; `KINDS` says with what data and
losses they are trained. All have at least five layers, for five cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers as kl
from own_layers import (
    Combine,
    Fixed,
    Fork,
    FromComplex,
    Hidden,
    Join,
    Penalty,
    Rotate,
    Step,
    ToComplex,
)
from sharing_layers import Counter, Logits, Tied

ROWS = 19  # in batches of 8: 8, 8 and a last one of 3 rows


@dataclasses.dataclass(frozen=True)
class Kind:
    """How to train one kind of model."""

    layers: Callable[[], list[Any]]
    x: Callable[[np.random.Generator], Any]  # of `ROWS` rows
    y: Callable[[np.random.Generator], Any]
    # Further arguments of `compile` and of `fit`.
    compile: Callable[[], dict[str, Any]] = lambda: {"loss": "mse"}
    fit: Callable[[np.random.Generator], dict[str, Any]] = lambda rng: {}


def normal(*shape):
    return lambda rng: rng.standard_normal((ROWS, *shape))


def tokens(length, vocabulary, padding=True):
    def make(rng):
        ids = rng.integers(1, vocabulary, (ROWS, length))
        if padding:
            lengths = rng.integers(1, length + 1, (ROWS, 1))
            ids = np.where(np.arange(length) < lengths, ids, 0)
        return ids.astype("int32")

    return make


# --------------------------------------------------------------- the models
def dense():
    return [
        kl.Dense(6, activation="tanh"),
        kl.LayerNormalization(),
        kl.Dense(6, activation="gelu"),
        kl.RMSNormalization(),
        kl.Activation("relu"),
        kl.Dense(5),
        kl.GroupNormalization(5),
        kl.Dense(2),
    ]


def convolution():
    return [
        kl.Conv2D(4, 3, padding="same", activation="relu"),
        kl.MaxPooling2D(),
        kl.DepthwiseConv2D(3, padding="same"),
        kl.SeparableConv2D(4, 3, padding="same"),
        kl.Conv2DTranspose(3, 2),
        kl.GlobalAveragePooling2D(),
        kl.Dense(2),
    ]


def masked_sequence():
    """The embedding's mask reaches the loss, four layers on."""
    return [
        kl.Embedding(11, 6, mask_zero=True),
        kl.Dense(6, activation="relu"),
        kl.GRU(5, return_sequences=True),
        kl.Activation("tanh"),
        kl.Dense(3),
    ]


def masked_tokens():
    dense = [kl.Dense(4, activation="tanh") for _ in range(3)]
    return [kl.Embedding(11, 4, mask_zero=True), *dense, kl.Dense(3)]


def masked_summary():
    return [
        kl.Embedding(11, 6, mask_zero=True),
        kl.LSTM(3, return_sequences=True),
        kl.LayerNormalization(),
        kl.GlobalAveragePooling1D(),
        kl.Dense(2),
    ]


class Block(kl.Layer):
    """A pre-norm Transformer block."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.norm = kl.LayerNormalization()
        # The gradient of a key's bias is zero but for rounding, which Adam
        # makes a step of full size of.
        self.attention = kl.MultiHeadAttention(2, width // 2, use_bias=False)
        self.dense = keras.Sequential([kl.Dense(8, "relu"), kl.Dense(width)])

    def build(self, shape):
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.dense.build(shape)

    def call(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, use_causal_mask=True)
        return x + self.dense(x)


def functional(width):
    inputs = keras.Input((None, width))
    h = kl.Dense(width, activation="relu")(inputs)
    return keras.Model(inputs, kl.Add()([inputs, kl.LayerNormalization()(h)]))


def attention():
    return [
        kl.Embedding(13, 4),
        Block(4),
        functional(4),
        keras.Sequential([kl.Dense(4, "tanh"), functional(4)]),
        kl.Dense(13),
    ]


def step():
    return Step(kl.Dense(5, activation="tanh"))


def nests():
    return [kl.Dense(5), Fork(), step(), step(), Join(), kl.Dense(2)]


def regularizers():
    l2 = keras.regularizers.L2(0.01)
    return [
        kl.Dense(6, kernel_regularizer=l2, bias_regularizer="l1"),
        kl.Dense(6, activation="relu", activity_regularizer=l2),
        kl.ActivityRegularization(l1=0.02),
        kl.Dense(6, activation="tanh", kernel_constraint="max_norm"),
        keras.Sequential([Penalty(), kl.Dense(4, activity_regularizer="l2")]),
        Penalty(),
        kl.Dense(2, kernel_regularizer=l2),
    ]


def counters():
    return [
        kl.Dense(5, activation="relu"),
        Counter(name="first"),
        kl.Dense(5),
        Counter(name="second"),
        kl.Dense(2),
    ]


def frozen():
    return [
        kl.Dense(6, trainable=False),
        kl.LayerNormalization(trainable=False),
        kl.Dense(6, activation="tanh"),
        kl.BatchNormalization(trainable=False),
        kl.Dense(5, trainable=False, activation="tanh"),
        kl.Dense(5),
        kl.SpectralNormalization(kl.Dense(4)),
        kl.Dense(2),
    ]


def tied():
    """One layer object three times, and one variable in two layers."""
    embedding = kl.Embedding(9, 6)
    shared = kl.Dense(6, activation="tanh", kernel_regularizer="l2")
    return [
        embedding,
        shared,
        kl.LayerNormalization(),
        shared,
        shared,
        Logits(embedding),
    ]


# ------------------------------------- what layers do to each other besides
class Switch(kl.Layer):
    """Tells by its outputs whether it is training."""

    def call(self, x, training=False):
        return 1.5 * x if training else x


class Steps(kl.Layer):
    """Counts its calls in training, and averages."""

    def build(self, shape):
        self.steps = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False
        )
        self.average = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1)
            self.average.assign(0.5 * self.average + 1.0)
        return x


class Reader(kl.Layer):
    """Reads what another layer counts."""

    def __init__(self, steps, lists, **kwargs):
        super().__init__(**kwargs)
        self.steps = steps if lists else None
        self.find = lambda: steps

    def build(self, shape):
        pass

    def call(self, x):
        found = self.find()
        steps = keras.ops.cast(found.steps, x.dtype)
        return x * steps + keras.ops.sum(found.average)


def built(units, shape, **kwargs):
    layer = kl.Dense(units, "tanh", **kwargs)
    layer.build((None, shape))
    return layer


def between():
    """Variables and `training` go from layer to layer, not tensors alone."""
    dense, read = kl.Dense(4), built(5, 4)
    steps = Steps()
    return [
        kl.Dense(4, activation="tanh"),
        Fixed(Switch(), False),
        Hidden(Switch()),
        Fixed(Switch(), True),
        steps,
        read,
        kl.Lambda(lambda h: h @ keras.ops.transpose(read.kernel)),
        Reader(steps, lists=False),
        kl.SpectralNormalization(dense),
        Tied(dense),
        Hidden(kl.Dense(4, "tanh"), trainable=False),
        kl.Dense(2),
    ]


def complex_numbers():
    return [
        kl.Dense(3, activation="tanh"),
        ToComplex(),
        *(Rotate(autocast=False) for _ in range(2)),
        FromComplex(autocast=False),
        kl.Dense(2),
    ]


def hinge():
    """Looks at all labels of the batch; so do these metrics."""
    return {
        "loss": "hinge",
        "metrics": [keras.losses.SquaredHinge(), "hinge", "mae"],
    }


def ternary(*shape):
    """Labels of which some micro-batches have 0 and 1 alone."""
    return lambda rng: rng.integers(-1, 2, (ROWS, *shape)).astype("float64")


# A table of positions has a slice a position, whatever the number of rows; one
# of tokens has a slice a row and token.
LOOKUPS = {
    "constants": lambda x: np.arange(5),
    "sizes": lambda x: keras.ops.arange(keras.ops.shape(x)[1]),
    "distances": lambda x: abs(np.arange(5)[:, None] - np.arange(5)),
    "rows": lambda x: keras.ops.broadcast_to(
        keras.ops.arange(5), keras.ops.shape(x)[:2]
    ),
    # Needs to know how many rows there are, as some published models do.
    "known rows": lambda x: np.tile(np.arange(5), (x.shape[0], 1)),
    "tokens": lambda x: keras.ops.cast(abs(x[..., 0]) * 9, "int32") % 5,
}


class Lookup(kl.Layer):
    def __init__(self, *names, **kwargs):
        super().__init__(**kwargs)
        self.names = names
        self.table = kl.Embedding(5, 3, embeddings_initializer="normal")

    def build(self, shape):
        self.table.build(shape)

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        for name in self.names:
            found = self.table(LOOKUPS[name](x))
            if name == "distances":
                found = keras.ops.sum(found, axis=1)
            x = x + found
        return x


class Split(kl.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.a, self.b = kl.Dense(3), kl.Dense(4, activation="softmax")

    def build(self, shape):
        self.a.build(shape)
        self.b.build(shape)

    def call(self, x):
        return {"value": self.a(x), "label": self.b(x)}


def outputs():
    return [kl.Dense(6, activation="tanh") for _ in range(4)] + [Split()]


def inputs():
    return [Combine(), *(kl.Dense(6, activation="tanh") for _ in range(4))]


def user_loss(y_true, y_pred):
    """A loss that rows do not add up to."""
    return keras.ops.log(1 + keras.ops.mean(keras.ops.square(y_true - y_pred)))


def two_losses():
    return {
        "loss": {"value": "mse", "label": "sparse_categorical_crossentropy"},
        "loss_weights": {"value": 0.3, "label": 1.7},
        "metrics": {"value": ["mae"], "label": ["accuracy"]},
        "weighted_metrics": {"label": ["accuracy"]},
    }


def crossentropy(**kwargs):
    return lambda: {
        "loss": keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, **kwargs
        ),
        "metrics": ["accuracy"],
        "weighted_metrics": ["sparse_categorical_crossentropy"],
    }


def classes(num, *shape):
    return lambda rng: rng.integers(0, num, (ROWS, *shape)).astype("int32")


def weights(rng):
    return {"sample_weight": rng.random(ROWS)}


def token_weights(length):
    return lambda rng: {"sample_weight": rng.random((ROWS, length))}


KINDS = {
    "dense": Kind(dense, normal(5), normal(2)),
    "convolution": Kind(convolution, normal(6, 6, 2), normal(2)),
    "masked_sequence": Kind(
        masked_sequence, tokens(5, 11), normal(5, 3), fit=token_weights(5)
    ),
    "masked_summary": Kind(masked_summary, tokens(5, 11), normal(2)),
    "attention": Kind(
        attention, tokens(4, 13, False), classes(13, 4), crossentropy()
    ),
    "nests": Kind(nests, normal(4), normal(2)),
    "regularizers": Kind(regularizers, normal(5), normal(2)),
    "counters": Kind(counters, normal(5), normal(2)),
    "frozen": Kind(frozen, normal(5), normal(2)),
    "tied": Kind(
        tied,
        tokens(3, 9, False),
        classes(9, 3),
        crossentropy(),
        token_weights(3),
    ),
    "outputs": Kind(
        outputs,
        normal(5),
        lambda rng: {
            "value": rng.standard_normal((ROWS, 3)),
            "label": classes(4)(rng),
        },
        two_losses,
        weights,
    ),
    "inputs": Kind(
        inputs,
        lambda rng: {"a": normal(2)(rng), "b": normal(3)(rng)},
        normal(6),
    ),
    "sum": Kind(
        dense,
        normal(5),
        normal(2),
        lambda: {"loss": keras.losses.MeanSquaredError(reduction="sum")},
        weights,
    ),
    "weighted_mean": Kind(
        masked_tokens,
        tokens(5, 11),
        normal(5, 3),
        lambda: {
            "loss": keras.losses.MeanSquaredError(
                reduction="mean_with_sample_weight"
            )
        },
        token_weights(5),
    ),
    "user_loss": Kind(
        regularizers,
        normal(5),
        normal(2),
        lambda: {"loss": user_loss, "metrics": [user_loss]},
    ),
    "between": Kind(between, normal(5), normal(2)),
    "complex": Kind(complex_numbers, normal(5), normal(2)),
    "hinge": Kind(dense, normal(5), ternary(2), hinge),
    "class_weight": Kind(
        dense,
        normal(5),
        classes(2),
        crossentropy(),
        lambda rng: {"class_weight": {0: 0.3, 1: 1.9}},
    ),
}


class Plain(keras.Model):
    """The layers called one by one, trained by Keras."""

    def __init__(self, layers):
        super().__init__()
        self.sequence = layers

    def call(self, x, training=False):
        for layer in self.sequence:  # as `keras.Sequential` does
            x = layer(x, training=training)
        return x
