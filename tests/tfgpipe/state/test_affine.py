"""Assignments are read in the graph."""

import numpy as np
import pytest
import tensorflow as tf

from tfgpipe.state.batch_normalization import factors

FIXED = tf.constant(np.full(200, 0.25))  # too long to be copied into a graph


def read(formula):
    """The factors of two arguments of a function, and what is added."""
    found = []

    def run(a, b):
        found.append(factors(formula(a, b), [a, b]))

    spec = tf.TensorSpec([200], tf.float64)
    tf.function(run).get_concrete_function(spec, spec)
    return found[0]


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (lambda a, b: a * 0.75 + b * (1 - 0.75), (0.75, 0.25, 0)),
        (lambda a, b: a - (a - tf.identity(b)) * FIXED, (0.75, 0.25, 0)),
        (lambda a, b: tf.stop_gradient(a) + 3, (1, 0, 3)),
        (lambda a, b: tf.function(lambda: a + 2)() * 1, None),
        (lambda a, b: a * b, None),
        (lambda a, b: tf.maximum(a, b), None),
        (lambda a, b: tf.cast(tf.cast(a, "int32"), "float64"), None),
    ],
)
def test_sums_and_products_with_constants_are_read(formula, expected):
    found = read(formula)
    if expected is None:
        assert found is None
    else:
        for one, value in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, value, 1e-15)


def test_tensors_around_a_function_are_found_inside_of_it():
    found = []

    def run(a):
        tf.function(lambda: found.append(factors(a + 1, [a])))()

    spec = tf.TensorSpec([], tf.float64)
    tf.function(run).get_concrete_function(spec)
    np.testing.assert_array_equal(found[0], [1, 1])
