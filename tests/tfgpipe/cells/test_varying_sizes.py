"""Which sizes of a tensor follow from the rows of a batch."""

import pytest
import tensorflow as tf

from tfgpipe.cells.sparse import RowDependence


def longest(x):
    return tf.reduce_max(tf.reduce_sum(tf.cast(x > 0, tf.int32), 1))


EXPRESSIONS = {
    "as given": (lambda x, n: tf.tanh(x), False),
    "constant": (lambda x, n: x[:, :3], False),
    "by an argument": (lambda x, n: x[:, :n], False),
    "by its own length": (lambda x, n: x[:, : tf.shape(x)[1] // 2], False),
    "longest": (lambda x, n: x[:, : longest(x)], True),
    "padded": (lambda x, n: tf.pad(x, [[0, 0], [0, longest(x)]]), True),
    "flat": (lambda x, n: tf.reshape(x, [tf.shape(x)[0], -1]), False),
    "folded": (
        lambda x, n: tf.reshape(
            x, tf.concat([tf.shape(x)[:1], [n, tf.shape(x)[1]]], 0)
        ),
        False,
    ),
    "transposed": (lambda x, n: tf.transpose(x), True),
    "turned": (lambda x, n: tf.transpose(x[..., None], [0, 2, 1]), False),
    "chosen": (lambda x, n: tf.boolean_mask(x, x[0] > 0, axis=1), True),
    "in a loop": (
        lambda x, n: tf.while_loop(
            lambda t: tf.shape(t)[1] < longest(x),
            lambda t: [tf.concat([t, t], 1)],
            [x],
            shape_invariants=[tf.TensorSpec((None, None))],
        )[0],
        True,
    ),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_sizes_follow_from_rows_or_not(name):
    expression, expected = EXPRESSIONS[name]
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, (None, None))
        n = tf.compat.v1.placeholder(tf.int32, ())
        depends = RowDependence([(x, True), (n, False)])
        y = expression(x, n)
        assert depends.resizes(y) is expected
        assert depends(tf.range(tf.shape(y)[1])) is expected
        assert RowDependence([(n, False)], None, [x]).resizes(tf.tanh(x))
