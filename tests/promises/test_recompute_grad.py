"""The numbers of `tf.recompute_grad`, which recomputes in plain Keras.

It is put around the layers of each cell, in a model that is trained by Keras or
by a `tf.GradientTape`. It knows of no state: no dropout, no moving statistics.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from tiny import assert_close, quickly

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64", "as_written")


@pytest.fixture
def as_written():
    """Without TensorFlow's graph optimiser.

    With it, plain Keras that trains convolutions with `tf.recompute_grad` makes
    a wrong step now and then, in TensorFlow 2.21: in one run of 25.
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )
    yield
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": before["disable_meta_optimizer"]}
    )


class Recomputed(kl.Layer):
    """Layers one after the other, computed again in the backward pass."""

    def __init__(self, layers):
        super().__init__()
        self.inner = keras.Sequential(layers)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return tf.recompute_grad(self.inner)(x)

    def compute_output_shape(self, shape):
        return self.inner.compute_output_shape(shape)


@keras.saving.register_keras_serializable()
class Block(kl.Layer):
    """Attention and two dense layers, each around a shortcut."""

    def build(self, shape):
        self.norm = kl.LayerNormalization()
        self.attention = kl.MultiHeadAttention(2, 3)
        self.wide, self.narrow = kl.Dense(7, "gelu"), kl.Dense(shape[-1])
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], 7))

    def call(self, x):
        h = self.norm(x)
        h = x + self.attention(h, h)
        return h + self.narrow(self.wide(h))


def dense():
    return [
        [kl.Dense(6, "tanh"), kl.LayerNormalization()],
        [kl.Dense(5, "gelu", kernel_regularizer="l2"), kl.Dense(4, "tanh")],
        [kl.Dense(3)],
    ]


def transformer():
    return [[Block()], [Block()], [Block(), kl.Dense(3)]]


def convolutions():
    return [
        [kl.Conv2D(4, 3, activation="relu"), kl.Conv2D(4, 3, padding="same")],
        [kl.DepthwiseConv2D(3), kl.GlobalAveragePooling2D()],
        [kl.Dense(3)],
    ]


MODELS = {
    "dense": (dense, (4,), (3,)),
    "transformer": (transformer, (5, 4), (5, 3)),
    "convolutions": (convolutions, (8, 8, 2), (3,)),
}


def data(name, rows=12):
    _, *shapes = MODELS[name]
    rng = np.random.default_rng(2)
    return [rng.standard_normal((rows, *shape)) for shape in shapes]


def recomputing(name):
    """Plain Keras with `tf.recompute_grad` around the layers of a cell."""
    make, shape, _ = MODELS[name]
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input(shape), *map(Recomputed, make())])


def pipeline(name, m, schedule="gpipe"):
    """The same cells."""
    make, shape, _ = MODELS[name]
    keras.utils.set_random_seed(3)
    cells = make()
    return tfgpipe.GPipe(
        [keras.Input(shape), *itertools.chain(*cells)],
        len(cells),
        m,
        layers_per_cell=[len(layers) for layers in cells],
        schedule=schedule,
        remat="always",
    )


def trained(model, x, y):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, **quickly(model, {"loss": "mse"}))
    history = model.fit(x, y, 4, epochs=2, shuffle=False, verbose=0).history
    variables = [*model.weights, *model.optimizer.variables]
    return history, [v.numpy() for v in variables]


# Of the transformer, the gradients are compared below.
@pytest.mark.parametrize(
    "name",
    [
        "dense",
        pytest.param("transformer", marks=pytest.mark.slow),
        "convolutions",
    ],
)
def test_training_is_that_of_keras_with_recompute_grad(name):
    x, y = data(name)
    expected = trained(recomputing(name), x, y)
    for m, schedule in ((1, "gpipe"), (3, "1f1b")):
        assert_close(trained(pipeline(name, m, schedule), x, y), expected)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_a_tape_with_recompute_grad(name):
    x, y = data(name)
    plain = recomputing(name)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((plain(x) - y) ** 2)
        total = tf.add_n([loss, *plain.losses])
    gradients = tape.gradient(total, [v.value for v in plain.weights])
    assert all(np.abs(g).max() > 0 for g in gradients)

    model = pipeline(name, m=4)
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = model.get_weights()
    logs = model.train_on_batch(x, y, return_dict=True)
    after = model.get_weights()
    assert_close(logs["loss"], total.numpy())
    found = [a - b for a, b in zip(before, after)]
    assert_close(found, [g.numpy() for g in gradients])


def test_layers_run_as_often_as_with_recompute_grad(dense_calls):
    """In each training step: once forward, and once more going back."""
    x, y = data("dense")
    plain = recomputing("dense")
    del dense_calls[:]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((plain(x) - y) ** 2)
    tape.gradient(loss, plain.trainable_variables[0].value)
    expected = len(dense_calls)
    assert expected == 2 * 4

    model = pipeline("dense", m=1)
    model.compile("sgd", "mse", run_eagerly=True)
    del dense_calls[:]
    model.train_on_batch(x, y)
    assert len(dense_calls) == expected
