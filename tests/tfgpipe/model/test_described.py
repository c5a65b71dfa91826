"""A `GPipe` tells of itself what `keras.Sequential` tells."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from tiny import assert_close, assert_same, weights

import tfgpipe

DESCRIBED = (
    "input",
    "output",
    "inputs",
    "outputs",
    "input_names",
    "input_shape",
    "output_shape",
)


def dense():
    return [kl.Dense(3, "tanh", name="a"), kl.Dense(2, name="b")]


def with_input(shape=(4,), **kwargs):
    return [keras.Input(shape, **kwargs), *dense()]


def functional():
    inputs = keras.Input((4, 4, 1))
    return keras.Model(inputs, kl.Conv2D(2, 3)(inputs))


def plain(make=dense):
    keras.utils.set_random_seed(3)
    return keras.Sequential(make())


def pipeline(make=dense, k=2, m=2):
    keras.utils.set_random_seed(3)
    return tfgpipe.GPipe(make(), k, m)


def described(model):
    """What a model says, tensors by shape and dtype; no size of the batch."""
    tensors = [*model.inputs, *model.outputs]
    return (
        [(t.shape[1:], t.dtype) for t in tensors],
        model.input_shape[1:],
        model.output_shape[1:],
        [layer.output.shape[1:] for layer in model.layers],
    )


# ------------------------------------------------------- inputs and outputs
@pytest.mark.parametrize(
    "make",
    [
        with_input,
        lambda: with_input(dtype="float16", name="pixels"),
        lambda: [kl.InputLayer((4,)), *dense()],
        lambda: [functional(), kl.Flatten(), kl.Dense(1)],
        lambda: [plain(with_input), kl.Dense(1)],
        lambda: [pipeline(with_input, 1), kl.Dense(1)],
    ],
    ids=range(6),
)
def test_first_layer_that_declares_the_input_builds_the_model(make):
    model, expected = pipeline(make), plain(make)
    assert model.built
    assert expected.built
    assert model.input_shape == expected.input_shape
    assert described(model) == described(expected)
    assert_same(weights(model), weights(expected))


@pytest.mark.parametrize("how", ["build", "fit"])
def test_model_is_described_when_it_is_built(how):
    x = np.ones((6, 4), "float32")

    def found(model):
        assert not any(hasattr(model, name) for name in DESCRIBED)
        assert not model.built
        assert model.weights == []
        model.compile("sgd", "mse")
        if how == "build":
            model.build((None, 4))
        else:
            model.fit(x, x[:, :2], verbose=0)
        return described(model)

    assert found(pipeline()) == found(plain())


def test_inputs_before_build_are_an_error_with_a_cure():
    with pytest.raises(AttributeError, match=r"Call `model\.build\(input_sh"):
        _ = pipeline().output_shape


def test_input_is_that_of_the_user():
    inputs = keras.Input((4,), name="pixels")
    model = tfgpipe.GPipe([inputs, *dense()], 2)
    assert model.inputs[0] is inputs
    assert model.outputs[0] is model.layers[-1].output
    copy = keras.models.clone_model(model)
    assert copy.get_config() == model.get_config()
    assert "pixels" in str(model.get_config()["layers"][0])


class Fork(kl.Layer):
    def call(self, x):
        return {"h": x["a"] + x["b"], "i": keras.ops.argmax(x["a"], -1)}


def test_nests_are_described_by_nests():
    model = tfgpipe.GPipe([Fork()], 1)
    model({"a": np.ones((2, 4)), "b": np.ones((2, 1))})
    assert model.input_shape == {"a": (2, 4), "b": (2, 1)}
    assert model.output_shape == {"h": (2, 4), "i": (2,)}
    assert [t.shape for t in model.inputs] == [(2, 4), (2, 1)]
    assert [t.dtype for t in model.outputs] == ["float32", "int32"]
    assert list(model.input) == ["a", "b"]
    assert model.output == dict(zip("hi", model.outputs))


@pytest.mark.parametrize("kind", ["one", "list", "dict"])
def test_input_and_output_are_those_of_the_functional_model(kind):
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    h = kl.Dense(3, name="h")(a + b)
    inputs, outputs = {
        "one": (a, kl.Dense(3)(a)),
        "list": ([a, b], [h, kl.Dense(2)(h)]),
        "dict": ({"a": a, "b": b}, {"u": h, "v": kl.Dense(2)(h)}),
    }[kind]
    plain = keras.Model(inputs, outputs)
    model = tfgpipe.GPipe(plain, 1, 2)
    assert model.input is plain.input
    assert model.output is plain.output
    assert model.input_names == ["a", "b"][: len(plain.inputs)]
    assert model.output_names == plain.output_names
    assert model.operations == plain.operations
    assert not hasattr(pipeline(with_input), "operations")


def test_functional_model_of_the_first_layers_shares_their_weights():
    x = np.random.default_rng(0).random((5, 4), "float32")
    model = pipeline(with_input)
    features = keras.Model(model.input, model.get_layer("a").output)
    whole = keras.Model(model.inputs, model.outputs)
    longer = keras.Model(model.input, kl.Rescaling(2.0)(model.output))
    model.compile("sgd", "mse")
    model.fit(x, x[:, :2], verbose=0)
    found = model.predict(x, verbose=0)
    assert_close(whole([x]).numpy(), found, 1e-6)
    assert_close(longer(x).numpy(), 2 * found, 1e-6)
    expected = np.tanh(x @ model.weights[0].numpy() + model.weights[1].numpy())
    assert_close(features(x).numpy(), expected, 1e-6)


def test_output_shape_is_computed_whether_built_or_not():
    model, expected = pipeline(), plain()
    for _ in range(2):
        shape = model.compute_output_shape((7, 4))
        assert shape == expected.compute_output_shape((7, 4)) == (7, 2)
        assert model.compute_output_spec(keras.Input((4,))).shape == (None, 2)
        model.build((None, 4))
        expected.build((None, 4))


# --------------------------------------------------------- part of a model
@pytest.mark.filterwarnings("ignore:.*Nothing is pipelined")
@pytest.mark.parametrize(
    ("outer", "is_built"), [("sequential", True), ("functional", False)]
)
def test_pipeline_is_a_layer_of_another_model(outer, is_built):
    x = np.random.default_rng(0).random((5, 4), "float32")

    def run(inner):
        if is_built:
            inner.build((None, 4))
        if outer == "sequential":
            model = keras.Sequential([inner, kl.Dense(1)])
        else:
            inputs = keras.Input((4,))
            model = keras.Model(inputs, kl.Dense(1)(inner(inputs)))
        model.compile("sgd", "mse")
        model.fit(x, x[:, :1], verbose=0, shuffle=False, batch_size=2)
        return model.output_shape, weights(model)

    found, expected = run(pipeline()), run(plain())
    assert found[0] == expected[0]
    assert_close(found[1], expected[1], 1e-6)


def test_called_model_takes_each_input_in_its_own_dtype(tmp_path):
    """Where the first is of integers, floats beside it stay floats."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    ids = keras.Input((), dtype="int32", name="ids")
    share = keras.Input((3,), name="share")
    h = kl.Concatenate()([kl.Embedding(5, 2)(ids), share])
    inner = keras.Model({"ids": ids, "share": share}, kl.Dense(2)(h))
    model = tfgpipe.GPipe(inner, 2, 2)
    rng = np.random.default_rng(0)
    x = {"ids": np.arange(5), "share": rng.random((5, 3), "float32")}
    expected = inner(x)
    assert_same([model(x)], [expected])
    assert_close(model.predict(x, verbose=0), inner.predict(x), 1e-6)
    shape = {"ids": (5,), "share": (5, 3)}
    assert model.compute_output_shape(shape) == (5, 2)
    model.export(str(tmp_path), verbose=False)
    served = tf.saved_model.load(str(tmp_path))
    x = {name: tf.convert_to_tensor(rows) for name, rows in x.items()}
    x["ids"] = tf.cast(x["ids"], "int32")
    assert_same([served.serve(x)], [expected])


