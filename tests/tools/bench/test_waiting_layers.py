"""Layers that wait, and what replicas exchange."""

import math
import threading
import time

import numpy as np
import pytest
from crossing import sent_tensors
from keras import layers as kl
from replicated import replicas

import tfgpipe
from tools.bench.waiting_layers import Device, Timed


def test_device_does_one_thing_at_a_time():
    device = Device()
    both = [
        threading.Thread(target=device.work, args=(0.01,)) for _ in range(2)
    ]
    start = time.perf_counter()
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert time.perf_counter() - start >= 0.02  # sleep is never too short


class Counter(Device):
    """Counts what it is asked for."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def work(self, seconds):
        self.calls += 1


@pytest.mark.parametrize(
    ("remat", "num_forward"), [("always", 6), ("except_last", 5), ("never", 3)]
)
def test_timed_layers_wait_for_every_task(remat, num_forward):
    counters = [Counter(), Counter()]
    layers = [Timed(d, 0.001, i == 0) for i, d in enumerate(counters)]
    devices = ["CPU:0", "CPU:1"]
    model = tfgpipe.GPipe(layers, 2, 3, devices=devices, remat=remat)
    model.compile("sgd", "mse")
    rows = np.ones((3, 2), np.float32)
    model.train_on_batch(rows, rows)  # tries layers first
    for counter in counters:
        counter.calls = 0
    model.train_on_batch(rows, rows)
    # Besides, one gradient of the inputs and one of the weight.
    assert [d.calls for d in counters] == [num_forward + 2 * 3] * 2


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_bytes_between_replicas_are_those_that_are_sent(schedule):
    """Read from the graphs that TensorFlow runs, one a device."""
    layers = [kl.Dense(width) for width in (9, 7, 8, 6)]
    cells = {"num_partitions": 4} if schedule == "interleaved" else {}
    model = replicas(layers, 3, 2, 2, schedule=schedule, **cells)
    model.compile("sgd", "mse")
    x, y = np.ones((6, 5), "float32"), np.ones((6, 6), "float32")
    sent = sent_tensors(model, x, y)
    columns = [{name[-5:] for name in c.devices} for c in model.cells()]
    pairs = [{a, b} for column in columns for a in column for b in column]
    variables = {tuple(v.shape) for v in model.trainable_variables}
    found = sum(
        4 * math.prod(shape)
        for start, end, shape, _ in sent
        if shape in variables and {start, end} in pairs
    )
    # weights to two other replicas, and gradients from them
    total = sum(4 * math.prod(v.shape) for v in model.trainable_variables)
    assert found == 2 * 2 * total
