"""Functional models, small ones of the kinds that people have."""

import keras
from keras import layers as kl
from keras import ops
from kinds import ROWS, Kind, normal


def unet():
    """Long skips."""
    x = keras.Input((8, 8, 2))
    skips, h = [], x
    for filters in (4, 6):
        h = kl.Conv2D(filters, 3, padding="same", activation="relu")(h)
        skips.append(h)
        h = kl.MaxPooling2D()(h)
    h = kl.Conv2D(8, 3, padding="same", activation="relu")(h)
    for filters, skip in ((6, skips[1]), (4, skips[0])):
        h = kl.UpSampling2D()(h)
        h = kl.Concatenate()([h, skip])
        h = kl.Conv2D(filters, 3, padding="same", activation="tanh")(h)
    return keras.Model(x, kl.Conv2D(1, 1)(h))


def residual():
    """Short skips, and one tensor that many use."""
    x = keras.Input((5,))
    first = kl.Dense(6, "tanh")(x)
    h = first
    for _ in range(3):
        h = kl.Add()([h, kl.Dense(6, "tanh")(h)])
        h = h + first * 0.5
    return keras.Model(x, kl.Dense(2)(h))


def siamese():
    """A tower that is called twice, and a distance of `keras.ops`."""
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    tower = keras.Sequential([kl.Dense(5, "tanh"), kl.Dense(3)])
    distance = ops.sum(ops.square(tower(a) - tower(b)), -1, keepdims=True)
    return keras.Model([a, b], kl.Dense(1)(distance))


def dicts():
    """Dicts of inputs and outputs, not in the order of their names."""
    inputs = {
        "z": keras.Input((3,), name="z"),
        "a": keras.Input((2,), name="a"),
    }
    h = kl.Concatenate()([kl.Dense(4, "tanh")(inputs["z"]), inputs["a"]])
    h = kl.Dense(5, "tanh")(h)
    outputs = {"value": kl.Dense(2)(h), "label": kl.Dense(3)(h)}
    return keras.Model(inputs, outputs)


def translator():
    """Two recurrent networks; masks, states, and keyword tensors."""
    source = keras.Input((6,), dtype="int32", name="source")
    target = keras.Input((5,), dtype="int32", name="target")
    embedding = kl.Embedding(9, 4, mask_zero=True)
    _, *state = kl.LSTM(4, return_state=True)(embedding(source))
    h = kl.LSTM(4, return_sequences=True)(
        embedding(target), initial_state=state
    )
    h = kl.MultiHeadAttention(2, 3)(query=h, value=h, use_causal_mask=True)
    return keras.Model([source, target], kl.Dense(3)(h))


def nested():
    """A model inside a model, called with other dtypes and ranks."""
    x = keras.Input((4,))
    inner = keras.Model(x, [kl.Dense(4, "tanh")(x), kl.Dense(2)(x)])
    y = keras.Input((4,), dtype="int32")
    first, second = inner(y)
    third, _ = inner(first)
    return keras.Model(y, kl.Concatenate()([third, second, first[:, 1:3]]))


def reused():
    """Tensors of models inside, beside calls of those and of one in another."""
    a, b = keras.Input((4,)), keras.Input((4,))
    h = kl.Dense(4, "tanh")(a)
    to_b = keras.Model(a, kl.Dense(4)(h))
    to_a = keras.Model(b, [kl.Dense(4, "tanh")(b), b])
    circle = keras.Model(a, to_a(to_b(a))[0] * h)
    tail = keras.Model(h, to_b.output)
    ends = [circle(b), to_b(to_a.outputs[0]), to_b.output - tail(b), h]
    return keras.Model([a, b], kl.Concatenate()([*ends, circle.output]))


def unmasked():
    """An attention takes the mask off what others take and the loss gets."""
    tokens = keras.Input((6,), dtype="int32")
    h = kl.Embedding(9, 4, mask_zero=True, name="h")(tokens)
    before = kl.GRU(4, return_sequences=True)(h)  # it comes first in Keras
    other = kl.MultiHeadAttention(2, 3)(h, h)
    after = kl.GRU(4, return_sequences=True)(h)
    summed = kl.Add()([h, other, kl.Dense(4)(before), after])
    outputs = kl.Dense(2, name="sum")(summed), kl.Dense(3, name="own")(other)
    return keras.Model(tokens, [outputs[0], h, outputs[1]])


