"""Loops and branches that follow from several rows are told from the graph.

No value that a trial draws makes these decide otherwise.
"""

import keras
import pytest
import tensorflow as tf
from keras import ops
from tried import said_of

LARGE = 1e9


def chosen(condition, x):
    return tf.cond(condition, lambda: x, lambda: 2.0 * x)


def repeated(x, function):
    return tf.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, function(h)), (0, x)
    )[1]


def halved(x):
    """Until all numbers are small."""
    return tf.while_loop(
        lambda h: tf.reduce_max(h) > LARGE, lambda h: (0.5 * h,), (x,)
    )[0]


def is_large(x):
    return tf.reduce_max(x) > LARGE


# Of x, of shape (rows, 4, 3).
OF_ROWS = {
    "a loop": halved,
    "a branch": lambda x: chosen(is_large(x), x),
    "a branch of several": lambda x: tf.switch_case(
        tf.cast(is_large(x), "int32"), [lambda: x, lambda: 2.0 * x]
    ),
    "a choice": lambda x: ops.where(is_large(x), x, 2.0 * x),
    "a factor": lambda x: x * ops.where(is_large(x), 0.5, 1.0),
    "the first row": lambda x: chosen(x[0, 0, 0] > LARGE, x),
    "the number of some": lambda x: chosen(tf.size(tf.where(x > LARGE)) > 0, x),
    "in a function": lambda x: tf.function(
        lambda t: chosen(is_large(t), t), autograph=False
    )(x),
    "in a branch": lambda x: tf.cond(
        tf.shape(x)[0] > 0, lambda: halved(x), lambda: x
    ),
    "in a loop": lambda x: repeated(x, lambda h: chosen(is_large(h), h)),
}


def checked(x):
    with tf.control_dependencies([tf.debugging.assert_less(x, LARGE)]):
        return tf.identity(x)


OF_NOTHING_ELSE = {
    "a length": lambda x: tf.while_loop(
        lambda i, h: i < tf.shape(x)[1],
        lambda i, h: (i + 1, h + x[:, i]),
        (0, tf.zeros_like(x[:, 0])),
    )[1],
    "a number of rows": lambda x: chosen(tf.shape(x)[0] > 0, x),
    "each number": lambda x: ops.where(x > LARGE, x, 2.0 * x),
    "each row": lambda x: tf.map_fn(lambda row: halved(row), x),
    "a branch for each row": lambda x: tf.map_fn(
        lambda row: chosen(is_large(row), row), x
    ),
    "vectorised": lambda x: tf.vectorized_map(halved, x),
    "an assertion": checked,
    "an unused branch": lambda x: (chosen(is_large(x), x), x)[1],
}


class Own(keras.layers.Layer):
    def __init__(self, function, adds=False):
        super().__init__(name="own")
        self.function, self.adds = function, adds

    def call(self, x):
        if self.adds:
            self.add_loss(ops.mean(self.function(x)))
            return x
        return self.function(x)


def said(function, adds=False):
    return said_of([Own(function, adds)], (None, 4, 3))


@pytest.mark.parametrize("name", OF_ROWS)
def test_condition_that_follows_from_rows_is_told(name):
    (message,) = said(OF_ROWS[name])
    assert "'own' ends a loop, or chooses what it does" in message


@pytest.mark.parametrize("name", OF_NOTHING_ELSE)
def test_other_conditions_are_left_alone(name):
    assert not said(OF_NOTHING_ELSE[name])


def test_recurrent_layer_inside_of_another_is_left_alone():
    inner = keras.layers.GRU(3, return_sequences=True)
    inner.build((None, 4, 3))
    assert not said(inner)


def test_condition_of_a_loss_is_told_but_not_a_guarded_quotient():
    (message,) = said(halved, adds=True)
    assert "'own' ends a loop" in message
    assert not said(lambda x: ops.where(is_large(x), 0.0, ops.mean(x)), True)
