"""What XLA cannot hand from function to function is refused, with a cure."""

import keras
import numpy as np
import pytest
from beside_keras import assert_close, normal, pipeline, trained
from keras import layers as kl
from sharing_layers import Choice

import tfgpipe

KEEPING = {
    "loop": lambda: kl.LSTM(4, name="keeps"),
    "condition": lambda: Choice(name="keeps"),
}


@pytest.mark.parametrize("kind", KEEPING)
def test_what_loops_and_conditions_keep_is_refused(kind):
    layers = [kl.Dense(4), KEEPING[kind](), kl.Dense(1)]
    model = tfgpipe.GPipe([keras.Input((3, 4)), *layers], 2, 2, remat="never")
    model.compile("sgd", "mse", jit_compile=True)
    cure = r"\['keeps'\].*remat=\"always\""
    with pytest.raises(ValueError, match=cure):
        model.train_on_batch(np.ones((7, 3, 4)), np.ones((7, 1)))


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_condition_that_is_computed_again_is_that_of_keras():
    """Mini-batches of 4 and 3 rows, neither of which three divide."""

    def layers():
        return [kl.Dense(4), Choice(), kl.Dense(1)]

    data = normal(4), normal(1)
    expected = trained(layers, keras.Sequential, *data, jit_compile=True)
    model = pipeline(2, 3, remat="always")
    assert_close(trained(layers, model, *data, jit_compile=True), expected)
