"""How much memory devices use, where they tell."""

import tensorflow as tf

from tfgpipe.monitor import accelerator_mib, device_memory, peak_mib


def test_accelerators_of_this_process_that_count_are_told(monkeypatch):
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
        f"{worker}/device:GPU:1",
    ]
    used = {"GPU:3_current": 3.0, "GPU:3_peak": 4.0}
    assert accelerator_mib(devices) == used
    # a worker counts its devices
    monkeypatch.setattr(
        device_memory, "_local_device", lambda: f"{worker}/device:CPU:0"
    )
    assert "GPU:1_peak" in accelerator_mib(devices)


def test_peak_is_that_of_what_runs(monkeypatch):
    held = {"GPU:0": 7, "GPU:1": 9}  # of what ran before

    def run():
        held["GPU:0"], held["GPU:1"] = 3, 4

    monkeypatch.setattr(
        tf.config.experimental,
        "get_memory_info",
        lambda device: {"current": 0, "peak": 2**20 * held[device]},
    )
    monkeypatch.setattr(
        tf.config.experimental,
        "reset_memory_stats",
        lambda device: held.update({device: 0}),
    )
    assert peak_mib(["GPU:0", "CPU:0", "GPU:1"], run) == [3.0, 4.0]


def test_memory_of_this_computer_is_known():
    assert 2**28 < device_memory.host_bytes() < 2**50
