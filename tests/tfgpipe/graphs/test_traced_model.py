"""A model's graph with its backward pass, beside a tape around the model."""

import tensorflow as tf
from keras import layers as kl
from traces import differentiated, traced

SPEC = tf.TensorSpec([3])


class Does(kl.Layer):
    """Calls a function of all that comes in."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        self.built = True

    def call(self, xs):
        return self.function(*xs)


class Has(kl.Layer):
    """Has a weight, and calls a function of it."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.w = self.add_weight((3,), "ones")

    def call(self, x):
        return self.function(x, self.w)


def test_weight_without_influence_has_no_gradient():
    used, unused = Has(lambda x, w: x * w), Has(lambda x, w: x)
    layers = [used, unused, Has(lambda x, w: x + 0 * tf.size(w, tf.float32))]
    made = differentiated(traced(layers, SPEC))
    found = {
        id(use.variable): d.dense is not None or bool(d.slices)
        for use, d in zip(made.traced.uses, made.dw)
    }
    assert found[id(used.w)]
    assert [*found.values()].count(True) == 1


def test_gradients_of_lookups_stay_sparse_and_apart():
    table = Has(lambda x, w: x * tf.gather(w, [1]) * tf.gather(w, [2]))
    (d,) = differentiated(traced([table], SPEC)).dw
    assert d.dense is None
    assert len(d.slices) == 2


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
