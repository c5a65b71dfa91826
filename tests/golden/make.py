"""Writes files as a release writes them, for all later ones to load.

    python tests/golden/make.py tests/golden/VERSION

Run once for a release, by that release, and never again for it.
"""

import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe.callbacks import Checkpoint

ROWS, BATCH = 8, 4


def model(**options):
    """A pipeline of layers with weights, state and a seed."""
    keras.utils.set_random_seed(4)
    layers = [
        keras.Input((3,), name="x"),
        kl.Dense(4, "relu", name="first"),
        kl.BatchNormalization(name="norm"),
        kl.Dropout(0.3, seed=1, name="dropout"),
        kl.Dense(2, name="last"),
    ]
    made = tfgpipe.GPipe(
        layers,
        **{"num_partitions": 2, "num_micro_batches": 2, **options},
    )
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return made


def data():
    """The same rows in every release."""
    x = np.linspace(-1, 1, 3 * ROWS, dtype="float32").reshape(ROWS, 3)
    return x, np.stack([x.sum(1), x.prod(1)], 1)


def train(made, epochs, first=0, callbacks=()):
    """The losses of epochs; the same rows in the same order."""
    x, y = data()
    return made.fit(
        x,
        y,
        BATCH,
        epochs=epochs,
        initial_epoch=first,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks],
    ).history["loss"]


def main(folder):
    """Trains an epoch, writes all files, and trains another one."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    made = model()
    train(made, 1, callbacks=[Checkpoint(folder / "checkpoint")])
    made.save(folder / "model.keras")
    made.save_weights(folder / "model.weights.h5")
    outputs = made.predict(data()[0], verbose=0)
    losses = train(made, 2, first=1)
    np.savez(folder / "numbers.npz", outputs=outputs, losses=losses)


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [half, half])
    main(sys.argv[1])
