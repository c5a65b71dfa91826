"""A loss of the user's, and a model that is compiled with one."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl

import tfgpipe


class RowWise(keras.losses.Loss):
    """A loss of the user's that says that it adds up rows."""

    is_row_wise = True

    def call(self, y, y_pred):
        return keras.ops.mean((y - y_pred) ** 4, -1)


class Drawing(RowWise):
    """Draws from a seed of its own, each mini-batch once."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, y, y_pred):
        noise = keras.random.uniform(
            keras.ops.shape(y_pred), dtype=y_pred.dtype, seed=self.seed
        )
        return keras.ops.mean((y - y_pred) ** 2 + noise * y_pred, -1)


class Counting(RowWise):
    """Weighs more from mini-batch to mini-batch."""

    def __init__(self):
        super().__init__()
        self.factor = keras.Variable(1.0, trainable=False)

    def call(self, y, y_pred):
        self.factor.assign(1.5 * self.factor)
        return self.factor * keras.ops.mean((y - y_pred) ** 2, -1)


class CountingInTensorFlow(RowWise):
    """The same, by a variable that Keras does not know."""

    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(1.0, dtype="float64", trainable=False)

    def call(self, y, y_pred):
        factor = self.factor.assign(1.5 * self.factor)
        return tf.identity(factor) * keras.ops.mean((y - y_pred) ** 2, -1)


def compiled(cls=tfgpipe.GPipe, units=2, **kwargs):
    model = cls([kl.Dense(units), kl.Dense(units)], 2, 2)
    model.compile("sgd", **kwargs)
    model.train_on_batch(np.ones((4, 2)), np.ones((4, units)))
    return model
