"""A step by layers: what each one takes and gives."""

import keras
import numpy as np
import pytest
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


def rehearsed(layers, m=2, **arguments):
    """The inputs, and what a step of a model comes to."""
    keras.utils.set_random_seed(1)
    model = tfgpipe.GPipe([keras.Input((4,)), *layers], 2, m)
    model.compile("sgd", "mse")
    model.build((None, 4))
    x = tf.constant(np.linspace(-1, 1, 24).reshape(6, 4), "float32")
    return x, model.rehearse((x, tf.ones((6, 3))), **arguments)


def test_gradients_are_made_where_the_weights_are():
    layers = [kl.Dense(4, name="a"), Doubled(), kl.Dense(3, name="b")]
    _, found = rehearsed(layers)
    has_gradients = {
        section.name.split("'")[1]: [
            d.dense is not None for d in section.part.dw
        ]
        for section in found.sections
    }
    assert has_gradients == {"a": [True] * 2, "doubled": [], "b": [True] * 2}
    assert found.sections[1].part.backward


@pytest.mark.parametrize("on_host", [False, True])
def test_layers_take_and_give_what_keras_does(on_host):
    layers = [kl.Dense(4, "tanh", name="a"), kl.Dense(3, name="b")]
    x, found = rehearsed(layers, on_host=on_host)
    a, b = found.sections
    assert [a.name, b.name] == [
        "layer 'a' of cell 0 on /device:CPU:0",
        f"layer 'b' of cell 1 on /device:CPU:{0 if on_host else 1}",
    ]
    for m, rows in enumerate((x[:3], x[3:])):
        y = layers[0](rows)
        np.testing.assert_array_equal(a.takes[m][0], rows)
        np.testing.assert_allclose(a.gives[m][0], y, rtol=1e-6)
        np.testing.assert_array_equal(b.takes[m][0], a.gives[m][0])
        dy = (layers[1](y) - 1) * 2 / (6 * 3)
        np.testing.assert_allclose(found.start[m][0], dy, rtol=1e-5)
        dx = dy @ tf.transpose(layers[1].kernel)
        np.testing.assert_allclose(b.gradients[m][0], dx, rtol=1e-5)


def test_what_is_looked_at_is_made_in_the_graph():
    _, found = rehearsed([kl.Dense(4), kl.Dense(3)], look=len)
    assert found.sections[1].gives == [1, 1]
    assert found.start == [1, 1]


def test_several_micro_batches_are_traced_for_any_rows():
    for m, rows in ((1, 6), (2, None)):
        _, found = rehearsed([kl.Dense(4), kl.Dense(3)], m)
        assert found.batch.traced.x[0].shape == (rows, 4)
