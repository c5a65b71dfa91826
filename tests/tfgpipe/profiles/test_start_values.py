"""Values of variables, with and without storage."""

import keras
import numpy as np

from tfgpipe import internals
from tfgpipe.profiles.lone_layer import start_values


def test_values_are_those_that_layers_would_get():
    with internals.deferred_variables():
        layer = keras.layers.Dense(3)
        layer.build((None, 4))
    created = keras.Variable([1.0, 2.0])
    kernel, bias, own = start_values([layer.kernel, layer.bias, created])
    assert not internals.is_created(layer.kernel)
    internals.create_variable(layer.kernel)
    np.testing.assert_array_equal(kernel, layer.kernel.numpy())
    assert bias.shape == (3,) and not bias.numpy().any()
    np.testing.assert_array_equal(own, [1.0, 2.0])


def test_seeds_of_initialisers_stay():
    seed = keras.random.SeedGenerator(3)
    initializer = keras.initializers.RandomNormal(seed=seed)
    with internals.deferred_variables():
        variable = keras.Variable(initializer, (2,))
    before = seed.state.numpy()
    first, second = start_values([variable]), start_values([variable])
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(seed.state.numpy(), before)
