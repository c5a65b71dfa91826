"""Where Keras sees an accelerator, it compiles by XLA; the numbers stay.

Keras is made to see one. Only whether it compiles hangs on that: a step, and
what `predict`, `evaluate` and `generate` run, of a plain model. Pipelines are
on CPUs, and compile no cell, or their devices are taken for accelerators.
"""

import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny_presets
from quick import quick

import tfgpipe
from tfgpipe import internals
from tfgpipe.devices import names


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    """Keras sees a GPU."""
    listed = tf.config.list_physical_devices

    def with_gpu(device_type=None):
        found = listed(device_type)
        if device_type is None:  # as Keras asks; the library names a type
            (cpu,) = listed("CPU")
            found = [*found, type(cpu)("/physical_device:GPU:0", "GPU")]
        return found

    monkeypatch.setattr(tf.config, "list_physical_devices", with_gpu)


def two_layers():
    return [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)]


def test_keras_compiles_and_a_pipeline_does_not():
    """Else the tests below would show nothing."""
    plain = keras.Sequential(two_layers())
    plain.compile("sgd", "mse")
    assert plain.jit_compile
    model = tfgpipe.GPipe(two_layers(), 2, 2)
    model.compile("sgd", "mse")
    assert not model.jit_compile


@pytest.fixture
def on_accelerators(monkeypatch):
    """Pipelines take their devices for accelerators."""
    monkeypatch.setattr(names, "has_accelerator", lambda devices: True)


class Applied(keras.layers.Layer):
    """Applies a function; notes whether XLA is to compile it."""

    def __init__(self, function=tf.tanh, supports_jit=True, **kwargs):
        super().__init__(**kwargs)
        self.function, self.supports_jit = function, supports_jit
        self.is_compiled = None

    def call(self, x):
        self.is_compiled = internals.is_in_xla()
        return tf.ensure_shape(self.function(x), x.shape)

    def compute_output_shape(self, shape):
        return shape


def around(layer):
    dense = keras.layers.Dense
    return [keras.Input((4,)), dense(8), layer, dense(8), dense(3)]


def applied(layer, arguments=None, **compiled):
    """A pipeline around a layer that has made two steps, and its weights."""
    keras.utils.set_random_seed(0)
    options = {"devices": ["CPU:0", "CPU:1"], "trial": "off"}
    layers = around(layer)
    model = tfgpipe.GPipe(layers, 2, 2, **options, **(arguments or {}))
    model.compile("adam", "mse", **compiled)
    x = np.random.default_rng(0).random((6, 4), "float32")
    model.fit(x, np.ones((6, 3)), 4, verbose=0, shuffle=False)
    return model, [w.numpy() for w in model.weights]


def test_cells_are_compiled_where_keras_would(on_accelerators):
    compiled, left = Applied(), Applied()
    model, weights = applied(compiled)
    _, expected = applied(left, jit_compile=False)
    assert compiled.is_compiled and not left.is_compiled
    assert not model.jit_compile  # the step as a whole is not
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)
    for method, *labels in (
        (model.evaluate, np.ones((4, 3))),
        (model.predict,),
    ):
        compiled.is_compiled = None
        method(np.ones((4, 4)), *labels, verbose=0)
        assert compiled.is_compiled


def test_cells_on_cpus_are_compiled_only_if_asked_for():
    layer = Applied()
    model, _ = applied(layer)
    assert not layer.is_compiled
    for asked in (True, False):
        model.compile("adam", "mse", jit_compile=asked)
        model.train_on_batch(np.ones((4, 4)), np.ones((4, 3)))
        assert layer.is_compiled == asked


def test_layers_that_do_not_support_xla_are_not_compiled(on_accelerators):
    layer = Applied(supports_jit=False)
    applied(layer)
    assert not layer.is_compiled


def _printing(x):
    tf.print("", end="")
    return x


def _by_value(x):
    ones = tf.ones([tf.cast(tf.reduce_max(x), "int32")], x.dtype)
    return x + tf.reduce_sum(ones)


def _looping(x):
    step = lambda i, h: (i + 1, tf.tanh(h))  # noqa: E731
    return tf.while_loop(lambda i, h: i < 3, step, (0, x))[1]


# Functions, and what is said of them.
REFUSED = {
    "no kernel": (_printing, "'odd'.*StringFormat"),
    "a size by value": (_by_value, "'odd'.*Fill must be a compile-time"),
    "a loop without end": (_looping, "fixed tensor list size"),
}


@pytest.mark.filterwarnings("ignore:.*side effects")
@pytest.mark.parametrize("case", quick(REFUSED, ["a size by value"]))
def test_what_xla_cannot_compile_is_left_as_a_whole_and_said(
    case, on_accelerators, caplog
):
    function, words = REFUSED[case]
    caplog.set_level(logging.INFO, "tfgpipe")
    _, weights = applied(Applied(function, name="odd"))
    (message,) = [r.message for r in caplog.records if r.name == "tfgpipe"]
    assert message.startswith("XLA compiles no cell")
    assert re.search(words, message)
    _, expected = applied(Applied(function, name="odd"), jit_compile=False)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    # It is an error if it is asked for.
    with pytest.raises(ValueError, match="jit_compile.*" + words):
        applied(Applied(function, name="odd"), jit_compile=True)


def test_file_leaves_it_to_the_next_machine(on_accelerators, tmp_path):
    model = tfgpipe.GPipe(two_layers(), 2, 2)
    for options, expected in (
        ({}, "auto"),
        ({"jit_compile": "auto"}, "auto"),
        ({"jit_compile": False}, False),
        ({"jit_compile": True}, True),
    ):
        model.compile("sgd", "mse", **options)
        assert model.get_compile_config()["jit_compile"] == expected
        model.save(tmp_path / "model.keras")
        loaded = tfgpipe.load_model(tmp_path / "model.keras")
        assert loaded.get_compile_config()["jit_compile"] == expected


@pytest.mark.slow
def test_generated_tokens_are_those_of_keras():
    task = tiny_presets.llama(num_layers=2)
    x = tiny_presets.prompts(task)
    task.compile(sampler="greedy")
    assert task.jit_compile
    expected = task.generate(x, stop_token_ids=None)
    model = tfgpipe.GPipe(task, 2, 3, devices=["CPU:1", "CPU:2"])
    found = model.generate(x, stop_token_ids=None)
    np.testing.assert_array_equal(found["token_ids"], expected["token_ids"])
