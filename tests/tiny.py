"""Tiny models and data, and what tests do with them again and again."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl

import tfgpipe

ROWS, BATCH = 14, 4  # batches of 4, 4, 4 and 2 rows; fewer than M at last


def data(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((rows, 4)), rng.standard_normal((rows, 2))
    return x.astype(keras.config.floatx()), y.astype(keras.config.floatx())


def layers():
    return [
        keras.Input((4,)),
        kl.Dense(5, activation="tanh"),
        kl.Dense(4, kernel_regularizer="l2"),
        kl.Dense(2),
    ]


def random_layers():
    """Layers whose training depends on more than weights and data."""
    return [
        keras.Input((4,)),
        kl.Dense(6, activation="relu"),
        kl.BatchNormalization(),
        kl.Dropout(0.3, seed=1),
        kl.Dense(2),
    ]


def pipeline(make=layers, k=2, m=3, cls=tfgpipe.GPipe, **kwargs):
    keras.utils.set_random_seed(5)  # initial weights are drawn from it
    return cls(make(), k, m, **kwargs)


def sequential(make=layers):
    keras.utils.set_random_seed(5)
    return keras.Sequential(make())


def quickly(model, compiling):
    """Arguments of `compile` with which plain Keras has least to do.

    Its few steps take less time than a trace of one. Of several losses, it
    makes something else then.
    """
    modes = {"jit_compile", "run_eagerly", "steps_per_execution"}
    if (
        isinstance(model, tfgpipe.GPipe)
        or isinstance(compiling.get("loss"), (dict, list))
        or modes & set(compiling)
    ):
        return compiling
    return {**compiling, "run_eagerly": True}


def compiled(model, optimizer=None, **kwargs):
    kwargs = quickly(model, kwargs)
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    model.compile(optimizer, kwargs.pop("loss", "mse"), **kwargs)
    return model


def weights(model):
    return [w.numpy() for w in model.weights]


def state(model):
    return weights(model) + [v.numpy() for v in model.optimizer.variables]


def assert_close(found, expected, tolerance=1e-10):
    keras.tree.assert_same_structure(found, expected)
    for a, b in zip(keras.tree.flatten(found), keras.tree.flatten(expected)):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def fit(model, *args, **kwargs):
    defaults = {"epochs": 2, "verbose": 0, "shuffle": False}
    if args and isinstance(args[0], np.ndarray):
        defaults["batch_size"] = BATCH
    return model.fit(*args, **{**defaults, **kwargs}).history


def exported(folder, *models):
    """What is served of each model."""
    for i, model in enumerate(models):
        model.export(str(folder / f"{i}"), verbose=False)
    return [
        tf.saved_model.load(str(folder / f"{i}")) for i in range(len(models))
    ]


class Interrupt(keras.callbacks.Callback):
    """Stops the training as a power cut would, before a batch of an epoch."""

    def __init__(self, epoch, batch=0):
        super().__init__()
        self.at = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise KeyboardInterrupt
