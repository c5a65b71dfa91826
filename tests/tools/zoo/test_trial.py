"""What the zoo says of a model that it trains."""

import keras
import numpy as np
import pytest
from keras import layers as kl

from tools.zoo import table, trial
from tools.zoo.sample import ROWS, Sample

pytestmark = pytest.mark.usefixtures("float64")


def small():
    x = h = keras.Input((3,))
    for _ in range(4):
        h = kl.Add()([h, kl.Dense(3, "tanh")(h)])
    return keras.Model(x, kl.Dense(2)(h))


def fails():
    raise ValueError("no such\x1b[1m weights")


def data():
    return np.random.default_rng(0).standard_normal((ROWS, 3))


@pytest.fixture
def row(monkeypatch):
    def of(make, **kwargs):
        sample = Sample(make, data, **kwargs)
        monkeypatch.setitem(trial.SAMPLES, "small", sample)
        return trial.compare("small")

    return of


def test_model_is_compared_with_keras(row):
    found = row(small)
    assert found.problem == ""
    assert found.num_micro_batches == 4
    assert max(found.loss, found.weights, found.outputs) < 1e-12
    assert found.is_bit_identical
    assert found.keras is None
    assert found.num_steps == 9
    assert found.kilobytes == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_difference_from_keras_is_seen(row):
    """Batch norm of micro-batches of one row is not that of Keras."""

    def normalized():
        x = keras.Input((3,))
        h = x
        for _ in range(3):
            h = kl.BatchNormalization()(kl.Dense(3)(h))
        return keras.Model(x, kl.Dense(2)(h))

    found = row(normalized)
    assert found.weights > 0.01
    assert found.keras < 1e-6
    assert row(normalized, is_whole=True).weights < 1e-6


def test_model_that_fails_is_a_row_with_the_reason(row):
    found = row(fails)
    assert found.problem == "plain Keras: ValueError: no such weights"
    page = table.page([found], [], [])
    assert "Of 1 models 0 train" in page
    assert "| fails, see below | small |" in page
    assert f"* small: {found.problem}\n" in page