class Residual(kl.Layer):
    """Two layers, a sum without a mask, and the mask that came."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = kl.Dense(4, "tanh"), kl.Dense(4)
        self.supports_masking = True

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        return x + self.second(self.first(x))


class Twice(kl.Layer):
    """Hands its input on, twice."""

    def call(self, x):
        return x, x


def masked_inside():
    """Masks that symbolic tensors do not show.

    They come out of one model, and go into another, where an attention takes
    them off what is pooled beside it.
    """
    tokens = keras.Input((6,), dtype="int32")
    embedder = keras.Model(tokens, kl.Embedding(9, 4, mask_zero=True)(tokens))
    y = keras.Input((6, 4))
    attended = kl.MultiHeadAttention(2, 3)(y, y)
    pools = [kl.GlobalAveragePooling1D()(t) for t in (y, attended)]
    inner = keras.Model(y, kl.Concatenate()(pools))
    x = keras.Input((6,), dtype="int32")
    h = Residual()(embedder(x))
    first, second = Twice()(kl.Activation("linear")(h))
    other = kl.MultiHeadAttention(2, 3)(first, first)
    ends = [kl.GlobalAveragePooling1D()(t) for t in (h, second, other)]
    return keras.Model(x, kl.Dense(2)(kl.Concatenate()([*ends, inner(h)])))


class Scale(kl.Layer):
    """Multiplies by state that it moves in training."""

    def build(self, shape):
        self.scale = self.add_weight((), "ones", trainable=False)

    def call(self, x, training=None):
        if training:
            mean = ops.mean(ops.abs(ops.stop_gradient(x)))
            self.scale.assign(0.9 * self.scale + 0.1 * mean)
        return x * self.scale


def _beside(call, other):
    """A call on a deep tensor, beside another on a shallow one."""
    x = keras.Input((4,))
    h = kl.Dense(4, "tanh")(kl.Dense(4, "tanh")(x))
    ends = [kl.Dense(2)(other(x)), kl.Dense(3)(call(h))]
    return keras.Model(x, kl.Concatenate()(ends))


def normed_beside():
    """A layer beside another, which assigns its weight in training."""
    dense = kl.Dense(4)
    dense.build((None, 4))
    return _beside(kl.SpectralNormalization(dense), dense)


def closure_beside():
    """A function that reads a variable which a layer elsewhere assigns."""
    scale = Scale()
    scale.build((None, 4))
    return _beside(kl.Lambda(lambda x: x * scale.scale), scale)


class Mixed(kl.Layer):
    """Says that its outputs are like its first input."""

    def call(self, image, text):
        return text + ops.mean(image, 1, keepdims=True)

    def compute_output_shape(self, input_shape):
        return input_shape


def wrong_length():
    """A layer that is wrong about its length, which Keras does not mind."""
    image, text = keras.Input((2, 4)), keras.Input((None, 4))
    return keras.Model([image, text], kl.Dense(2)(Mixed()(image, text)))


class Both(kl.Layer):
    """Calls layers on a tensor, and on another if there is one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second, self.last = (kl.Dense(4) for _ in range(3))

    def build(self, x_shape, other_shape=None):
        for layer in (self.first, self.second, self.last):
            layer.build(x_shape)

    def call(self, x, other=None):
        h = self.first(x)
        return self.last(h if other is None else h + self.second(other))


def optional():
    """Inputs that may be left out, of a layer and of a model inside."""
    x, other = (keras.Input((4,), optional=i == 1) for i in range(2))
    a, b = (keras.Input((4,), dtype="float32", optional=True) for _ in "ab")
    inner = keras.Model([a, b], kl.Dense(2)(a))
    h = kl.Add()([Both()(x, other), x])
    return keras.Model([x, other], kl.Dense(2)(h) + inner([x, other]))


class Block(kl.Layer):
    """Calls layers, and tells the dropout `training` itself."""

    def build(self, shape):
        width = shape[-1]
        self.norm = kl.LayerNormalization()
        self.attention = kl.MultiHeadAttention(2, 3)
        self.first = kl.Dense(8, "gelu")
        self.dropout = kl.Dropout(0.5, seed=3)
        self.second = kl.Dense(width)
        self.attention.build(shape, shape)
        self.norm.build(shape)
        self.first.build(shape)
        self.second.build((*shape[:-1], 8))

    def call(self, x, scale=1.0, training=None):
        h = self.norm(x)
        x = x + self.attention(h, h)
        h = self.dropout(self.first(x), training=training)
        return x + scale * self.second(h)


