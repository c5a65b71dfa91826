"""Examples, tokens and FLOPs a second; a step of `fit` with a clock."""

import keras
import pytest
import tensorflow as tf
from functional import unet
from tiny import compiled, data, pipeline

import tfgpipe
from tfgpipe import internals
from tfgpipe.monitor import (
    Rates,
    TimedStep,
    accelerator_mib,
    flops_of_example,
    measurements,
    tokens_of_example,
)


class Clock:
    """A time that the test sets."""

    now = 5.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measurements, "time", clock)
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
    assert flops_of_example(model, tf.TensorSpec((None, None))) is None
    spec = keras.KerasTensor((None, 7), "int32")
    assert flops_of_example(model, spec) >= 7 * 2 * 2 * 2


# ----------------------------------------------------------------- timed steps
def iterator(rows, batch=4):
    return iter(tf.data.Dataset.from_tensor_slices(data(rows)).batch(batch))


def test_step_takes_the_place_of_one_call_and_measures_when_it_is_warm():
    model = compiled(pipeline())
    model.make_train_function()
    own = model.train_function
    step = TimedStep(model)
    assert model.train_function is own
    batches = iterator(12)
    for call in range(3):
        step.install()
        assert model.train_function is step
        logs = model.train_function(batches)
        assert model.train_function is own
        assert set(logs) == {"loss"}
        assert (step.measured is None) == (call == 0)  # which has traced
    assert model.optimizer.iterations == 3
    assert step.measured.num_rows == 4
    spec = step.measured.input_spec
    assert isinstance(spec, keras.KerasTensor) and spec.shape == (None, 4)
    assert min(event.start for event in step.measured.events) == 0


# ---------------------------------------------------------- memory of devices


def test_accelerators_that_count_are_told(monkeypatch):
    def info(device):
        if device == "TPU:0":
            raise ValueError("not counted")
        return {"current": 2**20 * int(device[-1]), "peak": 2**22}

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    devices = [
        "/job:localhost/replica:0/task:0/device:GPU:3",
        "/device:GPU:3",
        "/device:TPU:0",
    ]
    used = {"GPU:3_current": 3.0, "GPU:3_peak": 4.0}
    assert accelerator_mib(devices) == used


def test_memory_of_this_computer_is_known():
    assert 2**28 < measurements.host_bytes() < 2**50
