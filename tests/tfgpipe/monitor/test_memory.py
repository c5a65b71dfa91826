"""How much memory accelerators use, where they tell."""

import tensorflow as tf

from tfgpipe.monitor import accelerator_mib, rates


def test_only_accelerators_of_this_process_that_count_are_told(monkeypatch):
    def info(device):
        if device == "TPU:0":
            raise ValueError("not counted")
        return {"current": 2**20 * int(device[-1]), "peak": 2**22}

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    worker = "/job:worker/replica:0/task:1"
    devices = [
        "/job:localhost/replica:0/task:0/device:GPU:3",
        "/device:GPU:3",
        "/device:TPU:0",
        "/device:CPU:0",
        f"{worker}/device:GPU:1",
    ]
    expected = {"GPU:3_current": 3.0, "GPU:3_peak": 4.0}
    assert accelerator_mib(devices) == expected
    # a worker counts its own
    monkeypatch.setattr(rates, "_own_device", lambda: f"{worker}/device:CPU:0")
    assert "GPU:1_peak" in accelerator_mib(devices)