class Encoder(kl.Layer):
    """All blocks in one layer, and a variable of its own."""

    def __init__(self, num_blocks, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Block() for _ in range(num_blocks)]

    def build(self, shape):
        for block in self.blocks:
            block.build(shape)
        self.position = self.add_weight(
            shape[1:], "normal", regularizer=keras.regularizers.L2(0.01)
        )

    def call(self, x):
        x = x + self.position
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x


def encoder(num_blocks=2):
    """A layer that has most of the model inside."""
    x = keras.Input((5, 4))
    h = Encoder(num_blocks)(kl.Dense(4)(x))
    return keras.Model(x, kl.Dense(2)(h[:, 0]))


class CTCLoss(kl.Layer):
    """Adds the loss of texts in pictures, as in the readers of captchas."""

    def call(self, labels, logits):
        ones = ops.ones((ops.shape(logits)[0],), "int32")
        lengths = [ones * ops.shape(t)[1] for t in (labels, logits)]
        loss = ops.ctc_loss(labels, logits, *lengths, mask_index=0)
        self.add_loss(ops.mean(loss))
        return logits


def captcha():
    """Its labels are inputs, for a loss in a layer."""
    labels = keras.Input((2,), dtype="int32")
    x = keras.Input((6, 4))
    logits = kl.Dense(5)(kl.Conv1D(6, 3, activation="tanh")(x))
    return keras.Model([labels, x], CTCLoss()(labels, logits))


# -------------------------------------------------------- how they are trained
def ids(length, size):
    return lambda rng: rng.integers(0, size, (ROWS, length))


def several(*parts):
    return lambda rng: [part(rng) for part in parts]


def by_name(**parts):
    return lambda rng: {name: part(rng) for name, part in parts.items()}


def losses():
    return {
        "loss": {"value": "mse", "label": "mae"},
        "loss_weights": {"value": 0.5, "label": 2.0},
        "metrics": {"label": ["mse"]},
    }


def more_than_its_layers():
    """A nested model that does more than its layers."""
    x = keras.Input((5,))
    inner = keras.Sequential([keras.Input((5,)), kl.Dense(5)])
    inner.activity_regularizer = keras.regularizers.L2(0.1)
    call = inner.call
    inner.call = lambda *args, **kwargs: 2 * call(*args, **kwargs)
    return keras.Model(x, kl.Dense(2)(inner(x)))


pair = several(normal(4), normal(4))
outputs = by_name(value=normal(2), label=normal(3))
FUNCTIONAL = {
    "unet": Kind(unet, normal(8, 8, 2), normal(8, 8, 1)),
    "residual": Kind(residual, normal(5), normal(2)),
    "siamese": Kind(siamese, pair, normal(1)),
    "dicts": Kind(dicts, by_name(z=normal(3), a=normal(2)), outputs, losses),
    "translator": Kind(translator, several(ids(6, 9), ids(5, 9)), normal(5, 3)),
    "nested": Kind(nested, ids(4, 9), normal(8)),
    "reused": Kind(reused, pair, normal(20)),
    "masked_inside": Kind(masked_inside, ids(6, 9), normal(2)),
    "unmasked": Kind(
        unmasked,
        ids(6, 9),
        several(normal(6, 2), normal(6, 4), normal(6, 3)),
        lambda: {"loss": ["mse"] * 3},
    ),
    "captcha": Kind(
        captcha,
        several(lambda rng: 1 + ids(2, 4)(rng), normal(6, 4)),
        normal(4, 5),
    ),
    "opened": Kind(encoder, normal(5, 4), normal(2)),
    "more_than_its_layers": Kind(more_than_its_layers, normal(5), normal(2)),
    "wrong_length": Kind(
        wrong_length, several(normal(2, 4), normal(5, 4)), normal(5, 2)
    ),
    # Branches that share state are called in the order of Keras.
    "normed_beside": Kind(normed_beside, normal(4), normal(5)),
    "closure_beside": Kind(closure_beside, normal(4), normal(5)),
}
# The largest M at which they have Keras's numbers, if it is not 3.
MOST = {
    **dict.fromkeys(
        ("captcha", "opened", "normed_beside", "closure_beside"), 1
    ),
    **dict.fromkeys(("more_than_its_layers", "wrong_length"), 2),
}
