"""Keys of layers: equal in every program, for equal layers."""

import keras
import pytest
from keras import layers as kl

from tfgpipe import costs
from tfgpipe.cells import LayerCall


def layer_key(layer):
    return costs.layer_key(LayerCall(layer))


def built(layer, shape=(None, 4)):
    layer.build(shape)
    return layer


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
        lambda: built(kl.Dense(3)),
        lambda: nested(3),
        lambda: functional(False),
    ],
    ids=["layer", "list", "graph"],
)
def test_names_do_not_count(make):
    assert layer_key(make()) == layer_key(make())


def test_what_layers_compute_counts():
    frozen = built(kl.Dense(3))
    frozen.trainable = False
    others = [
        built(kl.Dense(3)),
        built(kl.Dense(4)),
        built(kl.Dense(3), (None, 5)),
        built(kl.Dense(3, "relu")),
        frozen,
        kl.ReLU(),
        nested(3),
        nested(4),
        functional(False),
        functional(True),
    ]
    assert len({layer_key(layer) for layer in others}) == len(others)


def test_layer_without_a_configuration_has_a_key():
    class Own(kl.Layer):
        def get_config(self):
            raise NotImplementedError

    assert layer_key(Own()) == layer_key(Own())
    assert layer_key(Own()).startswith("Own ")
