"""Which cells are alike: two that differ never may be."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from kinds import Block
from traces import Watched, differentiated, traced

from tfgpipe.graphs import part_key, parts_of

_KEPT = []  # graphs that were compared: an id is not used again


def key(*layers, inputs=1, shape=(None, 6, 4)):
    """The key of a cell of layers, with its backward pass."""
    for layer in layers:
        if not layer.built:
            layer.build(shape)
    x = [tf.TensorSpec(shape)] * inputs if inputs > 1 else tf.TensorSpec(shape)
    places = [0, *(1 for _ in layers)]
    made = differentiated(traced([Watched(x), *layers], x, places))
    _KEPT.append(made)
    _, part = parts_of(made, 2, [[] for _ in made.dw])
    return part_key(part, [])


# -------------------------------------------------------------------- alike
class Scale(kl.Layer):
    """Multiplies by its attribute."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor
        self.built = True

    def call(self, x):
        return x * self.factor


class Calls(Scale):
    """Calls its attribute."""

    def call(self, x):
        return self.factor(x)


def positive(x):
    return keras.ops.maximum(x, 0.0)


def branches():
    return Calls(
        tf.function(
            lambda x: tf.cond(x[0, 0, 0] > 0, lambda: 2.0 * x, lambda: x),
            autograph=False,
        )
    )


ALIKE = {
    "dense": lambda: kl.Dense(4, "gelu", kernel_regularizer="l2"),
    "normalization": kl.BatchNormalization,
    "dropout": lambda: kl.Dropout(0.3),
    "recurrent": lambda: kl.Bidirectional(kl.LSTM(4)),
    "block": lambda: Block(4),
    "function": lambda: kl.Lambda(positive),
    "lambda": lambda: kl.Lambda(lambda x: 2.0 * x),
    "constant": lambda: Scale(np.arange(4.0)),
    "large_constant": lambda: Calls(
        lambda x: x + tf.constant(np.arange(24000.0), "float32")[0]
    ),
    "branches": branches,
    "seed": lambda: kl.Dropout(0.5, seed=len(_KEPT)),
    "own_gradient": lambda: own_gradient(3.0),
}


@pytest.mark.parametrize("name", ALIKE)
def test_equal_layers_are_alike(name):
    assert key(ALIKE[name]()) == key(ALIKE[name]())


def test_names_and_values_do_not_matter():
    one = kl.Dense(4, name="one", kernel_initializer="zeros")
    other = kl.Dense(4, name="two", kernel_initializer="ones")
    assert key(one) == key(other)


# ------------------------------------------------------------------- unlike


class Freeze(kl.Layer):
    def __init__(self, trainable):
        super().__init__()
        self.a = self.add_weight(shape=(4,), trainable=trainable)

    def call(self, x):
        return x * self.a


class Claims(kl.Layer):
    """Says a size that no operation knows."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def call(self, x):
        y = tf.reshape(x, tf.concat([tf.shape(x)[:1], [-1]], 0))
        y.set_shape([None, self.size])
        return y


class OnDevice(Scale):
    def call(self, x):
        with tf.device(self.factor):
            return 2.0 * x


class Prints(kl.Layer):
    def call(self, x):
        tf.print("", output_stream="file:///dev/null")
        return x


class Adds(Scale):
    def call(self, x):
        self.add_loss(self.factor * keras.ops.mean(x))
        return x


def looped(count):
    return Calls(
        lambda x: tf.while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, y * count), [0, x]
        )[1]
    )


def own_gradient(factor):
    @tf.custom_gradient
    def scaled(x):
        return x * 2.0, lambda dy: dy * factor

    return Calls(scaled)


# Each of two arguments that give layers which compute something else.
UNLIKE = {
    "class": ((kl.ReLU, kl.ELU), lambda cls: cls()),
    "units": ((3, 4), kl.Dense),
    "activation": (("relu", "gelu"), lambda v: kl.Dense(4, v)),
    "bias": ((False, True), lambda v: kl.Dense(4, use_bias=v)),
    "epsilon": ((1e-3, 1e-5), lambda v: kl.LayerNormalization(epsilon=v)),
    "rate": ((0.1, 0.2), kl.Dropout),
    "policy": (("float32", "mixed_bfloat16"), lambda v: kl.Dense(4, dtype=v)),
    "trainable": ((False, True), Freeze),
    "number": ((2.0, 3.0), Scale),
    "array": ((np.arange(4.0), np.arange(4.0) + 1), Scale),
    "tensor": ((2.0, 3.0), lambda v: Scale(tf.constant(v))),
    "captured": ((2.0, 3.0), lambda v: Scale(tf.Variable(v))),
    "captured_of_one_value": ((2.0, 2.0), lambda v: Scale(tf.Variable(v))),
    "loop": ((2.0, 3.0), looped),
    "set_shape": ((None, 24), Claims),
    "device": (("CPU:0", "CPU:1"), OnDevice),
    "side_effects": ((1, 2), lambda v: Prints()),
    "added_loss": ((2.0, 3.0), Adds),
    "own_gradient": ((2.0, 3.0), own_gradient),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_layers_that_differ_are_not_alike(name):
    (one, other), make = UNLIKE[name]
    assert key(make(one)) != key(make(other))


class Picks(kl.Layer):
    """Calls a layer on one of its inputs, and hands on the first one."""

    def __init__(self, units, index):
        super().__init__()
        self.dense, self.index = kl.Dense(units), index

    def build(self, shape):
        self.dense.build(shape)

    def call(self, xs):
        return xs[0], self.dense(xs[self.index])


def test_cells_are_alike_if_their_operations_and_positions_are():
    def written(units, index):
        return key(Picks(units, index), inputs=2, shape=(None, 3))

    assert written(2, 0) == written(2, 0)
    assert written(2, 0) != written(2, 1)
    assert written(2, 0) != written(4, 0)


def test_layer_in_a_cell_twice_is_a_function_of_two_weights():
    """Gradients of its uses are added up outside of what cells share."""
    shared = kl.Dense(4)
    assert key(shared, shared) == key(kl.Dense(4), kl.Dense(4))
