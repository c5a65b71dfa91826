"""What the zoo says of a model that it trains."""

import keras
import numpy as np
import pytest
from keras import layers as kl

from tools.zoo import __main__ as program
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

    with pytest.warns(UserWarning, match="normalises single values"):
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


def test_page_has_what_was_found():
    found = trial.Row(
        "small",
        num_micro_batches=4,
        num_steps=9,
        loss=1.23e-16,
        weights=2e-8,
        outputs=3e-16,
        keras=4e-8,
        is_bit_identical=True,
        balance=1.05,
        kilobytes=[0.5, 1.0, 16.0],
        first_step=1.25,
        step=1.017,
    )
    line = "| more | small 1.02: 2e-08 (Keras 4e-08) |"
    page = table.page([], [], [found])
    assert line in page
    assert "Of 1 models 1 train; 0 of them with weights" in page


@pytest.mark.slow  # starts TensorFlow in a process
def test_model_in_a_process_that_fails_is_a_row():
    found = program._tried("no such model", timeout=100.0)
    assert found.problem.startswith("exit code 1: KeyError: 'no such model'")
