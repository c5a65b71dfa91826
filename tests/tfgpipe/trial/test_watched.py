"""Which variables a call is seen to use."""

import keras
import pytest
from functional import Scale
from keras import layers as kl

from tfgpipe import internals
from tfgpipe.trial.layer_calls import Uses, uses_of

SPEC = keras.KerasTensor((None, 4), "float32")


def uses(operation, *arguments):
    """Those of a call on a tensor and other arguments."""
    return uses_of(operation, [SPEC], lambda ts: ((*ts, *arguments), {}))


def ids(*variables):
    return {id(variable) for variable in variables}


def built(layer):
    layer.build((None, 4))
    return layer


def test_layer_of_keras_uses_its_own_and_assigns_what_is_not_trained():
    dense, norm = built(kl.Dense(4)), built(kl.BatchNormalization())
    assert uses(dense) == Uses(ids(*dense.weights), set())
    statistics = norm.moving_mean, norm.moving_variance
    assert uses(norm) == Uses(ids(*norm.weights), ids(*statistics))


def test_weight_that_a_layer_assigns_to_one_inside_is_seen():
    dense = built(kl.Dense(4))
    norm = built(kl.SpectralNormalization(dense))
    assert id(dense.kernel) in uses(norm).assigned
    assert id(dense.bias) not in uses(norm).assigned


def test_assignment_in_training_or_without_is_seen():
    scale = built(Scale())
    assert uses(scale) == Uses(ids(scale.scale), ids(scale.scale))
    assert scale.scale.numpy() == 1


def test_variables_of_closures_and_arguments_are_seen():
    v = keras.Variable(1.0)
    expected = Uses(ids(v), set())
    assert uses(kl.Lambda(lambda x: x * v)) == expected
    assert uses(kl.Activation(lambda x: x * v)) == expected
    x = keras.Input((4,))
    for other, found in ((v, expected), (2.0, Uses(set(), set()))):
        (call,) = internals.graph_calls(keras.Model(x, x * other))
        assert uses(call.operation, other) == found


class Fails(kl.Layer):
    def call(self, x):
        raise ValueError("not now")


class Keeps(kl.Layer):
    """Leaves a tensor for others."""

    def call(self, x):
        self.last = x
        return x


@pytest.mark.parametrize("layer", [Fails, Keeps])
def test_what_cannot_be_seen_is_not_told(layer):
    assert uses(layer()) is None
