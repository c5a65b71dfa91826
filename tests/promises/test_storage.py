"""What is kept of variables: storage that tapes watch, and who else reads it.

A Keras variable keeps its value in a `tf.Variable`, which tapes watch if it was
made to be trained. Layers may read that by other ways than the variable.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from beside_keras import normal
from keras import layers as kl

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")
EVERYWHERE = pytest.mark.parametrize(
    ("k", "eagerly"), [(1, False), (1, True), (2, False), (2, True)]
)


def compared(make, k, eagerly, **arguments):
    """Trains a pipeline of K cells, M = K, and plain Keras, alike."""

    def trained(model, **told):
        keras.utils.set_random_seed(5)
        model = model(make())
        model.build((None, 4))
        for variable in model.variables:
            if variable.name in ("kernel", "scale"):
                variable.trainable = True
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, **{"loss": "mse", **arguments}, **told)
        x = normal(4)
        history = model.fit(x, normal(2), batch_size=4, epochs=2, verbose=0)
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(model(x) ** 2)
        weights = [v.value for v in model.trainable_variables]
        found = tape.gradient(value, weights)
        return (
            history.history["loss"],
            model.get_weights(),
            [0.0 if d is None else tf.convert_to_tensor(d) for d in found],
            [d is None for d in found],
        )

    expected = trained(keras.Sequential)
    found = trained(
        lambda layers: tfgpipe.GPipe(layers, k, k), run_eagerly=eagerly
    )
    for a, b in zip(
        keras.tree.flatten(found), keras.tree.flatten(expected), strict=True
    ):
        np.testing.assert_allclose(a, b, 1e-10, 1e-12)


# ---------------------------------------------------- frozen, and then not
class Scale(kl.Layer):
    """Has a weight that is frozen, one way or the other, when it is placed."""

    def __init__(self, made_trainable, **kwargs):
        super().__init__(**kwargs)
        self.made_trainable = made_trainable

    def build(self, shape):
        self.scale = self.add_weight(
            shape=(shape[-1],),
            initializer="ones",
            regularizer="l2",
            name="scale",
            trainable=self.made_trainable,
        )
        self.scale.trainable = False

    def call(self, x):
        return x * self.scale


def built_and_frozen():
    layers = [kl.Dense(4, "tanh"), kl.Dense(4, kernel_regularizer="l2")]
    for layer in layers:
        layer.build((None, 4))
        layer.trainable = False
    return [*layers, kl.Dense(2)]


def frozen_by_itself():
    return [kl.Dense(4, "tanh"), Scale(True), kl.Dense(2)]


def made_frozen():
    return [kl.Dense(4, "tanh"), Scale(False), kl.Dense(2)]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "make", [built_and_frozen, frozen_by_itself, made_frozen]
)
@EVERYWHERE
def test_weights_unfrozen_after_they_were_placed_are_trained_as_in_keras(
    make, k, eagerly
):
    """Regularisers and tapes missed them, whose storage was made frozen.

    Keras's own tape misses those that were made with `trainable=False`.
    """
    compared(make, k, eagerly)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_loss_that_reads_a_weight_made_frozen_does_not_train_it():
    layers = []

    def make():
        layers[:] = made_frozen()
        return layers

    def loss(y_true, y_pred):
        scale = keras.ops.sum(layers[1].scale)
        return keras.ops.mean((y_true - y_pred) ** 2) + scale

    compared(make, 1, False, loss=loss)
