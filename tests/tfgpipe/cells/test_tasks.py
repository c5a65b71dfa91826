"""What the functions of a cell compute, and what it keeps."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import operations, step_graph, types
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


def test_cell_computes_once_what_its_layers_compute_alike():
    # Each attention makes the causal mask of its own.
    mask = kl.Lambda(
        lambda x: tf.where(
            tf.range(4)[:, None] >= tf.range(4), tf.ones([4, 4]), x
        )
    )
    model = tfgpipe.GPipe([mask, kl.Dense(4)] * 3, 1, 1)
    model.compile("sgd", "mse")
    graph = step_graph(model, np.ones([4, 4]), np.ones([4, 4]))
    assert types(graph).count("GreaterEqual") == 1
    assert types(graph).count("MatMul") > 3


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_biases_of_convolutions_get_their_own_gradients(schedule):
    """In float32, in which TensorFlow fuses them with those of filters.

    Not those of very small images.
    """
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(8, 8, 8, 4)).astype("float32") for _ in range(2))

    def trained(make):
        keras.utils.set_random_seed(1)
        layers = [kl.Conv2D(4, 3, padding="same") for _ in range(6)]
        model = make([keras.Input((8, 8, 4)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, epochs=2, verbose=0)
        return model.get_weights()

    found = trained(
        lambda layers: tfgpipe.GPipe(layers, 2, 2, schedule=schedule)
    )
    for a, b in zip(found, trained(keras.Sequential), strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-6)
