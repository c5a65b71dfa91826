"""A model's graph with its backward pass, beside a tape around the model."""

import tensorflow as tf
from keras import layers as kl
from traces import traced

SPEC = tf.TensorSpec([3])


class Does(kl.Layer):
    """Calls a function of all that comes in."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.built = True

    def call(self, xs):
        return self.function(*xs)


def test_what_varies_follows_from_the_rows_or_from_what_is_assigned():
    class Keeps(kl.Layer):
        def __init__(self):
            super().__init__()
            self.moved = self.add_weight((), "ones", trainable=False)
            self.fixed = self.add_weight((), "ones", trainable=False)

        def call(self, x):
            size = tf.cast(tf.shape(x)[0], x.dtype)
            found.update(
                rows=2.0 * x,
                size=2.0 * size,
                fixed=2.0 * self.fixed,
                moved=2.0 * self.moved,
                constant=tf.range(3),
            )
            self.moved.assign_add(1.0)
            return x

    found = {}
    varies = traced([Keeps()], tf.TensorSpec([None])).varying()
    assert {name for name, t in found.items() if varies(t)} == {"rows", "moved"}


def test_sizes_vary_by_values_that_vary_alone():
    def sizes(x, _):
        turned = tf.transpose(x, [1, 0])  # by constants
        count = tf.cast(tf.reduce_sum(x), "int32")
        found.update(
            turned=tf.range(tf.shape(turned)[0]),
            cut=tf.range(tf.shape(x[:, :count])[1]),
        )
        return x

    found = {}
    spec = tf.TensorSpec([None, None])
    varies = traced([Does(sizes)], [spec, spec]).varying()
    assert {name for name, t in found.items() if varies(t)} == {"cut"}
