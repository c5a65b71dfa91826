"""Data of other shapes than the model was built for."""

import re

import keras
import numpy as np
import pytest
from keras import layers as kl

import tfgpipe


def chain(k=2, **kwargs):
    layers = [keras.Input((4, 6)), kl.Dense(4), kl.Dense(4)]
    return tfgpipe.GPipe(layers, k, 2, **kwargs)


def functional():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    h = keras.ops.concatenate([a, b], axis=-1)
    return tfgpipe.GPipe(keras.Model([a, b], kl.Dense(2)(h)), 2, 2)


def refused(call, expected, received):
    words = (
        "`x` must have the shape that the model was built for. Expected: "
        f"{expected}. Received: {received}."
    )
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        call()
    message = str(caught.value)
    assert "before_layer" not in message
    return message


@pytest.mark.parametrize("is_eager", [False, True])
def test_sizes_are_told_beside_what_the_layer_says(is_eager):
    model = chain()
    model.compile("sgd", "mse", run_eagerly=is_eager)
    x, y = np.ones((6, 4, 5), "float32"), np.ones((6, 4, 4), "float32")
    for call in (
        lambda: model.train_on_batch(x, y),
        lambda: model.predict(x, verbose=0),
    ):
        message = refused(call, "(None, 4, 6)", "(6, 4, 5)")
        assert "expected axis -1 of input shape to have value 6" in message
        assert "of cell 0 on /device:CPU:0" in message
        assert "Cell.call()" not in message


def test_other_rank_is_refused():
    model = chain(1)
    x = np.ones((6, 4, 6, 2), "float32")
    refused(lambda: model.predict(x), "(None, 4, 6)", "(6, 4, 6, 2)")


def test_sizes_that_layers_take_are_theirs_as_in_keras():
    """A `keras.Sequential` does not compare sizes."""
    layers = [keras.Input((4, 6)), kl.Dense(3, kernel_initializer="ones")]
    x = np.random.default_rng(0).random((6, 9, 6), "float32")
    model = tfgpipe.GPipe([*layers, kl.GlobalMaxPool1D()], 2, 2)
    plain = keras.Sequential([*layers, kl.GlobalMaxPool1D()])
    found = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, plain.predict(x, verbose=0), 1e-6)


@pytest.mark.parametrize("kind", [list, dict])
def test_input_of_a_functional_model_is_named(kind):
    model = functional()
    model.compile("sgd", "mse")
    x = {"a": np.ones((6, 4)), "b": np.ones((6, 5))}
    if kind is list:
        x = [*x.values()]
    refused(
        lambda: model.predict(x, verbose=0),
        "(None, 4) for the input 'b'",
        "(6, 5)",
    )
