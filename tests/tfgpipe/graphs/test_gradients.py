"""Sums of gradients, dense and sparse, by hand."""

import numpy as np
import pytest
import tensorflow as tf

from tfgpipe.graphs.gradient_sums import (
    Gradient,
    Indices,
    add_uses,
    as_tensor,
    in_order,
    of_variables,
    pieces_of,
)
from tfgpipe.state import Use

ROWS = 4  # of the weight, a table of two columns


def slices(*indices, value=1.0):
    values = (
        np.full((len(indices), 2), value) + np.arange(len(indices))[:, None]
    )
    return tf.IndexedSlices(
        tf.constant(values), tf.constant(indices), tf.constant([ROWS, 2])
    )


def dense(value):
    return Gradient(tf.fill([ROWS, 2], tf.constant(value, tf.float64)))


def sparse(*indices, m=0, repeated=False, **kwargs):
    """One lookup, as a task gives it."""
    gradient = Gradient(slices={(0, 0): slices(*indices, **kwargs)})
    return gradient.of_micro_batch(m, [repeated])


def table(*gradients):
    """The sum of `tf.IndexedSlices`, computed row by row."""
    found = np.zeros((ROWS, 2))
    for gradient in gradients:
        np.add.at(found, gradient.indices.numpy(), gradient.values.numpy())
    return found


def test_slices_of_rows_stand_in_the_order_of_the_rows():
    """Whatever the order in which micro-batches come back."""
    parts = [sparse(1, 2, m=0), sparse(2, 3, m=1), sparse(0, 1, m=2)]
    total = parts[2].plus(parts[0]).plus(parts[1]).finished()
    np.testing.assert_array_equal(total.indices, [1, 2, 2, 3, 0, 1])
    expected = table(*(part.finished() for part in parts))
    np.testing.assert_array_equal(as_tensor(total), expected)


def test_slices_with_the_same_indices_are_added_up():
    parts = [sparse(1, 3, m=m, repeated=True, value=m + 1.0) for m in range(3)]
    total = parts[0].plus(parts[1]).plus(parts[2]).finished()
    np.testing.assert_array_equal(total.indices, [1, 3])
    np.testing.assert_array_equal(total.values, [[6, 6], [9, 9]])


def test_slices_of_distinct_indices_are_added_up_by_index():
    """In the order of the micro-batches, whichever comes back first."""
    both = Gradient(slices={(0, 0): slices(1, 3), (1, 0): slices(2)})
    kinds = [Indices.DISTINCT, Indices.OF_ROWS]
    first = both.of_micro_batch(0, kinds)
    np.testing.assert_array_equal(first.finished().indices, [1, 3, 2])
    other = Gradient(slices={(0, 0): slices(3, 0), (1, 0): slices(2)})
    total = other.of_micro_batch(1, kinds).plus(first).finished()
    np.testing.assert_array_equal(total.indices, [1, 3, 0, 2, 2])
    np.testing.assert_array_equal(total.values[:, 0], [1, 3, 2, 1, 1])


@pytest.mark.parametrize("is_dense_first", [True, False])
def test_sum_of_dense_and_sparse_is_dense(is_dense_first):
    a, b = dense(2.0), sparse(1, 1)
    total = a.plus(b) if is_dense_first else b.plus(a)
    assert not total.slices
    np.testing.assert_array_equal(total.finished(), 2 + table(slices(1, 1)))


def test_sum_goes_from_left_to_right():
    """1 is lost beside 1e16, and 2 is not."""
    one, large = tf.constant(1.0, tf.float64), tf.constant(1e16, tf.float64)
    assert float(in_order([one, one, large])) == 1e16 + 2
    assert float(in_order([large, one, one])) == 1e16
    graph = tf.function(lambda *ts: add_uses(list(ts)), autograph=False)
    assert float(graph(one, one, large)) == 1e16 + 2


class Holder:
    """A Keras variable, as far as this needs one."""

    dtype = "float64"

    def __init__(self, value):
        self.value, self.shape = value, value.shape

    def use(self, piece=None):
        return Use(self, 0, None, piece)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,)])
def test_pieces_of_a_gradient_become_a_whole_one(order):
    whole = np.arange(10.0).reshape(2, 5)
    pieces = pieces_of(1, 5, 2)
    variable = Holder(tf.Variable(np.zeros((2, 5))))

    @tf.function(autograph=False)
    def joined():
        uses = [
            (variable.use(pieces[i]), pieces[i].columns_of(whole))
            for i in order
        ]
        cells = [
            ("CPU:0", [use], [[Gradient(tf.constant(value))]])
            for use, value in uses
        ]
        return of_variables(cells)[id(variable)]

    expected = np.zeros((2, 5))
    for i in order:
        columns = slice(pieces[i].start, pieces[i].stop)
        expected[:, columns] = whole[:, columns]
    np.testing.assert_array_equal(joined(), expected)


def test_uses_and_replicas_of_a_variable_are_added_up():
    shared, own = (tf.Variable(np.zeros((ROWS, 2))) for _ in range(2))

    shared, own, unused = Holder(shared), Holder(own), Holder(own)
    none = []

    @tf.function(autograph=False)
    def added():
        found = of_variables(
            [
                (
                    "CPU:0",
                    [shared.use(), own.use()],
                    [[dense(1.0), sparse(1)]] * 2,
                ),
                (
                    "CPU:1",
                    [shared.use(), unused.use()],
                    [[sparse(2), Gradient()]],
                ),
            ]
        )
        none.append(found[id(unused)])
        return found[id(shared)], found[id(own)].indices

    whole, indices = added()
    np.testing.assert_array_equal(whole, 2 + table(slices(2)))
    np.testing.assert_array_equal(indices, [1])
    assert none == [None]
