"""What replicas exchange: as counted, and as TensorFlow sends it."""

import math

import numpy as np
import pytest
from crossing import sent_tensors
from keras import layers as kl
from replicated import replicas

from tools.bench import exchange


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
    variables = {tuple(v.shape) for v in model.trainable_variables}
    found = sum(
        4 * math.prod(shape)
        for start, end, shape, _ in sent
        if shape in variables and {start, end} in pairs(columns)
    )
    # weights to two other replicas, and gradients from them
    total = sum(4 * math.prod(v.shape) for v in model.trainable_variables)
    counted = exchange.exchanged_bytes(model)
    assert len(counted) == 6
    assert sum(counted.values()) == found == 2 * 2 * total


def pairs(columns):
    return [{a, b} for column in columns for a in column for b in column]


def test_one_replica_exchanges_nothing():
    model = replicas([kl.Dense(3), kl.Dense(2)], 1, 2)
    model.build((None, 4))
    assert set(exchange.exchanged_bytes(model).values()) == {0}
