"""A step by layers: what each one takes and gives."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl

import tfgpipe


class Doubled(kl.Layer):
    """Has a gradient of its own."""

    def call(self, x):
        @tf.custom_gradient
        def doubled(x):
            return 2 * x, lambda d: 2 * d

        return doubled(x)


def rehearsed(layers, look=list):
    """The inputs, the model, and what a step of it comes to."""
    keras.utils.set_random_seed(1)
    model = tfgpipe.GPipe([keras.Input((4,)), *layers], 2, 2)
    model.compile("sgd", "mse")
    model.build((None, 4))
    x = tf.constant(np.linspace(-1, 1, 24).reshape(6, 4), "float32")
    return x, model, model.rehearse((x, tf.ones((6, 3))), look)


def test_gradients_are_made_where_the_weights_are():
    layers = [kl.Dense(4, name="a"), Doubled(), kl.Dense(3, name="b")]
    *_, ran = rehearsed(layers)
    weights = {s.name.split("'")[1]: len(s.weights) for s in ran.sections}
    assert weights == {"a": 2, "doubled": 0, "b": 2}
    doubled, b = ran.sections[1:]
    for dx, dy in zip(doubled.gradients, b.gradients):
        np.testing.assert_array_equal(dx[0], 2 * dy[0])


def test_layers_take_and_give_what_keras_does():
    layers = [kl.Dense(4, "tanh", name="a"), kl.Dense(3, name="b")]
    x, model, ran = rehearsed(layers)
    with model.on_host():
        on_host = model.rehearse((x, tf.ones((6, 3))))
    names = [section.name for section in (*ran.sections, *on_host.sections)]
    assert names == [
        "layer 'a' of cell 0 on /device:CPU:0",
        "layer 'b' of cell 1 on /device:CPU:1",
        "layer 'a' of cell 0 on /device:CPU:0",
        "layer 'b' of cell 1 on /device:CPU:0",
    ]
    a, b = ran.sections
    for m, rows in enumerate((x[:3], x[3:])):
        y = layers[0](rows)
        np.testing.assert_allclose(a.gives[m][0], y, rtol=1e-6)
        dy = (layers[1](y) - 1) * 2 / (6 * 3)
        np.testing.assert_allclose(ran.start[m][0], dy, rtol=1e-5)
        dx = dy @ tf.transpose(layers[1].kernel)
        np.testing.assert_allclose(b.gradients[m][0], dx, rtol=1e-5)
    for section, other in zip(ran.sections, on_host.sections):
        np.testing.assert_array_equal(section.gives, other.gives)
        np.testing.assert_array_equal(section.gradients, other.gradients)


def test_what_is_looked_at_is_made_in_the_graph():
    *_, ran = rehearsed([kl.Dense(4), kl.Dense(3)], look=len)
    assert ran.sections[1].gives == [1, 1]
    assert ran.start == [1, 1]
