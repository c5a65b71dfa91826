"""What is traced, how often, and which cells share it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import called, step_graph, tasks
from keras import layers as kl

import tfgpipe


def called_functions(layers, k, m=2, **kwargs):
    """Names of the functions that the tasks of a training step call."""
    model = tfgpipe.GPipe(layers, k, m, remat="always", **kwargs)
    model.compile("sgd", "mse")
    x = np.ones((4, 6, 4), "float32")
    graph = step_graph(model, x, np.zeros_like(model(x)))
    return {called(op) for op in tasks(graph) if op.outputs}


def dense(count, units=4):
    return [kl.Dense(units, "tanh", name=f"d{i}") for i in range(count)]


def test_equal_cells_share_their_functions():
    """Of four cells the last has the loss; the others are equal."""
    names = called_functions(dense(8), k=4)
    # forward, recompute, backward, and backward with a sum so far: of the first
    # cell, whose inputs need no gradient, of those in the middle, and the last
    assert len(names) == 3 * 4


def test_schedule_with_halves_shares_them():
    names = called_functions(dense(8), k=4, schedule="zero_bubble")
    # forward, recompute, input gradient and weight gradient with and without
    # a sum; the first cell's backward pass is in one; and what the loss counts
    assert len(names) == 4 + 5 + 5 + 1


def test_cells_share_across_gradients_that_come_in_or_do_not():
    """One output of the second cell leads nowhere."""

    class Pair(kl.Layer):
        def __init__(self):
            super().__init__()
            self.dense = kl.Dense(4, "tanh")

        def build(self, shapes):
            self.dense.build(shapes[0])

        def call(self, x):
            return self.dense(x[0]), x[1] * 2.0

    class First(kl.Layer):
        def call(self, x):
            return x, x

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")

    class Last(kl.Layer):
        def call(self, x):
            return x[0]

    def layers():
        middle = [Pair() for _ in range(4)]
        return [keras.Input((4,)), First(), *middle, Last(), kl.Dense(1)]

    x = np.random.default_rng(0).standard_normal((6, 4))
    results = []
    for k in (1, 7):
        keras.utils.set_random_seed(1)
        model = tfgpipe.GPipe(layers(), k, 2)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.train_on_batch(x, x[:, :1])
        results.append([w.numpy() for w in model.weights])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_python_runs_a_layer_once_a_trace(dense_calls):
    """Whatever M, with the backward pass: forward, gradients, halves."""
    layers = [kl.Dense(4) for _ in range(4)]
    model = tfgpipe.GPipe(layers, 4, 8, remat="always", schedule="zero_bubble")
    model.compile("sgd", "mse")
    model.build((None, 4))
    dense_calls.clear()
    ones = np.ones((16, 4), "float32")
    model.train_on_batch(ones, ones)
    assert len(dense_calls) == 4  # each layer


def test_cells_with_gradients_of_their_own_share_their_functions():
    """As `silu` has, which is code until it has run."""
    layers = [kl.Dense(4, "silu") for _ in range(8)]
    assert len(called_functions(layers, k=4)) == 3 * 4


class Noise(kl.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def noisy(make):
    """Losses of two steps: variances of what three layers add up."""
    keras.utils.set_random_seed(3)
    noise = [Noise() for _ in range(3)]
    scale = kl.Dense(300, use_bias=False, kernel_initializer="identity")
    model = make([keras.Input((300,)), *noise, scale])
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    x = np.zeros((4, 300), "float32")
    return [float(model.train_on_batch(x, x)) for _ in range(2)]


@pytest.mark.filterwarnings("ignore:Layer 'noise:UserWarning")
def test_seeded_operations_draw_as_in_keras_whatever_the_cells():
    def drawn(k, m):
        return noisy(lambda layers: tfgpipe.GPipe(layers, k, m, remat="never"))

    expected = noisy(keras.Sequential)
    np.testing.assert_allclose(expected, 3, 0.2)
    assert drawn(1, 1) == drawn(4, 1) == expected
    assert drawn(1, 2) == drawn(4, 2)
    np.testing.assert_allclose(drawn(4, 2), 3, 0.2)


def test_operations_that_draw_the_same_in_replicas_are_refused():
    with tfgpipe.PipelineStrategy(2, 2).scope():
        model = tfgpipe.GPipe(
            [keras.Input((4,)), Noise(), kl.Dense(4)], remat="never"
        )
    model.compile("sgd", "mse")
    ones = np.ones((4, 4), "float32")
    with pytest.raises(ValueError, match=r"With .* replicas, .*one replica"):
        model.train_on_batch(ones, ones)
