"""Keys of layers: equal in every program, for equal layers."""

import subprocess
import sys
from unittest import mock

import keras
import pytest
from keras import layers as kl

from tfgpipe.costs import Placed
from tfgpipe.sequence import source_of, steps


def layer_key(layer, shape=(None, 4)):
    with mock.patch.object(steps, "SHARE", 1.0):  # it is not gone into
        (key,) = Placed(source_of([layer]), keras.KerasTensor(shape)).keys
    return key


def nested(units):
    return keras.Sequential([keras.Input((4,)), kl.Dense(units), kl.ReLU()])


def functional(is_turned):
    x = keras.Input((4,))
    a, b = kl.ReLU(), kl.Softmax()
    outputs = [a(x), b(x)]
    return keras.Model(x, outputs[::-1] if is_turned else outputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: kl.Dense(3),
        lambda: kl.Dropout(0.5),
        lambda: nested(3),
        lambda: functional(False),
    ],
    ids=["layer", "seed", "list", "graph"],
)
def test_names_do_not_count(make):
    assert layer_key(make()) == layer_key(make())


def test_what_layers_compute_counts():
    others = [
        layer_key(kl.Dense(3)),
        layer_key(kl.Dense(4)),
        layer_key(kl.Dense(3), (None, 5)),
        layer_key(kl.Dense(3, "relu")),
        layer_key(kl.Dense(3, trainable=False)),
        layer_key(kl.ReLU()),
        layer_key(nested(4)),
        layer_key(functional(False)),
        layer_key(functional(True)),
    ]
    assert len({*others}) == len(others)
    assert layer_key(nested(3)) == layer_key(kl.Dense(3, "relu"))


_PROGRAM = """
import keras
from tfgpipe.costs import Placed
from tfgpipe.sequence import source_of
kl = keras.layers
x = keras.Input((5,), dtype="int32")
h = kl.Embedding(9, 4)(x)
h = kl.MultiHeadAttention(2, 3)(h, h)
model = keras.Model(x, kl.LSTM(3)(kl.Dropout(0.1)(h)))
found = Placed(source_of(model), model.input).keys
"""


@pytest.mark.slow
def test_keys_are_those_of_another_process():
    names: dict = {}
    exec(_PROGRAM, names)
    run = [sys.executable, "-c", f"{_PROGRAM}\nprint(*found)"]
    other = subprocess.run(run, capture_output=True, check=True, text=True)
    assert other.stdout.split()[-len(names["found"]) :] == names["found"]
