"""Lists of layers that are, and are not, the chain of a model."""

import keras
import numpy as np
import pytest
from keras import layers as kl

import tfgpipe


def functional(make, inputs=1):
    inputs = [keras.Input((4,)) for _ in range(inputs)]
    return keras.Model(inputs, make(*inputs))


def dense(name=None):
    return kl.Dense(4, name=name)


def operation_between(x):
    h = dense("a")(x)
    return dense("b")(h + 1.0)


def residual(x):
    return dense("b")(dense("a")(x) + x)


def operation_at_the_end(x):
    h = dense("a")(x)
    return dense("b")(h) * 2.0


def operation_at_the_start(x):
    return dense("b")(dense("a")(x * 2.0))


def merged(x):
    h = dense("a")(x)
    return kl.Add(name="b")([h, x])


def fork(x):
    return [dense("a")(x), dense("b")(x)]


def twice(x):
    a = dense("a")
    return dense("b")(a(a(x)))


def twice_at_the_end(x):
    a = dense("b")
    return a(a(x))


@pytest.mark.parametrize(
    "make",
    [
        operation_between,
        residual,
        operation_at_the_end,
        operation_at_the_start,
        merged,
        fork,
        twice,
        twice_at_the_end,
    ],
)
def test_graph_that_is_no_chain_is_refused(make):
    """Operations would be dropped without a word, branches called in turn."""
    with pytest.raises(ValueError, match="must be a chain") as error:
        tfgpipe.GPipe(functional(make).layers, 1)
    assert "'b' at" in str(error.value) or "'a' at" in str(error.value)
    assert "Pass the functional model itself" in str(error.value)


@pytest.mark.parametrize("of", [lambda m: m, lambda m: m.layers])
def test_masks_that_keras_hands_on_belong_to_a_chain(of):
    """Keras notes them as further inputs of the recurrent layers."""
    tokens = keras.Input((6,), dtype="int32")
    embedding = kl.Embedding(5, 4, mask_zero=True)
    rest = [kl.LSTM(4, return_sequences=True), kl.Masking(), kl.GRU(3)]
    model = keras.Sequential([tokens, embedding, *rest])
    x = np.arange(12).reshape(2, 6) % 4
    found = tfgpipe.GPipe(of(model), 2)
    np.testing.assert_allclose(found(x), model(x), 1e-6)


def test_mask_that_a_user_hands_on_is_another_input():
    x = keras.Input((4, 3))
    mask = x[..., 0] > 0
    layers = keras.Model(x, kl.GRU(3)(kl.Dense(3)(x), mask=mask)).layers
    with pytest.raises(ValueError, match="must be a chain"):
        tfgpipe.GPipe([la for la in layers if la.name[0] in "dg"], 1)


def test_layer_that_is_called_twice_may_be_listed_twice():
    model = functional(twice)
    _, a, b = model.layers
    x = np.ones((2, 4), "float32")
    found = tfgpipe.GPipe([keras.Input((4,)), a, a, b], 2)
    np.testing.assert_allclose(found(x), model([x]), 1e-6)


def chain():
    return keras.Sequential([keras.Input((4,)), *(dense() for _ in range(4))])


def shuffled_before():
    layers = [dense() for _ in range(4)]
    tfgpipe.GPipe([keras.Input((4,)), *layers], 2)
    return layers[::-1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: chain().layers,
        lambda: [keras.Input((4,)), *chain().layers],
        lambda: chain().layers[:2],
        lambda: chain().layers[2:],
        lambda: [keras.Input((4,)), *chain().layers[2:]],
        lambda: [*chain().layers[:-1], dense()],
        lambda: [dense(), *chain().layers[1:]],
        lambda: [*chain().layers[:1], dense(), *chain().layers[2:]],
        lambda: [*chain().layers, *chain().layers],
        lambda: chain().layers[::2],
        lambda: [chain(), functional(residual), dense()],
        lambda: functional(lambda x: dense()(dense()(x))).layers,
        shuffled_before,
    ],
)
def test_chain_is_taken(make):
    x = np.ones((2, 4), "float32")
    layers = make()
    expected = x
    for layer in layers:
        if isinstance(layer, kl.Layer) and not isinstance(layer, kl.InputLayer):
            expected = layer(expected)
    found = tfgpipe.GPipe(layers, 2).predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, 1e-5, 1e-6)
