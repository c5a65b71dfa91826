"""Examples, tokens and FLOPs a second; a step of `fit` with a clock."""

import keras
import pytest
import tensorflow as tf
from functional import unet
from scalars import read_log
from tiny import compiled

import tfgpipe
from tfgpipe import internals
from tfgpipe.monitor import (
    EventLog,
    Rates,
    accelerator_mib,
    flops_of_example,
    measurements,
    tokens_of_example,
)


def test_rate_is_not_known_where_metrics_were_reset():
    model = compiled(
        tfgpipe.GPipe([keras.Input((2,)), keras.layers.Dense(1)], 1)
    )
    tracker = internals.loss_tracker(model)
    tracker.update_state(0.5, sample_weight=8)
    rates = Rates(model)
    tracker.update_state(0.5, sample_weight=4)
    rates.stop()
    assert rates.examples == 4
    assert rates.examples_per_second == 4 / rates.seconds
    rates.start()
    model.reset_metrics()
    rates.stop()
    assert rates.examples_per_second is None


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


def test_log_is_what_tensorboard_shows(tmp_path):
    log = EventLog(tmp_path / "log")
    log.write(2, {"pipeline/bubble": 0.5, "pipeline/advice": "move it"})
    log.close()
    found = {}
    for path in (tmp_path / "log").iterdir():
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                found[plugin] = tf.make_ndarray(value.tensor)
    assert found == {"scalars": 0.5, "text": b"move it"}
    assert found["scalars"].dtype == "float32"
    assert read_log(tmp_path / "log") == {"pipeline/bubble": [(2, 0.5)]}
