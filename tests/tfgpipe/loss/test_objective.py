"""Losses of whole mini-batches: where their gradients come from."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from tiny import quickly

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


def stack():
    return [
        kl.Embedding(5, 4),
        kl.Dense(4, "tanh", kernel_regularizer="l2"),
        kl.Dense(3),
    ]


def trained(make, loss, eagerly=False, rows=7):
    """Losses and weights after two steps."""
    keras.utils.set_random_seed(1)
    layers = stack()
    model = make(layers)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    modes = {"run_eagerly": True} if eagerly else {}
    compiling = quickly(model, {"loss": loss(layers), **modes})
    model.compile(optimizer, **compiling)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, (rows, 2)), rng.random((rows, 2, 3))
    history = model.fit(x, y, rows, epochs=2, verbose=0).history["loss"]
    return [history, *model.get_weights()]


def reading(layers):
    """A common pattern: a penalty of weights that the loss adds by itself."""

    def loss(y_true, y_pred):
        table, kernel = layers[0].embeddings, layers[2].kernel
        error = keras.ops.mean(keras.ops.square(y_true - y_pred))
        rare = tf.gather(table.value, [3, 1, 3])
        return (
            error
            + 0.1 * keras.ops.sum(keras.ops.square(kernel))
            + keras.ops.sum(rare**2)
        )

    return loss


def gathering(layers):
    del layers

    def loss(y_true, y_pred):
        taken = tf.gather(y_pred, [0, 2, 2])
        return keras.ops.mean(keras.ops.square(taken - y_true[:3]))

    return loss


@pytest.mark.parametrize("loss", [reading, gathering])
def test_gradients_of_a_loss_of_the_user_are_those_of_keras(loss):
    expected = trained(keras.Sequential, loss)
    for eagerly in (False, True):
        found = trained(
            lambda layers: tfgpipe.GPipe(layers, 3, 3), loss, eagerly
        )
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, 1e-10, 1e-14)


class Adding(kl.Layer):
    """Adds a loss of some shape and type."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def call(self, x):
        loss = {
            "integer": lambda: keras.ops.cast(7, "int32"),
            "units": lambda: keras.ops.mean(x**2, (0, 1)),
            "rows": lambda: keras.ops.mean(x**2, (1, 2)),
        }[self.kind]()
        self.add_loss(loss)
        return x


def added(make, kind, rows):
    def with_loss(layers):
        return make([*layers[:2], Adding(kind), layers[2]])

    return trained(with_loss, lambda _: "mse", rows=rows)


@pytest.mark.parametrize(
    ("kind", "m", "rows"),
    [("integer", 2, 6), ("units", 3, 7), ("rows", 1, 7)],
)
def test_numbers_that_layers_add_to_the_loss_are_summed(kind, m, rows):
    expected = added(keras.Sequential, kind, rows)
    found = added(lambda layers: tfgpipe.GPipe(layers, 2, m), kind, rows)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-10, 1e-14)


@pytest.mark.parametrize("rows", [6, 7])
def test_losses_of_rows_that_layers_add_are_refused(rows):
    with pytest.raises(ValueError, match="`add_loss` must be given a scalar"):
        added(lambda layers: tfgpipe.GPipe(layers, 2, 3), "rows", rows)
