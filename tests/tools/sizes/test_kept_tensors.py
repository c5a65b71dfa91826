"""What layers keep for their backward passes, counted by hand."""

import doctest

import keras
import pytest
from keras import layers as kl

from tools.sizes import kept_tensors
from tools.sizes.kept_tensors import kept_bytes, spec_bytes

ROWS = 2


def spec(*shape, dtype="float32"):
    return keras.KerasTensor((ROWS, *shape), dtype)


@pytest.mark.parametrize(
    ("layer", "inputs", "expected"),
    [
        (kl.Dense(4), spec(3), 4 * ROWS * 3),  # its input, for the kernel
        (kl.Dense(4, "relu"), spec(3), 4 * ROWS * (3 + 4)),
        (kl.Embedding(9, 4), spec(5, dtype="int32"), 4 * ROWS * 5),
        (kl.Identity(), spec(3), 0),
        (kl.Flatten(), spec(3, 4), 0),
        (kl.Reshape((12,)), spec(3, 4), 0),
        (kl.ReLU(), spec(3), 4 * ROWS * 3),
        (kl.Conv2D(4, 3, use_bias=False), spec(5, 5, 2), 4 * ROWS * 50),
    ],
)
def test_layer_keeps_what_its_gradient_reads(layer, inputs, expected):
    layer.build(inputs.shape)
    assert kept_bytes(layer, inputs) == expected


def test_frozen_layer_keeps_nothing_for_its_weights():
    layer = kl.Dense(4)
    layer.build((ROWS, 3))
    layer.trainable = False
    assert kept_bytes(layer, spec(3)) == 0


def test_weights_need_no_values():
    with keras.StatelessScope(initialize_variables=False):
        layer = kl.Dense(100)
        layer.build((ROWS, 30))
        assert kept_bytes(layer, spec(30)) == 4 * ROWS * 30
    from keras.src.backend.common import global_state

    global_state.set_global_attribute("uninitialized_variables", [])


def test_specs_of_a_nest_add_up():
    nest = {"a": spec(3), "b": (spec(5, dtype="int32"), spec(2, dtype="bool"))}
    assert spec_bytes(nest) == ROWS * (3 * 4 + 5 * 4 + 2)


def test_example_in_the_docstring_runs():
    assert doctest.testmod(kept_tensors).failed == 0
