"""What is refused in a graph is refused where Python runs the cells."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe

X = np.ones((4, 3), "float32")


def compiled(layer, remat="always"):
    model = tfgpipe.GPipe([kl.Dense(3), layer], 2, 2, remat=remat)
    model.compile("sgd", "mse", run_eagerly=True)
    return model


class Noise(kl.Layer):
    """Draws what the recomputation would not draw again."""

    def __init__(self, draw, **kwargs):
        super().__init__(**kwargs)
        self.draw = draw

    def call(self, x):
        return x * tf.cast(self.draw(), x.dtype)


def stateful(shape=()):
    return tf.random.uniform(shape)


@pytest.mark.parametrize("draw", [stateful, tf.function(stateful)])
def test_unseeded_random_numbers_are_refused_if_computed_again(draw):
    layer = Noise(draw, name="noise")
    with pytest.raises(ValueError, match="'noise' of cell 1, which runs R"):
        compiled(layer).train_on_batch(X, X)
    with pytest.warns(UserWarning, match="RandomUniform, which has side"):
        compiled(layer, "never").train_on_batch(X, X)


def test_numbers_of_python_are_refused_if_computed_again():
    rng = np.random.default_rng(0)
    model = compiled(Noise(rng.random, name="noise"))
    with pytest.raises(ValueError, match=r"outputs of cell 1 .*'noise'"):
        model.train_on_batch(X, X)
    compiled(Noise(rng.random), "never").train_on_batch(X, X)


def test_values_that_are_not_finite_are_computed_again():
    model = compiled(kl.Lambda(lambda t: t / 0.0))
    model.train_on_batch(X, X)
    assert not np.isfinite(model.get_weights()[0]).any()


def test_side_effects_are_warned_of():
    class Prints(kl.Layer):
        def call(self, x):
            tf.print("", end="")
            return x

    with pytest.warns(UserWarning, match="PrintV2, which has side effects"):
        compiled(Prints()).predict(X, verbose=0)


def test_layers_of_keras_run_without_a_word():
    layers = [kl.Embedding(5, 4), kl.Dropout(0.5), kl.GRU(3), kl.Dense(1)]
    keras.utils.set_random_seed(1)
    model = tfgpipe.GPipe(layers, 2, 2)
    model.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    model.train_on_batch(np.ones((4, 3), "int32"), X[:, :1])
