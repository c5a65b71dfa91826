"""Layers that wait inside TensorFlow."""

import time

import numpy as np
import pytest

import tfgpipe
from tools.bench.sleeping_layers import Sleeping


def test_sleeping_layers_wait_and_return_what_they_get():
    layers = [Sleeping(0.02, [3, 2], is_first=i == 0) for i in range(2)]
    model = tfgpipe.GPipe(
        layers, 2, 3, devices=["CPU:0", "CPU:1"], layers_per_cell=[1, 1]
    )
    model.compile("sgd", "mse")
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    with pytest.warns(UserWarning, match="DatasetToSingleElement"):
        outputs = model.predict(x, verbose=0)
    np.testing.assert_array_equal(outputs, x)
    model.train_on_batch(x, x)
    start = time.perf_counter()
    assert model.train_on_batch(x, x) == 0
    # as above: 4 * 3 - 1 tasks, and 3
    assert time.perf_counter() - start >= 14 * 0.02
