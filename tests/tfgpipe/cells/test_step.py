"""Calls of layers."""

import tensorflow as tf
from keras import layers as kl

from tfgpipe import internals
from tfgpipe.cells import LayerCall


def test_step_calls_its_layer_and_keeps_masks():
    x = tf.ones((2, 3))
    internals.set_mask(x, tf.constant([True, False]))

    class Sees(kl.Layer):
        supports_masking = True

        def call(self, inputs, mask=None, training=None):
            return inputs if mask is None or not training else -inputs

    step = LayerCall(Sees())
    assert float(step(x, training=True)[0, 0]) == -1
    assert float(step(x, training=False)[0, 0]) == 1
