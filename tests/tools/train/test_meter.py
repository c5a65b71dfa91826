"""What was trained on and how fast, from the sums in a model's metrics."""

import keras
import pytest

from tools.train import meter
from tools.train.meter import Meter


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class Model:
    """Only metrics, as Keras keeps them: some inside another one."""

    def __init__(self):
        self.loss = keras.metrics.Mean(name="loss")
        self.nll = keras.metrics.SparseCategoricalCrossentropy(name="nll")
        self.auc = keras.metrics.AUC(name="auc")
        self.compiled = keras.metrics.Sum(name="compiled")
        self.compiled.metrics = [self.nll, self.auc]
        self.metrics = [self.loss, self.compiled]

    def step(self, loss, rows=4, tokens=None):
        self.loss.update_state(loss, sample_weight=rows)
        if tokens:
            self.nll.total.assign_add(2.0 * tokens)
            self.nll.count.assign_add(tokens)

    def reset(self):
        for metric in (self.loss, self.nll):
            metric.reset_state()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(meter, "time", clock)
    return clock


def test_means_are_of_the_examples_since_the_last_reading():
    model = Model()
    read = Meter(model, 0)
    model.step(1.0, rows=2)
    model.step(4.0, rows=1)
    read.update()
    assert read.read().means == {"loss": pytest.approx(2.0)}
    model.step(5.0, rows=3)
    read.update()
    assert read.read().means == {"loss": pytest.approx(5.0)}
    assert read.read().means == {}


def test_metrics_that_begin_again_are_added_to_what_was_before():
    model = Model()
    read = Meter(model, 0)
    model.step(1.0)
    read.update()
    model.reset()
    read.metrics_were_reset()
    model.step(3.0)
    read.update()
    assert read.read().means == {"loss": pytest.approx(2.0)}


def test_rate_is_without_the_first_step_and_what_is_left_out(clock):
    model = Model()
    read = Meter(model, None)
    model.step(1.0, tokens=100)
    clock.now += 60  # tracing
    assert not read.is_running
    read.update()
    assert read.is_running
    assert read.read().rates == {}
    model.step(1.0, rows=4, tokens=30)
    clock.now += 2
    read.update()
    clock.now += 500  # a test of the model
    read.restart()
    model.step(1.0, rows=2, tokens=20)
    clock.now += 3
    read.update()
    assert read.read().rates == {
        "examples_per_second": pytest.approx(6 / 5),
        "tokens_per_second": pytest.approx(50 / 5),
    }
    assert read.read().rates == {}


@pytest.mark.parametrize(("length", "expected"), [(0, None), (16, 32.0)])
def test_tokens_are_counted_by_examples_of_one_length(clock, length, expected):
    model = Model()
    read = Meter(model, length)
    read.update()
    model.step(1.0, rows=4, tokens=3)
    clock.now += 2
    read.update()
    assert read.read().rates.get("tokens_per_second") == expected
