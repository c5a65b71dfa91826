"""Gradients layer by layer, beside those of TensorFlow's tape."""

import numpy as np
import pytest
import tensorflow as tf

from tfgpipe.graphs.backward import differentiate

X = np.array([0.3, -0.7, 1.1])
W = np.array([0.5, 0.2, -0.4])


def sin_then_product(x, w, mark):
    mark()
    y = tf.sin(x)
    mark()
    y = tf.identity(y) * w
    mark()
    return [y]


def used_by_two_layers(x, w, mark):
    mark()
    y = tf.tanh(x * w)
    mark()
    z = tf.exp(y)
    mark()
    return [z * y, y + w]


def loop(x, w, mark):
    mark()
    y = tf.scan(lambda total, t: total * t + w, tf.stack([x, w, x]))
    mark()
    return [tf.identity(y)]


def through_integers(x, w, mark):
    mark()
    y = x * tf.cast(tf.argsort(w), x.dtype)
    mark()
    return [tf.identity(y) + w]


def source_itself(x, w, mark):
    mark()
    return [x, x * w]


@pytest.mark.parametrize(
    "function",
    [
        sin_then_product,
        used_by_two_layers,
        loop,
        through_integers,
        source_itself,
    ],
)
def test_gradients_are_those_of_a_tape(function):
    starts = []

    def by_layers(x, w):
        graph = tf.compat.v1.get_default_graph()
        starts.clear()
        ys = function(x, w, lambda: starts.append(len(graph.get_operations())))
        operations = graph.get_operations()
        dys = [tf.cos(y) for y in ys]
        return differentiate(operations, starts, ys, dys, [x, w])

    def by_tape(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            ys = function(x, w, lambda: None)
        return tape.gradient(ys, [x, w], [tf.cos(y) for y in ys])

    x, w = tf.constant(X), tf.constant(W)
    found = tf.function(by_layers, autograph=False)(x, w)
    for a, b in zip(found, tf.function(by_tape)(x, w), strict=True):
        np.testing.assert_allclose(a, b, 1e-12)


def test_source_without_influence_has_no_gradient():
    def function(x, w):
        y = 2 * x
        operations = tf.compat.v1.get_default_graph().get_operations()
        found = differentiate(operations, [0], [y], [tf.ones_like(y)], [x, w])
        assert found[1] is None
        return found[0]

    gradient = tf.function(function, autograph=False)
    np.testing.assert_array_equal(
        gradient(tf.constant(X), tf.constant(W)), 2 * np.ones(3)
    )


def test_sparse_gradients_of_one_source_stay_sparse():
    def function(table):
        graph = tf.compat.v1.get_default_graph()
        starts = [len(graph.get_operations())]
        y = tf.gather(table, [1])
        starts.append(len(graph.get_operations()))
        z = y * tf.gather(table, [2])
        operations = graph.get_operations()
        (found,) = differentiate(
            operations, starts, [z], [tf.ones_like(z)], [table]
        )
        assert isinstance(found, tf.IndexedSlices)
        return tf.convert_to_tensor(found)

    gradient = tf.function(function, autograph=False)(tf.constant(X))
    np.testing.assert_allclose(gradient, [0, X[2], X[1]])