# --------------------------------------------------------- table and picture
def forked():
    """Operations, a layer that comes twice, a model inside."""
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    shared = kl.Dense(4, name="shared")
    inner = keras.Sequential([keras.Input((4,)), kl.Dense(4)], name="inner")
    h = shared(a) * shared(b) + inner(a)
    return keras.Model([a, b], kl.Dense(2, name="last")(h), name="forked")


def printed(model, **kwargs):
    lines = []
    model.summary(print_fn=lines.append, **kwargs)
    return "\n".join(lines)


@pytest.mark.parametrize("expand_nested", [False, True])
def test_summary_has_all_that_of_the_functional_model_has(
    expand_nested, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "130")  # or else "Connected to" is cut off
    model = tfgpipe.GPipe(forked(), 2, 2, name="forked")
    expected = printed(model.model, expand_nested=expand_nested)
    found = printed(model, expand_nested=expand_nested)
    assert found.startswith(expected)
    assert "Connected to" in found
    assert "shared[0][0], shared[1][0]" in found
    assert "Multiply" in found
    assert found.splitlines()[-1].split()[0] == "last"


def test_summary_of_a_list_is_that_of_sequential():
    model, other = pipeline(with_input), plain(with_input)
    expected = printed(other).replace(other.name, model.name)
    assert printed(model).startswith(expected.rstrip())


# ------------------------------------------------------------------ copies
def test_copy_of_a_layer_listed_twice_is_listed_twice():
    """Two layers of one name were made of it."""
    shared = kl.Dense(4, name="shared")
    model = tfgpipe.GPipe([keras.Input((4,)), shared, kl.ReLU(), shared], 3)
    for copy in (
        keras.models.clone_model(model),
        keras.models.model_from_json(model.to_json()),
        tfgpipe.GPipe.from_config(model.get_config()),
    ):
        assert copy.sequence[0] is copy.sequence[2]
        assert copy.layers[0] is not shared
        assert len(copy.weights) == 2
        copy.set_weights(model.get_weights())
        x = np.ones((2, 4))
        assert_close(copy(x).numpy(), model(x).numpy(), 1e-6)
