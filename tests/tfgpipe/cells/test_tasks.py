"""What the functions of a cell compute, and what it keeps."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import operations, step_graph
from keras import layers as kl

import tfgpipe


# ----------------------------------------------------- casts of weights
def casts(m, **kwargs):
    """Casts to bfloat16 in a training step: outside of functions, and all."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    layers = [kl.Dense(16, "relu", name=f"dense_{i}") for i in range(4)]
    model = tfgpipe.GPipe(layers, 2, m, **kwargs)
    model.compile("sgd", "mse")
    ones = np.ones((8, 16), "float32")
    graph = step_graph(model, ones, ones)

    def count(operations):
        return [
            op
            for op in operations
            if op.type == "Cast" and op.outputs[0].dtype == tf.bfloat16
        ]

    return len(count(graph.get_operations())), len(count(operations(graph)))


@pytest.mark.parametrize(
    ("schedule", "remat"), [("gpipe", "always"), ("zero_bubble", "never")]
)
def test_weights_are_cast_once_a_mini_batch(schedule, remat):
    found = {m: casts(m, schedule=schedule, remat=remat) for m in (1, 2, 8)}
    assert [outside for outside, _ in found.values()] == [8, 8, 8]
    # In functions, the inputs are cast, once again where they are recomputed,
    # and the gradient of the loss.
    for m, (outside, total) in found.items():
        assert total - outside <= 3 * m
