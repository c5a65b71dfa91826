"""What is kept of a training."""

import importlib.util

import pytest
import tensorflow as tf
from simulated import events

from tfgpipe.monitor import EventLog, Record
from tools.train import event_log


def values(folder):
    """What is written, by the plugin of TensorBoard that is to show it."""
    found = {}
    for path in folder.iterdir():
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                found[plugin] = tf.make_ndarray(value.tensor).tolist()
    return found


def test_scalars_are_what_tensorboard_takes_for_scalars(tmp_path):
    log = EventLog(tmp_path)
    log.write(1, {"rate": 0.5})
    log.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    version, event = (
        tf.compat.v1.Event.FromString(record.numpy())
        for record in tf.data.TFRecordDataset(str(path))
    )
    assert version.file_version == "brain.Event:2"
    (value,) = event.summary.value
    assert value.metadata.plugin_data.plugin_name == "scalars"
    assert value.tensor.dtype == tf.float32.as_datatype_enum


def test_record_is_what_tensorboard_shows(tmp_path):
    record = Record(tmp_path / "log", tmp_path / "made" / "pictures")
    record.open()
    record.write(2, {"bubble": 0.5})
    record.write_step(2, events(), "move it")
    record.close()
    png = (tmp_path / "made" / "pictures" / "epoch_0003.png").read_bytes()
    height, width, _ = tf.io.decode_png(png).shape
    assert values(tmp_path / "log" / "pipeline") == {
        "scalars": 0.5,
        "text": b"move it",
        "images": [str(width).encode(), str(height).encode(), png],
    }
    assert event_log.read(tmp_path / "log" / "pipeline") == {
        "pipeline/bubble": [(2, 0.5)]
    }


def test_record_without_folders_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = Record(None, None)
    record.open()
    record.write(0, {"bubble": 0.5})
    record.write_step(0, events(), "move it")
    record.close()
    assert not list(tmp_path.iterdir())


def test_pictures_need_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install matplotlib"):
        Record(None, tmp_path / "pictures")
    assert not list(tmp_path.iterdir())
