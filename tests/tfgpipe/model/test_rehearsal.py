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


def by_layers(layers, m=2):
    """A step of a model, and what it comes to."""
    keras.utils.set_random_seed(1)
    model = tfgpipe.GPipe([keras.Input((4,)), *layers], 2, m)
    model.compile("sgd", "mse")
    model.build((None, 4))
    step = model.by_layers(lambda place, call: call)
    x = tf.constant(np.linspace(-1, 1, 24).reshape(6, 4), "float32")
    return model, step, step((x, tf.ones((6, 3)))), x


def test_gradients_are_made_where_the_weights_are():
    layers = [kl.Dense(4, name="a"), Doubled(), kl.Dense(3, name="b")]
    _, step, _, _ = by_layers(layers)
    found = {
        place.name.split("'")[1]: [d.dense is not None for d in place.part.dw]
        for place in step.places
        if place.part.uses
    }
    assert found == {"a": [True, True], "b": [True, True]}
    doubled = next(p for p in step.places if "doubled" in p.name)
    assert doubled.part.backward


def test_layers_take_and_give_what_keras_does():
    layers = [kl.Dense(4, "tanh", name="a"), kl.Dense(3, name="b")]
    _, step, found, x = by_layers(layers)
    *places, head = step.places
    inner = [k for k, place in enumerate(places) if place.part.forward]
    assert [places[k].name for k in inner] == [
        "layer 'a' of cell 0 on /device:CPU:0",
        "layer 'b' of cell 1 on /device:CPU:1",
    ]
    a, b = (found.calls[k] for k in inner)
    for m, rows in enumerate((x[:3], x[3:])):
        y = layers[0](rows)
        np.testing.assert_array_equal(a[m].taken[0], rows)
        np.testing.assert_allclose(a[m].given[0], y, rtol=1e-6)
        np.testing.assert_array_equal(b[m].taken[0], a[m].given[0])
        dy = (layers[1](y) - 1) * 2 / (6 * 3)
        np.testing.assert_allclose(found.loss.dy[m][0], dy, rtol=1e-5)
        dx = dy @ tf.transpose(layers[1].kernel)
        np.testing.assert_allclose(b[m].given[-1], dx, rtol=1e-5)
    assert not head.weights


def test_several_micro_batches_are_traced_for_any_rows():
    for m, rows in ((1, 6), (2, None)):
        _, step, _, _ = by_layers([kl.Dense(4), kl.Dense(3)], m)
        assert step.batch.traced.x[0].shape == (rows, 4)
