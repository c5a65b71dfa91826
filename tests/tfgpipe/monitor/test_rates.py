"""Examples, tokens and FLOPs a second."""

import keras
import pytest
import tensorflow as tf
from functional import unet

import tfgpipe
from tfgpipe import internals
from tfgpipe.monitor import Rates, flops_of_example, rates, tokens_of_example


class Clock:
    """A time that the test sets."""

    now = 5.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rates, "time", clock)
    return clock


@pytest.fixture
def model():
    model = tfgpipe.GPipe([keras.Input((2,)), keras.layers.Dense(1)], 1)
    model.compile("sgd", "mse")
    return model


def train(model, rows):
    internals.loss_tracker(model).update_state(0.5, sample_weight=rows)


def test_rate_is_that_of_the_steps_that_are_counted(model, clock):
    found = Rates(model)
    for rows, seconds, is_counted in ((4, 2.0, 1), (6, 9.0, 0), (2, 1.0, 1)):
        found.start()
        train(model, rows)
        clock.now += seconds
        if is_counted:
            found.stop()
            found.stop()  # adds nothing
    assert (found.examples, found.seconds) == (6, 3.0)
    assert found.examples_per_second == 2
    found.clear()
    assert found.examples_per_second is None


def test_rate_is_not_known_where_metrics_were_reset(model, clock):
    found = Rates(model)
    train(model, 8)
    found.start()
    model.reset_metrics()
    train(model, 4)
    clock.now += 1.0
    found.stop()
    assert found.examples_per_second is None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (keras.KerasTensor((None, 28, 28, 1), "float32"), 0),
        (keras.KerasTensor((None, 7), "float32"), 0),
        (keras.KerasTensor((None, 128), "int32"), 128),
        ((keras.KerasTensor((None, None), "int32"),) * 2, None),
        ((keras.KerasTensor((None, 64), "int32"),) * 2, 64),
    ],
)
def test_length_of_an_example_is_that_of_its_token_ids(spec, expected):
    assert tokens_of_example(spec) == expected


def test_flops_of_an_example_are_those_of_its_layers():
    model = tfgpipe.GPipe(unet(), 2, devices=["CPU:0", "CPU:1"])
    spec = keras.KerasTensor((None, 8, 8, 2))
    total = sum(cell.cost for cell in model.cells())
    assert flops_of_example(model, spec) == total > 0


def test_flops_of_examples_of_many_lengths_are_not_known():
    layers = [keras.Input((None,), dtype="int32"), keras.layers.Embedding(5, 2)]
    model = tfgpipe.GPipe([*layers, keras.layers.Dense(2)], 1)
    with pytest.warns(UserWarning, match="leaves out.*`flops_of_example`"):
        assert flops_of_example(model, tf.TensorSpec((None, None))) is None
    spec = keras.KerasTensor((None, 7), "int32")
    assert flops_of_example(model, spec) >= 7 * 2 * 2 * 2
