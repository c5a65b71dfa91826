"""What is kept of a training."""

import json

import tensorflow as tf
from scalars import read_log
from simulated import events

from tfgpipe.monitor import EventLog, chrome_trace


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
