"""What is kept of variables: storage that tapes watch, and who else reads it.

A Keras variable keeps its value in a `tf.Variable`, which tapes watch if it was
made to be trained. Layers may read that by other ways than the variable.
"""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from beside_keras import normal
from keras import layers as kl
from quick import quick

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


# --------------------------------------------------- storage that layers keep
def reading(x, dense, kernel):
    return x @ kernel


def assigning(x, dense, kernel):
    kernel.assign(kernel * 0.5)
    return x


def assigning_in_a_branch(x, dense, kernel):
    def branch():
        return x + tf.reduce_sum(kernel.assign_add(kernel))

    return tf.cond(tf.shape(x)[0] > 0, branch, lambda: x)


def reading_in_a_loop(x, dense, kernel):
    def body(i, h):
        value = tf.raw_ops.ReadVariableOp(
            resource=kernel.handle, dtype=kernel.dtype
        )
        return i + 1, tf.matmul(h, value)

    return tf.while_loop(lambda i, h: i < 2, body, [0, x])[1]


def in_a_scope(x, dense, kernel):
    """It reads the bias as if there were no scope around its own."""
    with keras.StatelessScope([(dense.kernel, tf.zeros((4, 4)))]):
        return dense(x)


def by_a_tape(x, dense, kernel):
    with tf.GradientTape() as tape:
        energy = tf.reduce_sum(dense.kernel**2)
    return x @ tape.gradient(energy, dense.kernel)


BY_ITSELF = r"(?s)'uses'.* of 'dense.*/kernel'.*Use"


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (reading, ValueError, BY_ITSELF),
        (assigning, ValueError, BY_ITSELF),
        (assigning_in_a_branch, ValueError, BY_ITSELF),
        (reading_in_a_loop, ValueError, BY_ITSELF),
        (in_a_scope, ValueError, r"(?s)'uses'.* of 'dense.*/bias'"),
        (by_a_tape, AttributeError, "handle"),
    ],
)
def test_storage_that_is_used_by_itself_is_refused(use, error, message):
    dense = kl.Dense(4)
    dense.build((None, 4))
    kernel = dense.kernel.value  # its storage
    uses = kl.Lambda(lambda x: use(x, dense, kernel), name="uses")
    layers = [keras.Input((4,)), dense, uses, kl.Dense(2)]

    def train():
        model = tfgpipe.GPipe(layers, 2, 2)
        model.compile("sgd", "mse")
        model.train_on_batch(normal(4), normal(2))

    with pytest.raises(error, match=message):
        train()


# -------------------------------------------------- what a step assigns later
class Slow(kl.Layer):
    """Hands its input on, later."""

    def call(self, x):
        def wait(t):
            time.sleep(0.02)
            return t

        @tf.custom_gradient
        def slowly(x):
            y = tf.numpy_function(wait, [x], x.dtype)
            return tf.ensure_shape(y, x.shape), lambda d: d

        return slowly(x)


class Outside(kl.Layer):
    """Multiplies by what TensorFlow alone knows, in some way."""

    def __init__(self, way, **kwargs):
        super().__init__(**kwargs)
        self.way = way
        self.factor = tf.Variable([1.0, 2.0], dtype="float64", trainable=False)
        self.table = tf.lookup.experimental.MutableHashTable(
            tf.int64, tf.float64, default_value=1.0
        )

    def call(self, x):
        if self.way == "read":
            return x * self.factor[0]
        if self.way == "in a loop":
            return tf.while_loop(
                lambda i, _: i < 2,
                lambda i, y: (i + 1, y * self.factor[1]),
                [0, x],
            )[1]
        if self.way == "counted":
            return x / self.factor.assign_add([1.0, 1.0])[1]
        found = self.table.lookup(tf.constant([1], tf.int64))
        return x * tf.ensure_shape(found, [1])

    def move(self):
        self.factor.assign_add([0.5, 0.5])
        key = tf.constant([1], tf.int64)
        self.table.insert(key, self.table.lookup(key) + 0.5)


WAYS = ("read", "in a loop", "from a table", "counted")


def stepping(cls, way, **arguments):
    """Losses of steps that assign, at their end, what their layers read."""

    class Moving(cls):
        def train_step(self, data):
            logs = super().train_step(data)
            self.outside.move()
            return logs

        def test_step(self, data):
            logs = super().test_step(data)
            self.outside.move()
            return logs

    keras.utils.set_random_seed(5)
    outside = Outside(way)
    layers = [kl.Dense(4), Slow(), kl.Dense(4, "tanh"), outside, kl.Dense(2)]
    model = Moving(layers, **arguments)
    model.outside = outside
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    x, y = normal(4), normal(2)
    told = {"batch_size": 4, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **told)
    losses = [*history.history["loss"], model.evaluate(x, y, **told)]
    key = tf.constant([1], tf.int64)
    return losses, outside.factor.numpy(), outside.table.lookup(key).numpy()


@pytest.mark.filterwarnings("ignore:.*has side effects")
@pytest.mark.parametrize(
    ("k", "m", "way"),
    quick(
        [
            *((2, 4, way) for way in WAYS[:-1]),
            *((1, 1, way) for way in WAYS),
            (2, 1, "counted"),
        ],
        [(2, 4, "in a loop"), (2, 4, "from a table")],
    ),
)
def test_step_assigns_what_cells_read_when_they_have_read_it(k, m, way):
    """Cells that wait for others read what the step had assigned at its end."""
    expected = stepping(keras.Sequential, way)
    split = {"num_partitions": k, "num_micro_batches": m}
    found = stepping(tfgpipe.GPipe, way, **split, remat="always")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-12)
