"""Devices may be named, or be those that TensorFlow lists."""

import keras
import pytest
import tensorflow as tf
from crossing import short
from tiny import layers

import tfgpipe


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
    for one in (listed(1)[0], *tf.config.list_physical_devices("CPU")):
        with pytest.raises(ValueError, match="must be different devices that"):
            make(["CPU:1", one])
