"""Models with a `call` of their own, as people write them."""

import keras
import numpy as np
from keras import layers as kl
from keras import ops

RNG = np.random.default_rng(0)
ROWS, NUMBERS = RNG.normal(size=(12, 8)), RNG.normal(size=(12, 4))
WORDS = RNG.integers(1, 30, (12, 6))
CLASSES = RNG.integers(0, 4, 12)
STEPS = RNG.normal(size=(12, 5, 8))
IMAGES = RNG.normal(size=(12, 8, 8, 2))
SPARSE = "sparse_categorical_crossentropy"
# By the name: what makes the model, x, y, the loss.
MODELS = {}


def model(x, y, loss="mse"):
    def add(make):
        MODELS[make.__name__] = make, x, y, loss
        return make

    return add


class Chain(kl.Layer):
    """Calls its layers, and adds what came in."""

    def __init__(self, *layers, **kwargs):
        super().__init__(**kwargs)
        self.own = list(layers)
        self.supports_masking = True

    def build(self, shape):
        for layer in self.own:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        h = x
        for layer in self.own:
            h = layer(h)
        return x + h


@model(ROWS, NUMBERS)
class Loop(keras.Model):
    """A list of layers, a branch of Python, operations between layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [kl.Dense(8, "tanh") for _ in range(4)]
        self.out = kl.Dense(4)

    def call(self, x, training=False):
        for i, block in enumerate(self.blocks):
            x = x + block(x) if i % 2 else block(x) * 0.5
        return self.out(x if training else x * 1.0)


@model(WORDS, CLASSES, SPARSE)
class Softmax(keras.Model):
    """Ends in a softmax, whose logits Keras's loss goes on from."""

    def __init__(self):
        super().__init__()
        self.embed = kl.Embedding(30, 8, mask_zero=True)
        self.blocks = [Chain(kl.Dense(8, "gelu")) for _ in range(2)]
        self.pool = kl.GlobalAveragePooling1D()
        self.head = kl.Dense(4, "softmax")

    def call(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(x))


@model(WORDS, WORDS, SPARSE)
class TiedWords(keras.Model):
    """A causal mask, positions of its own, the table as the last matrix."""

    def __init__(self):
        super().__init__()
        self.embed = kl.Embedding(30, 8, mask_zero=True)
        self.attention = [kl.MultiHeadAttention(2, 4) for _ in range(2)]
        self.norm = [kl.LayerNormalization() for _ in range(2)]

    def build(self, shape):
        self.places = self.add_weight(
            shape=(shape[-1], 8), initializer="normal", name="places"
        )
        self.embed.build(shape)
        shape = (*shape, 8)
        for attention, norm in zip(self.attention, self.norm):
            attention.build(shape, shape)
            norm.build(shape)
        self.built = True

    def call(self, words):
        x = self.embed(words) + self.places
        count = ops.shape(words)[1]
        causal = ops.tril(ops.ones((1, count, count), "bool"))
        for attention, norm in zip(self.attention, self.norm):
            x = norm(x + attention(x, x, attention_mask=causal))
        return ops.softmax(x @ ops.transpose(self.embed.embeddings))


@model({"left": ROWS, "right": ROWS[::-1]}, {"a": NUMBERS, "b": NUMBERS})
class Towers(keras.Model):
    """Dicts in and out, a shared tower, a loss of its own."""

    def __init__(self):
        super().__init__()
        self.tower = keras.Sequential([kl.Dense(8, "tanh"), kl.Dense(8)])
        self.a, self.b = kl.Dense(4), kl.Dense(4)

    def call(self, inputs):
        left, right = self.tower(inputs["left"]), self.tower(inputs["right"])
        self.add_loss(0.1 * ops.mean(ops.square(left - right)))
        return {"a": self.a(left * right), "b": self.b(left - right)}


@model(STEPS, NUMBERS)
class OverTime(keras.Model):
    """A cell of a recurrent layer, called in a loop of Python."""

    def __init__(self):
        super().__init__()
        self.cell, self.mix, self.out = kl.LSTMCell(6), kl.Dense(6), kl.Dense(4)

    def call(self, x):
        h = ops.zeros((ops.shape(x)[0], 6), x.dtype)
        state = [h, h]
        for t in range(x.shape[1]):
            h, state = self.cell(x[:, t], state)
            h = self.mix(h)
        return self.out(h)


class Writer(kl.Dense):
    """Leaves a tensor in Python for another layer."""

    def call(self, x):
        self.left = ops.tanh(x)
        return super().call(x)


@model(ROWS, NUMBERS)
class LeftInPython(keras.Model):
    def __init__(self):
        super().__init__()
        self.writer, self.middle, self.out = Writer(8), kl.Dense(8), kl.Dense(4)

    def call(self, x):
        return self.out(self.middle(self.writer(x)) + self.writer.left)


@model(IMAGES, IMAGES[..., :1])
class UNet(keras.Model):
    """Skips in a list."""

    def __init__(self):
        super().__init__()
        self.down = [kl.Conv2D(f, 3, padding="same") for f in (4, 6)]
        self.up = [kl.Conv2DTranspose(f, 2, 2) for f in (6, 4)]
        self.pool, self.out = kl.MaxPooling2D(), kl.Conv2D(1, 1)

    def call(self, x):
        skips = []
        for layer in self.down:
            x = ops.relu(layer(x))
            skips.append(x)
            x = self.pool(x)
        for layer in self.up:
            x = ops.concatenate([layer(x), skips.pop()], axis=-1)
        return self.out(x)


@model(ROWS, NUMBERS)
class Nested(keras.Model):
    """Functional and own models inside, one that is frozen."""

    def __init__(self):
        super().__init__()
        x = keras.Input((8,))
        self.graph = keras.Model(x, kl.Dense(8, "tanh")(x) + x)
        self.frozen = kl.Dense(8, trainable=False)
        self.loop = Loop()

    def call(self, x, training=False):
        x = self.frozen(self.graph(x))
        return self.loop(x, training=training)
