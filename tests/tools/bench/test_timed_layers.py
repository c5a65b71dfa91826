"""Layers that wait in Python."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

import tfgpipe
from tools.bench.timed_layers import Device, Timed


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


def test_timed_layers_return_what_they_get():
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    layer = Timed(Device(), 0.0, is_first=True)
    np.testing.assert_array_equal(layer(x), x)


def test_row_says_whose_device_works():
    timed = [Device(), Device()]
    taken = []
    for index, device in enumerate(timed):
        device.work = lambda seconds, index=index: taken.append(index)
    layer = Timed(timed, 0.001)
    for row in (1.0, 0.0, 1.0):
        layer(tf.constant([[row]]))
    assert taken == [1, 0, 1]
