"""Where Keras sees an accelerator, it compiles by XLA; the numbers stay.

Keras is made to see one. Only whether it compiles hangs on that: a step, and
what `predict`, `evaluate` and `generate` run, of a plain model.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny_presets
from kinds import KINDS, Plain
from matrix import NAMED, REMAT, arguments, largest_difference
from test_transparency import optimizers, train

import tfgpipe

QUICK = [("outputs", 1, 1, "gpipe", "except_last")]
SLOW = [
    ("masked_summary", 2, 3, "1f1b", "never"),
    ("tied", 3, 2, "zero_bubble", "always"),
    *(
        (kind, 3, 4, schedule, remat)
        for kind in ("masked_summary", "counters")
        for schedule in NAMED
        for remat in REMAT
    ),
]


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


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)]
)
def test_training_and_inference_are_those_of_keras(case):
    name, *point = case
    found = []
    for make in (
        Plain,
        lambda layers: tfgpipe.GPipe(layers, **arguments(*point)),
    ):
        model, history, outputs = train(
            KINDS[name], make, optimizers("momentum"), 2, infers=True
        )
        x, y = (
            part(np.random.default_rng(3))
            for part in (KINDS[name].x, KINDS[name].y)
        )
        weights = [w.numpy() for w in model.weights]
        tested = model.evaluate(x, y, 8, verbose=0, return_dict=True)
        found.append((weights, history, outputs, tested))
    for one, other in zip(*found, strict=True):
        assert largest_difference(one, other) < 1e-10


def test_exported_model_serves_what_it_predicts(tmp_path):
    model = tfgpipe.GPipe(two_layers(), 2, 2)
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).random((6, 4), "float32")
    model.fit(x, np.ones((6, 3)), 6, verbose=0)
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(
        served.serve(x), model.predict(x, verbose=0), 1e-6
    )


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
