"""Losses of the user's, and a model that is compiled with one."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras import ops

import tfgpipe

register = keras.saving.register_keras_serializable("promises")


@register
class RowWise(keras.losses.Loss):
    """A loss of the user's that says that it adds up rows."""

    is_row_wise = True

    def call(self, y_true, y_pred):
        return ops.mean((y_true - y_pred) ** 4, axis=-1)


@register
class Drawing(RowWise):
    """Draws from a seed of its own, each mini-batch once."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed = keras.random.SeedGenerator(3)

    def call(self, y_true, y_pred):
        noise = keras.random.uniform(
            ops.shape(y_pred), dtype=y_pred.dtype, seed=self.seed
        )
        return ops.mean((y_true - y_pred) ** 2 + noise * y_pred, axis=-1)


@register
class Counting(RowWise):
    """Weighs more from mini-batch to mini-batch."""

    variable = keras.Variable

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.factor = self.variable(1.0, trainable=False)

    def call(self, y_true, y_pred):
        factor = self.count()
        error = ops.mean((y_true - y_pred) ** 2, axis=-1)
        return ops.cast(factor, error.dtype) * error

    def count(self):
        self.factor.assign(1.3 * self.factor)
        return self.factor


@register
class CountingInTensorFlow(Counting):
    """The same, by a variable that Keras does not know."""

    variable = tf.Variable

    def count(self):
        return tf.identity(self.factor.assign(1.3 * self.factor))


def compiled(cls=tfgpipe.GPipe, units=2, **kwargs):
    model = cls([kl.Dense(units), kl.Dense(units)], 2, 2)
    model.compile("sgd", **kwargs)
    model.train_on_batch(np.ones((4, 2)), np.ones((4, units)))
    return model
