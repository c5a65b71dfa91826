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


def test_devices_may_be_names_or_what_tensorflow_lists():
    for devices in (listed(3, 1), ["CPU:3", "CPU:1"], ["CPU:3", *listed(1)]):
        model = tfgpipe.GPipe(layers(), devices=devices)
        found = [short(cell.device) for cell in model.cells()]
        assert found == ["/device:CPU:3", "/device:CPU:1"]
        strategy = tfgpipe.PipelineStrategy(2, 1, devices)
        assert [short(*own) for own in strategy.devices] == found
    assert model.get_config()["devices"] == ["CPU:3", listed(1)[0].name]


def test_devices_are_saved_by_name(tmp_path):
    model = tfgpipe.GPipe(layers(), devices=listed(3, 1))
    names = [device.name for device in listed(3, 1)]
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    for one in (model, loaded):
        assert one.get_config()["devices"] == names
    assert all(type(name) is str for name in model.get_config()["devices"])
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
def test_devices_that_come_twice_or_are_physical_are_refused(make):
    with pytest.raises(ValueError, match="must be different from each other"):
        make(["CPU:1", *listed(1)])
    with pytest.raises(ValueError, match="must be devices that TensorFlow"):
        make(tf.config.list_physical_devices("CPU"))


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
