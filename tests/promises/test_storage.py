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
from storage_layers import FrozenWeight, Substituted

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")
EVERYWHERE = pytest.mark.parametrize(
    ("k", "eagerly"),
    quick([(1, False), (2, False), (2, True)], [(2, False), (2, True)]),
)


def compared(make, k, eagerly, **arguments):
    """Trains a pipeline of K cells, M = K, and plain Keras, alike."""

    def trained(model, **told):
        keras.utils.set_random_seed(5)
        model = model(make())
        model.build((None, 4))
        for variable in model.variables:
            if variable.name in ("kernel", "scale"):
                variable.trainable = True
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, **{"loss": "mse", **arguments}, **told)
        x = normal(4)
        history = model.fit(x, normal(2), batch_size=4, epochs=2, verbose=0)
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(model(x) ** 2)
        weights = [v.value for v in model.trainable_variables]
        found = tape.gradient(value, weights)
        return (
            history.history["loss"],
            model.get_weights(),
            [0.0 if d is None else tf.convert_to_tensor(d) for d in found],
            [d is None for d in found],
        )

    expected = trained(keras.Sequential)
    found = trained(
        lambda layers: tfgpipe.GPipe(layers, k, k), run_eagerly=eagerly
    )
    for a, b in zip(
        keras.tree.flatten(found), keras.tree.flatten(expected), strict=True
    ):
        np.testing.assert_allclose(a, b, 1e-10, 1e-12)


# ---------------------------------------------------- frozen, and then not
def built_and_frozen():
    layers = [kl.Dense(4, "tanh"), kl.Dense(4, kernel_regularizer="l2")]
    for layer in layers:
        layer.build((None, 4))
        layer.trainable = False
    return [*layers, kl.Dense(2)]


def frozen_by_itself():
    return [kl.Dense(4, "tanh"), FrozenWeight(made=True), kl.Dense(2)]


def made_frozen():
    return [kl.Dense(4, "tanh"), FrozenWeight(made=False), kl.Dense(2)]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_loss_that_reads_a_weight_made_frozen_does_not_train_it():
    layers = []

    def make():
        layers[:] = made_frozen()
        return layers

    def loss(y_true, y_pred):
        scale = keras.ops.sum(layers[1].scale)
        return keras.ops.mean((y_true - y_pred) ** 2) + scale

    compared(make, 1, False, loss=loss)


# ------------------------------------------------------- tapes inside layers
class Differentiating(kl.Layer):
    """Takes gradients of its own weights, and of those of a layer inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = kl.Dense(4)

    def build(self, shape):
        self.inner.build(shape)
        self.scale = self.add_weight(shape=(4,), name="scale")
        self.frozen = self.add_weight(shape=(4,), name="frozen")
        self.frozen.trainable = False
        self.never = self.add_weight(
            shape=(4,), name="never", trainable=False, initializer="ones"
        )

    def call(self, x):
        before = tf.convert_to_tensor(self.scale)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                energy = tf.reduce_sum(tf.tanh(self.scale) ** 2 * before)
                energy += tf.reduce_sum(self.frozen**3 * self.never)
            found = tape.gradient(energy, [self.scale, self.frozen, self.never])
            size = tf.reduce_sum(found[0] ** 2)
        if found.pop() is not None:
            raise ValueError("A tape does not watch what is not trained.")
        found.append(outer.gradient(size, self.scale.value))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(self.never.value)
            energy = tf.reduce_sum(self.never**2 * self.scale)
        found.append(tape.gradient(energy, self.never))
        found.append(tf.cond(tf.shape(x)[0] > 0, self.branch, self.branch))
        with tf.GradientTape() as tape:
            rows = keras.ops.tanh(self.inner(x))
            energy = keras.ops.sum(self.inner.bias**2)
            energy += keras.ops.sum(self.inner.kernel**3)
        kernel, bias = tape.gradient(energy, self.inner.trainable_variables)
        return rows @ (kernel + self.inner.kernel) + bias + sum(found)

    def branch(self):
        with tf.GradientTape() as tape:
            energy = tf.reduce_sum(self.scale**2)
        return tape.gradient(energy, self.scale) * self.scale


# --------------------------------------------------- storage that layers keep
def kept(use, **arguments):
    """Layers of which one uses the storage of another's weight."""
    dense = kl.Dense(4)
    dense.build((None, 4))
    storage = dense.kernel.value
    return [dense, kl.Lambda(lambda x: use(x, storage), **arguments)]


def by_operations(x, kernel):
    x = keras.ops.tanh(keras.ops.matmul(x, kernel)) * (1.0 + kernel[0])
    return x + tf.gather(kernel, [1])[0] + tf.gather_nd(kernel, [[2]])[0]


def in_control_flow(x, kernel):
    x = tf.cond(tf.shape(x)[0] > 0, lambda: tf.matmul(x, kernel), lambda: x)
    step = tf.function(lambda h: tf.tanh(tf.matmul(h, kernel)))
    return tf.while_loop(
        lambda i, h: i < 2, lambda i, h: (i + 1, step(h)), [0, x]
    )[1]


def assigning(x, kernel):
    kernel.assign(kernel * 0.5)
    return x


