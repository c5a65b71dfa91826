"""Cells that keep a share alone have the bits of those that keep all."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe


def trained(layers, k, remat, schedule="gpipe", **compiled):
    keras.utils.set_random_seed(0)
    devices = ["CPU:0", "CPU:1", "CPU:2"][:k] if k > 1 else None
    model = tfgpipe.GPipe(
        layers(), k, 3, devices=devices, remat=remat, schedule=schedule
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", **compiled)
    rng = np.random.default_rng(0)
    x, y = rng.random((18, 6, 8)), rng.random((18, 2))
    history = model.fit(x, y, 9, epochs=2, shuffle=False, verbose=0).history
    return [history["loss"], *model.get_weights()]


def test_check_compares_cells_that_keep_a_share():
    """Layer by layer, and a loop by itself would need more than the share."""
    layers = [
        keras.Input((3, 8)),
        kl.Dense(64, "gelu"),
        kl.Dense(64, "gelu"),
        kl.GRU(2),
        kl.Dense(2),
    ]
    model = tfgpipe.GPipe(layers, 1, 2, devices=["CPU:0"], remat=0.5)
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).random((8, 3, 8))
    assert tfgpipe.check(model, x, np.ones((8, 2))).is_exact


class Mapped(kl.Layer):
    """Of its loop, which has no gradient, the result alone is kept."""

    def call(self, x):
        scale = tf.map_fn(lambda row: row * 2.0, x)
        return tf.stop_gradient(scale) * keras.ops.gelu(x)


@pytest.mark.parametrize("compiles", [False, True])
def test_results_of_loops_are_kept_and_not_their_lists(compiles):
    def layers():
        return [
            keras.Input((6, 8)),
            kl.Dense(32, "gelu"),
            Mapped(),
            kl.Dense(16, "gelu"),
            kl.Flatten(),
            kl.Dense(2),
        ]

    expected = trained(layers, 1, "never", jit_compile=compiles)
    found = trained(layers, 1, 0.6, jit_compile=compiles)
    tolerance = (1e-5, 1e-6) if compiles else (0, 0)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, *tolerance)


def test_share_is_saved(tmp_path):
    layers = [keras.Input((4,)), *(kl.Dense(4, "gelu") for _ in range(3))]
    for remat in (0.4, {0: "never", 1: 0.4}):
        model = tfgpipe.GPipe(layers, 2, remat=remat)
        model.save(tmp_path / "model.keras")
        loaded = tfgpipe.load_model(tmp_path / "model.keras")
        assert loaded.remat == remat
