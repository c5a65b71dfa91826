"""A hundred thousand steps take no more memory than the first ones."""

import gc
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe.callbacks import Checkpoint, StopOnNonFinite

STEPS_PER_EPOCH, EPOCHS = 1000, 100


class Memory(keras.callbacks.Callback):
    """What the process holds after each epoch, in MiB."""

    def __init__(self):
        super().__init__()
        self.mib = []

    def on_epoch_end(self, epoch, logs=None):
        gc.collect()
        status = pathlib.Path("/proc/self/status").read_text()
        [line] = [x for x in status.splitlines() if x.startswith("VmRSS")]
        self.mib.append(int(line.split()[1]) / 1024)


@pytest.mark.slow
def test_memory_of_a_long_training_is_flat(tmp_path):
    layers = [keras.Input((4,)), kl.Dense(8), kl.Dropout(0.1), kl.Dense(2)]
    model = tfgpipe.GPipe(layers, 2, 2, skip_nonfinite=True)
    model.compile("adam", "mse", metrics=["mae"])
    rows = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :2]))
    memory = Memory()
    model.fit(
        data.batch(8, drop_remainder=True).repeat(),
        epochs=EPOCHS,
        steps_per_epoch=STEPS_PER_EPOCH,
        verbose=0,
        shuffle=False,
        callbacks=[Checkpoint(tmp_path), StopOnNonFinite(), memory],
    )
    assert model.optimizer.iterations == STEPS_PER_EPOCH * EPOCHS
    first, last = memory.mib[EPOCHS // 5], memory.mib[-1]
    print(f"{first:.0f} MiB after a fifth, {last:.0f} MiB at the end")
    assert last < first + 20