def assigning_in_a_branch(x, kernel):
    def branch():
        return x + tf.reduce_sum(kernel.assign_add(kernel))

    return tf.cond(tf.shape(x)[0] > 0, branch, lambda: x)


def reading_in_a_loop(x, kernel):
    def body(i, h):
        value = tf.raw_ops.ReadVariableOp(
            resource=kernel.handle, dtype=kernel.dtype
        )
        return i + 1, tf.matmul(h, value)

    return tf.while_loop(lambda i, h: i < 2, body, [0, x])[1]


@pytest.mark.parametrize(
    "use", [assigning, assigning_in_a_branch, reading_in_a_loop]
)
@EVERYWHERE
def test_storage_that_is_used_by_itself_is_refused(use, k, eagerly):
    layers = [keras.Input((4,)), *kept(use, name="uses"), kl.Dense(2)]
    model = tfgpipe.GPipe(layers, k, k)
    model.compile("sgd", "mse", run_eagerly=eagerly)
    with pytest.raises(
        ValueError, match=r"(?s)'uses'.* of 'dense.*/kernel' by itself.*Keep"
    ):
        model.train_on_batch(normal(4), normal(2))


def differentiates_another():
    """Of another cell, too: which weights it reads is found out on the way."""
    dense = kl.Dense(4)
    dense.build((None, 4))

    def differentiate(x):
        with tf.GradientTape() as tape:
            energy = tf.reduce_sum(tf.tanh(dense.kernel) ** 2)
        return keras.ops.matmul(x, tape.gradient(energy, dense.kernel))

    return [dense, kl.Lambda(differentiate), kl.Dense(2)]


def around(*layers):
    return lambda: [kl.Dense(4, "tanh"), *(make() for make in layers)]


# What was missed: regularisers and tapes of weights that were made frozen;
# storage that a scope, a tape or a layer reads by itself.
READING = {
    "built and frozen": built_and_frozen,
    "frozen by itself": frozen_by_itself,
    "made frozen": made_frozen,
    "a scope": around(lambda: Substituted(kl.Dense(4)), lambda: kl.Dense(2)),
    "a tape": around(Differentiating, lambda: kl.Dense(2)),
    "a tape of another layer": differentiates_another,
    "operations": lambda: [*kept(by_operations), kl.Dense(2)],
    "control flow": lambda: [*kept(in_control_flow), kl.Dense(2)],
    "a function": lambda: [
        *kept(lambda x, kernel: x @ tf.tanh(kernel)),
        kl.Dense(2),
    ],
}
SLOW = ("a tape", "control flow")


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("name", "k", "eagerly"),
    quick(
        [
            (name, *how)
            for name in READING
            for how in ((1, False), (2, False), (2, True))
        ],
        [(name, 2, False) for name in READING if name not in SLOW]
        + [("built and frozen", 2, True)],
    ),
)
def test_what_is_kept_of_a_weight_is_the_weight(name, k, eagerly):
    """Keras's own tape misses those that were made with `trainable=False`."""
    compared(READING[name], k, eagerly)


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
        if self.way == "looked up":
            return x * tf.gather(self.factor, [1])
        if self.way == "in a loop":
            return tf.while_loop(
                lambda i, _: i < 2,
                lambda i, y: (i + 1, y * self.factor[1]),
                [0, x],
            )[1]
        if self.way == "in a function":
            return tf.function(lambda x: x * self.factor[0])(x)
        if self.way == "counted":
            return x / self.factor.assign_add([1.0, 1.0])[1]
        found = self.table.lookup(tf.constant([1], tf.int64))
        return x * tf.ensure_shape(found, [1])

    def move(self):
        self.factor.assign_add([0.5, 0.5])
        key = tf.constant([1], tf.int64)
        self.table.insert(key, self.table.lookup(key) + 0.5)


WAYS = (
    *("read", "looked up", "in a loop", "in a function"),
    *("from a table", "counted"),
)


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
        [(2, 4, "read"), (2, 4, "in a loop"), (2, 4, "from a table")],
    ),
)
def test_step_assigns_what_cells_read_when_they_have_read_it(k, m, way):
    """Cells that wait for others read what the step had assigned at its end."""
    expected = stepping(keras.Sequential, way)
    split = {"num_partitions": k, "num_micro_batches": m}
    found = stepping(tfgpipe.GPipe, way, **split, remat="always")
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-12)


def test_recomputation_reads_what_the_forward_pass_has_read():
    """The loss of the whole mini-batch assigns between the two."""

    def trained(cls, **arguments):
        class Moving(cls):
            def compute_loss(self, x, y, y_pred, sample_weight=None, **told):
                with tf.control_dependencies([y_pred]):
                    self.outside.move()
                return keras.ops.mean((y - y_pred) ** 2)

        keras.utils.set_random_seed(5)
        outside = Outside("read")
        model = Moving([kl.Dense(4), outside, kl.Dense(2)], **arguments)
        model.outside = outside
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
        model.fit(normal(4), normal(2), batch_size=4, epochs=2, verbose=0)
        return model.get_weights()

    expected = trained(keras.Sequential)
    found = trained(
        tfgpipe.GPipe, num_partitions=2, num_micro_batches=2, remat="always"
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 1e-12)
