"""A layer computes on the device of its weights, whoever calls it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny_presets
from crossing import partitions, sent_weights
from keras import layers as kl
from quick import quick

import tfgpipe
from tfgpipe.devices import placement

CPUS = ["CPU:1", "CPU:2"]


def chain():
    x = keras.Input((8,))
    inner = keras.Sequential([kl.Dense(8, "relu") for _ in range(4)])
    h = inner(x)
    return keras.Model(x, kl.Dense(8)(keras.ops.relu(h) + h))


def sequential():
    return keras.Sequential(
        [keras.Input((8,)), *(kl.Dense(8, "relu") for _ in range(4))]
    )


class Blocks(kl.Layer):
    """All of a model in one layer, which is opened."""

    def __init__(self):
        super().__init__()
        self.blocks = [kl.Dense(8, "relu") for _ in range(4)]

    def call(self, x):
        for block in self.blocks:
            x = block(x) + x
        return x


def opened():
    x = keras.Input((8,))
    return keras.Model(x, Blocks()(x))


X = np.random.default_rng(0).normal(size=(6, 8)).astype("float32")


def tokens():
    mask = np.arange(8) < np.array([[3], [8], [5], [1]])
    ids = np.random.default_rng(0).integers(1, 60, (4, 8))
    return {"token_ids": np.where(mask, ids, 0), "padding_mask": mask}


MODELS = {
    "functional": (chain, X),
    "sequential": (sequential, X),
    "opened": (opened, X),
    "task": (tiny_presets.llama, tokens()),
}


def tensors(x):
    return keras.tree.map_structure(tf.constant, x)


@pytest.fixture(params=quick(MODELS, ["opened", "task"]))
def case(request):
    """A model, data, what it predicted, and a pipeline of it."""
    make, x = MODELS[request.param]
    keras.utils.set_random_seed(1)
    model = make()
    expected = model.predict(x, verbose=0)
    pipeline = tfgpipe.GPipe(model, 2, 2, devices=CPUS)
    assert {w.value.device[-5:] for w in model.weights} == {*CPUS}
    return model, x, expected, pipeline


def test_no_byte_of_a_weight_is_sent(case):
    model, x, _, _ = case
    count, found = sent_weights(tf.function(lambda x: model(x)), tensors(x))
    assert count > 0 and not found
    with placement.homes_left():  # which is the reason
        _, found = sent_weights(tf.function(lambda x: model(x)), tensors(x))
    assert found


def test_model_predicts_as_before_and_by_what_was_trained_since(case):
    """A function that was made before would read the old storage."""
    model, x, expected, pipeline = case
    for found in (
        model.predict(x, verbose=0),
        model(x),
        pipeline.predict(x, verbose=0),
    ):
        np.testing.assert_allclose(found, expected, 1e-4, 1e-5)
    for weight in pipeline.trainable_weights:
        weight.assign(weight + 0.1)
    found = model.predict(x, verbose=0)
    assert np.abs(found - expected).max() > 1e-3
    np.testing.assert_allclose(found, model(x), 1e-4, 1e-5)


def test_part_of_a_model_is_at_home_too():
    model = chain()
    inner = model.layers[1]
    tfgpipe.GPipe(model, 2, 2, devices=CPUS, layers_per_cell=[2, 5])
    used = {
        node.device[-5:]
        for nodes in partitions(tf.function(lambda x: inner(x)), tensors(X))
        for node in nodes.values()
        if "MatMul" in node.op
    }
    assert used == {*CPUS}


def test_evaluation_has_the_numbers_of_keras():
    keras.utils.set_random_seed(1)
    plain = chain()
    plain.compile("adam", "mse")
    keras.utils.set_random_seed(1)
    model = chain()
    tfgpipe.GPipe(model, 2, 2, devices=CPUS)
    model.compile("adam", "mse")
    assert model.evaluate(X, X, verbose=0) == plain.evaluate(X, X, verbose=0)
    for one in (plain, model):
        one.fit(X, X, verbose=0)
    np.testing.assert_allclose(
        model.predict(X, verbose=0), plain.predict(X, verbose=0), 1e-5, 1e-6
    )


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`")
@pytest.mark.parametrize("change", ["lora", "int8"])
def test_weights_that_are_added_are_at_home(change):
    model = sequential()
    tfgpipe.GPipe(model, 2, 2, devices=CPUS)
    where = [layer.weights[0].value.device for layer in model.layers]
    if change == "lora":
        for layer in model.layers:
            layer.enable_lora(2)
    else:
        model.quantize("int8")
    for layer, device in zip(model.layers, where, strict=True):
        assert len(layer.weights) > 2
        assert {w.value.device for w in layer.weights} == {device}
    count, found = sent_weights(tf.function(lambda x: model(x)), tensors(X))
    assert count > 0 and not found


def test_model_is_not_compiled_by_keras_itself(monkeypatch):
    model = chain()
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    listed = tf.config.list_physical_devices
    monkeypatch.setattr(
        tf.config,
        "list_physical_devices",
        lambda kind=None: [*listed(kind), *([] if kind else [gpu])],
    )
    model.compile("adam", "mse")
    assert model.jit_compile
    tfgpipe.GPipe(model, 2, 2, devices=CPUS)
    assert not model.jit_compile
    model.compile("adam", "mse")
    assert not model.jit_compile
    assert not keras.Model(model.input, model.layers[2].output).jit_compile
    model.predict(X, verbose=0)


def test_asking_for_xla_names_the_cure():
    model = chain()
    expected = model.predict(X, verbose=0)
    tfgpipe.GPipe(model, 2, 2, devices=CPUS)
    with pytest.warns(UserWarning, match="Proceeding with `jit_compile=False`"):
        model.compile("adam", "mse", jit_compile=True)
    with pytest.raises(ValueError, match=r"(?s)on several devices.*CPU:1"):
        tf.function(lambda x: model(x), jit_compile=True)(X)
    tfgpipe.GPipe(model, 2, 2, devices=CPUS[::-1])  # has the last word
    _, found = sent_weights(tf.function(lambda x: model(x)), tensors(X))
    assert not found
    tfgpipe.GPipe(model, 1, 2, devices=["CPU:0"])
    model.compile("adam", "mse", jit_compile=True)
    assert model.jit_compile
    np.testing.assert_allclose(
        model.predict(X, verbose=0), expected, 1e-5, 1e-6
    )


@pytest.mark.parametrize(
    "make", [chain, pytest.param(opened, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("devices", [False, True])
def test_served_model_is_on_devices_if_asked(make, devices, tmp_path):
    keras.utils.set_random_seed(1)
    pipeline = tfgpipe.GPipe(make(), 2, 2, devices=CPUS)
    expected = pipeline.predict(X, verbose=0)
    pipeline.export(str(tmp_path), verbose=False, devices=devices)
    options = tf.saved_model.LoadOptions(
        experimental_variable_policy="save_variable_devices"
    )
    served = tf.saved_model.load(str(tmp_path), options=options)
    held = {v.device[-5:] for v in served.variables if v.dtype.is_floating}
    assert held == ({*CPUS} if devices else {"CPU:0"})
    graph = served.signatures["serving_default"].graph
    named = {
        node.device[-5:]
        for f in graph.as_graph_def().library.function
        for node in f.node_def
        if "MatMul" in node.op
    } - {""}
    assert named == ({*CPUS} if devices else set())
    count, sent = sent_weights(served.serve, tf.constant(X))
    assert (count > 0) == devices and not sent
    found = served.serve(tf.constant(X)).numpy()
    np.testing.assert_allclose(found, pipeline(X), 1e-6, 1e-7)
    np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


def test_format_without_devices_is_refused(tmp_path):
    pipeline = tfgpipe.GPipe(chain(), 2, 2, devices=CPUS)
    with pytest.raises(ValueError, match="format='onnx'"):
        pipeline.export(str(tmp_path), format="onnx", devices=True)
    with pytest.raises(ValueError, match="devices='CPU:0'"):
        pipeline.export(str(tmp_path), devices="CPU:0")
