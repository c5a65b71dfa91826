"""Devices may be named, or be those that TensorFlow lists."""

import keras
import pytest
import tensorflow as tf
from crossing import short
from tiny import layers

import tfgpipe
from tfgpipe.devices import names


def listed(*indices):
    devices = tf.config.list_logical_devices("CPU")
    return [devices[i] for i in indices]


def test_model_takes_what_tensorflow_lists():
    model = tfgpipe.GPipe(layers(), devices=listed(3, 1))
    named = tfgpipe.GPipe(layers(), devices=["CPU:3", "CPU:1"])
    found = [short(cell.device) for cell in model.cells()]
    assert found == ["/device:CPU:3", "/device:CPU:1"]
    assert found == [short(cell.device) for cell in named.cells()]


def test_strategy_takes_what_tensorflow_lists():
    strategy = tfgpipe.PipelineStrategy(2, 1, listed(2, 0))
    assert [[short(d) for d in own] for own in strategy.devices] == [
        ["/device:CPU:2"],
        ["/device:CPU:0"],
    ]


def test_names_and_devices_may_be_mixed():
    model = tfgpipe.GPipe(layers(), devices=["CPU:2", *listed(0)])
    assert model.get_config()["devices"] == ["CPU:2", listed(0)[0].name]


def test_devices_are_saved_by_name(tmp_path):
    model = tfgpipe.GPipe(layers(), devices=listed(3, 1))
    names = [device.name for device in listed(3, 1)]
    assert model.get_config()["devices"] == names
    assert all(type(name) is str for name in model.get_config()["devices"])
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert loaded.get_config()["devices"] == names
    other = tfgpipe.load_model(path, devices=listed(2, 4))
    assert [short(cell.device) for cell in other.cells()] == [
        "/device:CPU:2",
        "/device:CPU:4",
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda devices: tfgpipe.GPipe(layers(), devices=devices),
        lambda devices: tfgpipe.PipelineStrategy(1, 2, devices),
    ],
)
def test_device_that_comes_twice_is_refused_however_it_is_given(make):
    with pytest.raises(ValueError, match="must be different from each other"):
        make(["CPU:1", *listed(1)])


def test_physical_devices_are_refused():
    devices = tf.config.list_physical_devices("CPU")
    with pytest.raises(ValueError, match="must be devices that TensorFlow"):
        tfgpipe.GPipe(layers(), devices=devices)


@pytest.mark.parametrize(
    ("listed", "physical", "is_built", "visible", "expected"),
    [
        ({"CPU": 1}, 0, True, None, "has not found their driver"),
        ({"CPU": 1}, 0, True, "", "CUDA_VISIBLE_DEVICES='' may hide others"),
        ({"CPU": 1}, 0, False, "", "This build of TensorFlow knows no GPUs"),
        ({"CPU": 1}, 2, True, None, "There are 2 GPUs, of which"),
        ({"GPU": 1, "CPU": 1}, 1, True, "3", "CUDA_VISIBLE_DEVICES='3' may"),
        ({"GPU": 1, "CPU": 1}, 1, True, None, None),
        ({"GPU": 2, "CPU": 1}, 4, True, "0,1", None),
        ({"TPU": 1, "CPU": 1}, 0, True, None, None),
    ],
)
def test_reason_for_few_devices_is_told(
    listed, physical, is_built, visible, expected, monkeypatch
):
    def list_logical(kind):
        return [None] * listed.get(kind, 0)

    monkeypatch.setattr(tf.config, "list_logical_devices", list_logical)
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: [None] * physical
    )
    monkeypatch.setattr(tf.test, "is_built_with_gpu_support", lambda: is_built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    counts, _, reason = names.why_no_more().partition(". ")
    seen = [f"{listed.get(kind, 0)} {kind}" for kind in ("TPU", "GPU", "CPU")]
    assert all(count in counts for count in seen)
    assert expected in reason if expected else not reason
