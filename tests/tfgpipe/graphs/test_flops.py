import math

import keras
import pytest
import tensorflow as tf
from keras import layers

from tfgpipe.cells import outline
from tfgpipe.sequence.steps import resolve_cost


def spec(*shape, dtype="float32"):
    return keras.KerasTensor((None, *shape), dtype)


def built(layer, input_spec):
    """Builds a layer the way `GPipe` does: without values of variables."""
    with keras.StatelessScope(initialize_variables=False):
        layer(input_spec)
    return layer


def layer_flops(layer, input_spec):
    """As `GPipe` estimates it."""

    def call(x, training):
        return layer(x, training=training)

    return sum(outline(call, [layer], input_spec).flops)


def flops(layer, input_spec):
    return layer_flops(built(layer, input_spec), input_spec)


class Call(layers.Layer):
    """Calls a function of its sublayers and its input."""

    def __init__(self, function, *sublayers):
        super().__init__()
        self.function = function
        self.sublayers = list(sublayers)

    def call(self, x):
        return self.function(*self.sublayers, x)


# ------------------------------------------------------------ hand formulas
EXACT = {
    "dense": (layers.Dense(5), spec(3), 2 * 3 * 5 + 5),
    "dense, relu": (layers.Dense(5, "relu"), spec(3), 2 * 3 * 5 + 5 + 5),
    "conv, valid": (
        layers.Conv2D(5, 3),
        spec(8, 9, 4),
        6 * 7 * 5 * (2 * 3 * 3 * 4 + 1),
    ),
    "conv, strides, same": (
        layers.Conv2D(5, 3, strides=2, padding="same"),
        spec(9, 9, 4),
        5 * 5 * 5 * (2 * 3 * 3 * 4 + 1),
    ),
    "depthwise": (
        layers.DepthwiseConv2D(3, depth_multiplier=2),
        spec(8, 8, 4),
        6 * 6 * 8 * (2 * 3 * 3 + 1),
    ),
    "transposed conv": (
        layers.Conv2DTranspose(5, 3, strides=2, padding="same"),
        spec(8, 8, 4),
        8 * 8 * 4 * 2 * 3 * 3 * 5 + 16 * 16 * 5,
    ),
    "embedding": (layers.Embedding(100, 8), spec(7, dtype="int32"), 0),
    "flatten": (layers.Flatten(), spec(3, 4), 0),
    "max pooling": (layers.MaxPooling2D(2), spec(8, 8, 3), 8 * 8 * 3),
    "softmax": (layers.Softmax(), spec(7), 5 * 7),
    "einsum": (
        layers.EinsumDense("abc,cde->abde", (None, 4, 5)),
        spec(7, 3),
        7 * 2 * 3 * 4 * 5,
    ),
    "one branch": (
        Call(
            lambda x: tf.cond(
                tf.reduce_sum(x) > 0, lambda: x @ tf.ones((4, 4)), lambda: x * 2
            )
        ),
        spec(4),
        2 * 4 * 4 + 4 + 1,
    ),
    "loop": (
        Call(
            lambda x: keras.ops.fori_loop(
                2, 9, lambda i, y: y @ tf.ones((4, 4)), x
            )
        ),
        spec(4),
        7 * 2 * 4 * 4,
    ),
    "called function": (
        Call(tf.function(lambda x: x @ tf.ones((4, 5)), autograph=False)),
        spec(4),
        2 * 4 * 5,
    ),
    "mapped function": (
        Call(lambda x: tf.map_fn(lambda row: row * 2, x[0])),
        spec(6, 5),
        6 * 5,
    ),
}


@pytest.mark.parametrize("kind", EXACT)
def test_layer_flops_simple_layer_equals_hand_formula(kind):
    layer, input_spec, expected = EXACT[kind]
    assert flops(layer, input_spec) == expected


@pytest.mark.parametrize(
    ("layer", "gates", "biases"),
    [
        (layers.LSTM(16), 4, 1),
        (layers.LSTM(16, unroll=True), 4, 1),
        (layers.LSTM(16, return_sequences=True, dropout=0.1), 4, 1),
        (layers.GRU(16), 3, 2),
        (layers.SimpleRNN(16), 1, 1),
    ],
)
def test_layer_flops_recurrent_counts_every_time_step(layer, gates, biases):
    steps, width, units = 11, 24, 16
    products = steps * 2 * (width + units) * gates * units
    total = flops(layer, spec(steps, width))
    assert products < total < products * 1.15


def test_layer_flops_unknown_length_counts_as_one():
    dense = flops(layers.Dense(5), spec(None, 3))
    assert dense == 2 * 3 * 5 + 5
    conv = flops(layers.Conv2D(5, 3), spec(None, None, 4))
    assert conv == 5 * (2 * 3 * 3 * 4 + 1)
    step = flops(layers.LSTM(8), spec(1, 3))
    assert flops(layers.LSTM(8), spec(None, 3)) == pytest.approx(step, rel=0.02)


def test_layer_flops_unused_results_are_not_counted():
    def waste(x):
        _ = x @ tf.ones((4, 100))
        return x + 1

    assert flops(Call(waste), spec(4)) == 4


# ----------------------------------------------------------- the user's own


@pytest.mark.parametrize(
    "cost", [-1, -0.5, math.nan, math.inf, True, "3", 1j, [1], 10**400]
)
def test_resolve_cost_no_cost_is_an_error(cost):
    layer = layers.Dense(3, name="mine")
    with pytest.raises(ValueError, match="`cost` of layer 'mine'") as error:
        resolve_cost(layer, cost, spec(3))
    assert repr(cost) in str(error.value)
    with pytest.raises(ValueError, match="`cost` of layer 'mine'"):
        resolve_cost(layer, lambda layer, x: cost, spec(3))
