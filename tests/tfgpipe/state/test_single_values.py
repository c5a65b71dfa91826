"""Batch normalisations that see one value of a channel in a micro-batch."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers as kl

import tfgpipe


def told(shape, rows, batch_size=8, **kwargs):
    """Warnings of a `fit` with four micro-batches."""
    layers = [kl.Dense(4), kl.BatchNormalization(name="norm"), kl.Dense(2)]
    model = tfgpipe.GPipe([keras.Input(shape), *layers], 2, 4, **kwargs)
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(rows, *shape))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, x[..., :2], batch_size=batch_size, epochs=2, verbose=0)
    return [w for w in caught if "of one row" in str(w.message)]


@pytest.mark.parametrize("rows", [8 + 2, 8 + 7])
def test_fit_warns_once_of_few_rows_at_the_end_of_an_epoch(rows):
    (warning,) = told((4,), rows)
    assert "Layers ['norm']" in str(warning.message)
    assert f"in a mini-batch of {rows - 8} rows" in str(warning.message)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((4,), 16),  # two rows of each micro-batch
        ((4,), 8 + 1),  # as in plain Keras
        ((3, 4), 8 + 2),  # three values of a row
    ],
)
def test_enough_values_are_no_reason_to_warn(shape, rows):
    assert not told(shape, rows)
