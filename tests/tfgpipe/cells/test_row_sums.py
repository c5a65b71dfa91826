"""Means over rows are told from what is none."""

import keras
import pytest
import tensorflow as tf

from tfgpipe.cells.row_flow import follow
from tfgpipe.cells.row_states import Rows, Total

ops = keras.ops
WEIGHT = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def number(x):
    return ops.cast(ops.shape(x)[0], "float32")


def codes(x):
    return ops.one_hot(ops.argmax(ops.reshape(x, (-1, 3)), axis=-1), 3)


# Of x, of shape (rows, 4, 3).
MEANS = {
    "mean": lambda x: ops.mean(x, axis=0),
    "mean of all": lambda x: ops.mean(ops.square(x)),
    "sum by number": lambda x: ops.sum(x, 0) / number(x),
    "sum of shares": lambda x: ops.sum(ops.square(x) / number(x), axis=(0, 1)),
    "times the inverse": lambda x: ops.sum(x, 0) * (1.0 / number(x)),
    "by all elements": lambda x: ops.sum(x) / ops.cast(tf.size(x), "float32"),
    "by some product": lambda x: (
        ops.sum(x) / ops.cast(ops.prod(tf.shape(x)[:2]), "float32")
    ),
    "guarded": lambda x: ops.sum(x) / (ops.maximum(number(x), 1.0) + 1e-7),
    "running": lambda x: 0.9 * tf.ones((3,)) + 0.1 * ops.mean(x, axis=(0, 1)),
    "of codes": lambda x: ops.mean(codes(x), axis=0),
    "of products": lambda x: (
        ops.matmul(ops.transpose(codes(x)), ops.reshape(x, (-1, 3))) / number(x)
    ),
    "of an einsum": lambda x: ops.einsum("abc->c", x) / number(x),
    "linear in means": lambda x: (
        ops.sum(ops.mean(x, 0) @ WEIGHT, axis=-1)[1:] - 2.0 * ops.mean(x)
    ),
    "chosen": lambda x: ops.where(WEIGHT[0, 0] > 0, ops.mean(x), 0.5),
    "stacked": lambda x: ops.stack([ops.mean(x), 3.0]),
    "doubled": lambda x: (ops.sum(x) + ops.sum(2.0 * x)) / number(x),
}
NOT_MEANS = {
    "sum": lambda x: ops.sum(x, 0),
    "number": lambda x: number(x),
    "number of elements": lambda x: ops.cast(tf.size(x), "float32"),
    "one more": lambda x: ops.sum(x) / (number(x) + 1.0),
    "by its root": lambda x: ops.sum(x, 0) / ops.sqrt(number(x)),
    "counts of codes": lambda x: ops.sum(codes(x), axis=0),
    "running sum": lambda x: 0.9 * tf.ones((3,)) + ops.sum(x, (0, 1)),
    "square of a mean": lambda x: ops.square(ops.mean(x)),
    "product of means": lambda x: ops.mean(x) * ops.mean(ops.square(x)),
    "variance": lambda x: ops.var(x, axis=0),
    "masked": lambda x: (
        ops.sum(x) / ops.sum(ops.cast(ops.greater(x, 0), "float32"))
    ),
    "largest": lambda x: ops.max(x, axis=0),
    "rows by number": lambda x: x / number(x),
    "rows times number": lambda x: x * number(x),
    "mean by number": lambda x: ops.mean(x) / number(x),
    "pairs": lambda x: ops.mean(ops.einsum("abc,dbc->ad", x, x)),
    "queue": lambda x: ops.concatenate([x, tf.ones((2, 4, 3))])[:2],
}
# The number is a constant of the graph, where it is known.
NOT_SEEN = {"number", "number of elements", "rows by number"}
NOT_SEEN |= {"rows times number", "mean by number", "by its root"}
NOT_SEEN |= {"one more"}


def state(function, rows):
    spec = tf.TensorSpec((rows, 4, 3), "float32")
    traced = tf.function(function, autograph=False)
    graph = traced.get_concrete_function(spec).graph
    return follow(graph.get_operations(), graph.inputs[:1])(graph.outputs[0])


def is_mean(found):
    return isinstance(found, Total) and found[1:] == (0, None, False)


@pytest.mark.parametrize("name", MEANS)
def test_means_are_seen(name):
    assert is_mean(state(MEANS[name], None))


# What is divided by might be any number.
UNCLEAR = {"sum of shares", "by some product"}


@pytest.mark.parametrize("name", sorted(MEANS.keys() - UNCLEAR))
def test_means_of_known_rows_are_seen(name):
    assert is_mean(state(MEANS[name], 5))


@pytest.mark.parametrize("name", NOT_MEANS)
def test_what_is_no_mean_is_not_taken_for_one(name):
    found = state(NOT_MEANS[name], None)
    assert not is_mean(found)
    assert (
        found is not None and not isinstance(found, Rows)
    ) or name == "queue"


@pytest.mark.parametrize("name", sorted(NOT_MEANS.keys() - NOT_SEEN))
def test_what_is_no_mean_of_known_rows_is_not_taken_for_one(name):
    assert not is_mean(state(NOT_MEANS[name], 5))


SHAPES = {
    "range": lambda x: ops.cast(ops.arange(ops.shape(x)[0]), "float32"),
    "zeros": lambda x: x + ops.zeros((ops.shape(x)[0], 4, 3)),
    "other sizes": lambda x: x / ops.cast(tf.shape(x)[1], "float32"),
    "all of a row": lambda x: (
        x / ops.cast(ops.prod(tf.shape(x)[1:]), "float32")
    ),
    "there and back": lambda x: x * number(x) / number(x),
    "reshaped": lambda x: ops.reshape(x, (ops.shape(x)[0] * 2, 2, 3)),
    "last": lambda x: x / ops.cast(ops.shape(ops.transpose(x))[0], "float32"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_that_are_no_numbers_are_left_alone(name):
    assert state(SHAPES[name], None) in (None, Rows(0))
