"""What layers keep for their backward passes, counted by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

from tfgpipe.costs import Placed
from tfgpipe.costs.kept_bytes import kept_bytes as of_part
from tfgpipe.sequence import source_of, steps

ROWS = 2


def kept_bytes(layer, inputs):
    (step,) = Placed(source_of([layer]), inputs).steps
    return of_part(step.part)


def spec(*shape, dtype="float32"):
    return keras.KerasTensor((ROWS, *shape), dtype)


@pytest.mark.parametrize(
    ("layer", "inputs", "expected"),
    [
        (kl.Dense(4), spec(3), (3, 0, 0)),  # its input, for the kernel
        (kl.Dense(4, "relu"), spec(3), (3, 4, 0)),
        (kl.Embedding(9, 4), spec(5, dtype="int32"), (0, 0, 5)),
        (kl.Identity(), spec(3), (0, 0, 0)),
        (kl.Flatten(), spec(3, 4), (0, 0, 0)),
        (kl.Reshape((12,)), spec(3, 4), (0, 0, 0)),
        (kl.ReLU(), spec(3), (0, 3, 0)),
        (kl.Conv2D(4, 3, use_bias=False), spec(5, 5, 2), (50, 0, 0)),
        # Of the exponential, what is divided by the sum.
        (kl.Softmax(), spec(3), (0, 3, 0)),
    ],
)
def test_layer_keeps_what_its_gradient_reads(layer, inputs, expected):
    layer.build(inputs.shape)
    found = kept_bytes(layer, inputs)
    assert found[:3] == tuple(4 * ROWS * count for count in expected)


def test_what_cannot_be_differentiated_keeps_all_that_it_makes():
    class Refusing(kl.Layer):
        def call(self, x):
            @tf.custom_gradient
            def refusing(x):
                return tf.exp(x), lambda dy: dy.gone

            return refusing(x)

    found = kept_bytes(Refusing(), spec(3))
    assert found.others >= 4 * ROWS * 3


def test_frozen_layer_keeps_nothing_for_its_weights():
    layer = kl.Dense(4)
    layer.build((ROWS, 3))
    layer.trainable = False
    found = kept_bytes(layer, spec(3))
    assert found[:5] == (0, 0, 0, 0, 0)


def test_weights_need_no_values():
    with keras.StatelessScope(initialize_variables=False):
        layer = kl.Dense(100)
        layer.build((ROWS, 30))
        assert kept_bytes(layer, spec(30))[:3] == (4 * ROWS * 30, 0, 0)
    from keras.src.backend.common import global_state

    global_state.set_global_attribute("uninitialized_variables", [])


def test_random_state_is_left_alone():
    keras.utils.set_random_seed(1)
    kept_bytes(kl.Dropout(0.5), spec(3))
    found = keras.random.uniform((2,))
    keras.utils.set_random_seed(1)
    kl.Dropout(0.5)
    np.testing.assert_array_equal(found, keras.random.uniform((2,)))


@pytest.fixture
def whole(monkeypatch):
    """Layers are not gone into."""
    monkeypatch.setattr(steps, "SHARE", 1.0)


@pytest.mark.usefixtures("whole")
def test_gradients_of_weights_wait_for_those_of_inputs():
    """Of two dense layers: dy, and the gradient between them."""
    layer = keras.Sequential([kl.Dense(5, use_bias=False), kl.Dense(7)])
    layer.build((ROWS, 3))
    found = kept_bytes(layer, spec(3))
    assert found.crossing == 4 * ROWS * (5 + 7)
    # The inputs of both layers.
    assert found.inputs + found.others == 4 * ROWS * (3 + 5)


def test_slices_of_embeddings_are_not_added_up():
    layer = kl.Embedding(9, 4)
    layer.build((ROWS, 5))
    found = kept_bytes(layer, spec(5, dtype="int32"))
    # Values, indices, and the two sizes of the table.
    assert found.sparse == 4 * ROWS * 5 * 4 + 4 * ROWS * 5 + 2 * 4


@pytest.mark.usefixtures("whole")
def test_what_runs_needs_what_lives_at_the_same_time():
    """A wide tensor between two layers, which the backward pass takes."""
    layer = keras.Sequential([kl.Dense(50, use_bias=False), kl.Dense(2)])
    layer.build((ROWS, 3))
    found = kept_bytes(layer, spec(3))
    assert found.forward >= 4 * ROWS * (50 + 2)
    assert found.forward < 4 * ROWS * (50 + 2) * 2
    assert 4 * ROWS * 50 <= found.backward < 4 * ROWS * 50 * 2
