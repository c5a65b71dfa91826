"""How much memory devices use, where they tell."""

import tensorflow as tf

from tools.device_memory import memory_mib


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
