"""How much memory devices use, where they tell."""

import tensorflow as tf

from tfgpipe.monitor import device_memory, measurements
from tfgpipe.monitor.device_memory import memory_mib


def test_logical_devices_of_a_cpu_share_the_memory_of_the_process():
    found = memory_mib(["/device:CPU:0", "/device:CPU:1"])
    assert set(found) == {"process_current", "process_peak"}
    assert 10 < found["process_current"] <= found["process_peak"] + 1


def test_accelerators_are_asked_one_by_one(monkeypatch):
    def info(device):
        if device == "TPU:0":
            raise ValueError("not counted")
        return {"current": 2**20 * int(device[-1]), "peak": 2**22}

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    devices = [
        "/job:localhost/replica:0/task:0/device:GPU:3",
        "/device:GPU:2",
        "/device:TPU:0",
    ]
    assert memory_mib(devices) == {
        "GPU:3_current": 3.0,
        "GPU:3_peak": 4.0,
        "GPU:2_current": 2.0,
        "GPU:2_peak": 4.0,
    }


def test_memory_of_workers_is_what_they_report(monkeypatch):
    """Never that of this process, or of its own accelerators."""
    monkeypatch.setattr(device_memory, "_reported", {})
    monkeypatch.setattr(
        tf.config.experimental, "get_memory_info", lambda device: {"peak": 1}
    )
    names = [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in (0, 1)]
    gpu = "/job:worker/replica:0/task:1/device:GPU:0"
    assert memory_mib([*names, gpu]) == {}
    task = "/job:worker/replica:0/task:1"
    device_memory.report(task, {"process_peak": 7.0})
    assert memory_mib([*names, gpu]) == {"worker_1/process_peak": 7.0}
    # the controller of a cluster has a part in it
    monkeypatch.setattr(measurements, "_own_device", lambda: names[0])
    found = memory_mib([*names, gpu])
    assert set(found) == {
        "process_current",
        "process_peak",
        "worker_1/process_peak",
    }


def test_memory_of_this_computer_is_more_than_the_process_has():
    used = device_memory.process_mib()["process_current"] * 2**20
    assert used < device_memory.host_bytes() < 2**50
