"""What is kept of a training."""

import importlib.util
import json

import pytest
import tensorflow as tf
from scalars import read_log
from simulated import events

from tfgpipe.monitor import Record, chrome_trace


def values(folder):
    """What is written, by the plugin of TensorBoard that is to show it."""
    found = {}
    for path in folder.iterdir():
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                found[plugin] = tf.make_ndarray(value.tensor).tolist()
                assert plugin != "scalars" or value.tensor.dtype == 1  # float
    return found


def test_record_is_what_tensorboard_shows(tmp_path):
    record = Record(tmp_path / "log", tmp_path / "made" / "pictures")
    record.open()
    record.write(2, {"bubble": 0.5}, events(), "move it")
    record.close()
    png = (tmp_path / "made" / "pictures" / "epoch_0003.png").read_bytes()
    height, width, _ = tf.io.decode_png(png).shape
    assert values(tmp_path / "log" / "pipeline") == {
        "scalars": 0.5,
        "text": b"move it",
        "images": [str(width).encode(), str(height).encode(), png],
    }
    assert read_log(tmp_path / "log" / "pipeline") == {
        "pipeline/bubble": [(2, 0.5)]
    }


def test_record_without_folders_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = Record(None, None)
    record.open()
    record.write(0, {"bubble": 0.5}, events(), "move it")
    record.close()
    assert not list(tmp_path.iterdir())


def test_pictures_need_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install matplotlib"):
        Record(None, tmp_path / "pictures")
    assert not list(tmp_path.iterdir())


def test_chrome_trace_has_an_event_a_task_on_the_devices_thread():
    tasks = events(updates=True)
    trace = json.loads(json.dumps(chrome_trace(tasks, {"title": "a step"})))
    assert trace["otherData"] == {"title": "a step"}
    boxes = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(boxes) == len(tasks)
    (box,) = (b for b in boxes if b["name"] == "backward 2" and b["tid"] == 1)
    assert (box["ts"], box["dur"]) == (4e6, 2e6)
    assert box["args"] == {"cell": 1, "micro_batch": 2}
    names = [e for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert [e["args"]["name"] for e in names] == ["device 0", "device 1"]
