"""Metrics that are computed beside the other tasks: as numbers, and when."""

import functools
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from beside_keras import ROWS, assert_close, normal, trained
from keras import layers as kl

import tfgpipe
from tfgpipe.cells import CellTasks
from tfgpipe.run import mini_batch

LONG = 60  # seconds: it ends as soon as what it waits for is there


@pytest.fixture(autouse=True)
def no_device_is_a_host(monkeypatch):
    """Logical CPU devices are as accelerators."""
    monkeypatch.setattr(mini_batch, "_HOST", "none")


def small():
    layers = [kl.Dense(8, "relu"), kl.BatchNormalization(), kl.Dense(5)]
    return [keras.Input((6,)), *layers, kl.Softmax()]


@pytest.mark.parametrize(
    ("k", "m", "schedule"), [(1, 1, "gpipe"), (2, 3, "1f1b")]
)
def test_numbers_are_the_same_bits(monkeypatch, k, m, schedule):
    def found():
        def pipeline(layers):
            return tfgpipe.GPipe(layers, k, m, schedule=schedule)

        return trained(
            small,
            pipeline,
            normal(6),
            np.arange(ROWS) % 5,
            loss="sparse_categorical_crossentropy",
            weighted_metrics=["accuracy", "sparse_categorical_crossentropy"],
        )

    beside = found()
    monkeypatch.setattr(mini_batch, "_HOST", "CPU")
    assert_close(beside, found(), rtol=0)


def through(function, tensor):
    """What a function of NumPy arrays makes of a tensor, of the same shape."""
    found = tf.numpy_function(function, [tensor], tensor.dtype, stateful=False)
    return tf.ensure_shape(found, tensor.shape)


@pytest.fixture
def before_metrics(monkeypatch):
    """Has the metrics of a micro-batch begin with a call of a function."""
    original = CellTasks.metrics

    def set_to(function):
        def metrics(self, values, kept):
            if not self.for_metrics:
                return None
            last = self.for_metrics[-1].ref()
            noted = {**kept, last: through(function, kept[last])}
            return original(self, values, noted)

        monkeypatch.setattr(CellTasks, "metrics", metrics)

    return set_to


def with_gradient_noted(note):
    @tf.custom_gradient
    def noted(x):
        def back(dy):
            return through(note, dy)

        return tf.identity(x), back

    return noted


def test_backward_pass_does_not_wait_for_metrics(before_metrics):
    begun, in_time = threading.Event(), []

    def note(dy):
        begun.set()
        return dy

    def wait(shown):
        in_time.append(begun.wait(LONG))
        return shown

    layers = [kl.Dense(3), kl.Lambda(with_gradient_noted(note)), kl.Dense(2)]
    model = tfgpipe.GPipe(layers, 1, 1)
    before_metrics(wait)
    model.compile("sgd", "mse", metrics=["mae"])
    model.build((4, 3))
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 2)))
    assert in_time == [True]


def test_outputs_of_two_micro_batches_at_most_wait_for_metrics(before_metrics):
    seen = []

    def noting(name, seconds=0.0):
        def note(x):
            time.sleep(seconds)
            seen.append(name)
            return x

        return note

    run = functools.partial(through, noting("forward"))
    layers = [kl.Dense(2), kl.Lambda(run, output_shape=(2,))]
    model = tfgpipe.GPipe(layers, 1, 6)
    before_metrics(noting("metrics", 0.05))
    model.compile("sgd", "mse", metrics=["mae"])
    for _ in range(2):  # first, layers are tried
        seen.clear()
        model.evaluate(np.ones((12, 3)), np.ones((12, 2)), 12, verbose=0)
    forward = [i for i, name in enumerate(seen) if name == "forward"]
    metrics = [i for i, name in enumerate(seen) if name == "metrics"]
    assert len(forward) == len(metrics) == 6
    assert all(a < b for a, b in zip(metrics, forward[2:]))
