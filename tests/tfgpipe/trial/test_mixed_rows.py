"""A layer that mixes the rows of a batch is warned of, by its name."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers as kl

import tfgpipe


def warned(layers, num_micro_batches=2, num_partitions=2):
    """The warnings of a training step and of an inference."""
    model = tfgpipe.GPipe(layers, num_partitions, num_micro_batches)
    model.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.train_on_batch(np.ones((6, 5)), np.ones((6, 2)))
    return [str(w.message) for w in found if "mixes" in str(w.message)]


def test_functional_operations_are_named_too():
    x = keras.Input((5,))
    h = kl.Dense(3)(x)
    h = h - keras.ops.mean(h, axis=0, keepdims=True)
    (message,) = warned(keras.Model(x, kl.Dense(2)(h)))
    assert message.startswith("Operation 'mean")


def test_equalised_images_are_those_of_a_micro_batch():
    """Keras takes one histogram for a batch."""
    layers = [kl.Reshape((5, 1, 1)), kl.Equalization(), kl.Flatten()]
    (message,) = warned([keras.Input((5,)), *layers, kl.Dense(2)])
    assert "Layer 'equalization" in message


def test_number_of_rows_in_outputs_is_warned_of():
    def share(x):
        return x / keras.ops.cast(keras.ops.shape(x)[0], x.dtype)

    def zeros(x):  # the number of rows is a size, and no number
        return x + keras.ops.zeros((keras.ops.shape(x)[0], 1))

    layers = [kl.Lambda(share, name="share"), kl.Lambda(zeros), kl.Dense(2)]
    model = tfgpipe.GPipe([keras.Input((5,)), *layers], 2, 2)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="with their number") as found:
        model.fit(np.ones((3, 5)), np.ones((3, 2)), batch_size=2, verbose=0)
    (message,) = {str(w.message) for w in found}
    assert message.startswith("Layer 'share' mixes the rows of a batch, or")
    assert "pass num_micro_batches=1" in message
