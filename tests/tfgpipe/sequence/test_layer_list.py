"""Data for a list of layers come as `keras.Sequential` takes them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from beside_keras import ROWS, assert_close, normal, pipeline, trained
from keras import layers as kl
from quick import quick

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")
X, Y = normal(3), normal(2)
GIVEN = {
    "dict": {"rows": X},
    "dict with more": {"other": Y, "rows": X},
    "list": [X],
    "tuple": (X,),
}


def named():
    return [keras.Input((3,), name="rows"), kl.Dense(4, "tanh"), kl.Dense(2)]


# Keras warns of what it takes.
@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
@pytest.mark.parametrize("given", quick(GIVEN, ["dict with more", "list"]))
def test_one_input_by_name_or_in_a_list_is_taken_as_by_keras(given):
    x = GIVEN[given]
    found = trained(named, pipeline(2, 2), x, Y)
    # In older versions of Keras a list of one is none.
    assert_close(found, trained(named, keras.Sequential, X, Y))
    if isinstance(x, dict):
        assert_close(found, trained(named, keras.Sequential, x, Y))


def test_data_by_name_are_taken_of_a_dataset_and_in_a_plain_call():
    dataset = tf.data.Dataset.from_tensor_slices(({"rows": X}, Y)).batch(4)
    model = tfgpipe.GPipe(named(), 2, 2)
    model.compile("sgd", "mse")
    found = model.evaluate(dataset, verbose=0)
    assert found == pytest.approx(model.evaluate(X, Y, 4, verbose=0))
    outputs = model.predict(dataset, verbose=0)
    np.testing.assert_array_equal(model({"rows": X}), model(X))
    np.testing.assert_allclose(outputs, model(X), 1e-12)


def test_name_is_saved(tmp_path):
    path = tmp_path / "model.keras"
    model = tfgpipe.GPipe(named(), 2, 2)
    model.save(path)
    found = tfgpipe.load_model(path).predict({"rows": X}, verbose=0)
    np.testing.assert_array_equal(found, model.predict(X, verbose=0))


@pytest.mark.parametrize(
    ("x", "received"),
    [
        ({"lines": X}, r"\['lines'\]"),
        ([X, X], "2 tensors"),
    ],
)
def test_other_inputs_are_refused(x, received):
    model = tfgpipe.GPipe(named(), 2, 2)
    model.compile("sgd", "mse")
    message = r"the inputs \['rows'\]. Received: "
    with pytest.raises(ValueError, match=message + received):
        model.fit(x, Y, verbose=0)


def test_first_layer_may_take_a_dict_where_no_input_is_declared():
    layers = [kl.Lambda(lambda x: x["a"] + x["b"]), kl.Dense(2)]
    model = tfgpipe.GPipe(layers, 2, 2)
    assert model.predict({"a": X, "b": X}, verbose=0).shape == (ROWS, 2)


class HandsOn(kl.Layer):
    """Says of the mask what is so anyway."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.supports_masking = inner, True

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)

    def compute_mask(self, x, mask=None):
        return self.inner.compute_mask(x, mask)


@pytest.mark.parametrize("kind", [lambda: kl.Dense(3), kl.Masking])
def test_layer_that_hands_its_mask_on_is_taken(kind):
    x = keras.Input((4, 3))
    model = keras.Sequential([x, kl.Masking(), HandsOn(kind()), kl.GRU(3)])
    data = np.random.default_rng(0).standard_normal((5, 4, 3))
    data[:, 2:] = 0
    found = tfgpipe.GPipe(model, 2).predict(data, verbose=0)
    np.testing.assert_allclose(found, model.predict(data, verbose=0), 1e-6)
