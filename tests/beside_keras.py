"""Trains a pipeline and plain Keras alike, and compares."""

import keras
import numpy as np
from tiny import quickly

import tfgpipe

ROWS = 7  # in batches of 4: uneven, and with a last one of 3


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal((ROWS, *shape))


def trained(make, model, x, y, fit=None, optimizer=None, **arguments):
    """The history, the weights and the outputs after two epochs.

    With momentum, not Adam: that hides gradients of a wrong size.
    """
    keras.utils.set_random_seed(5)
    model = model(make())
    model.compile(
        optimizer or keras.optimizers.SGD(0.05, momentum=0.9),
        **quickly(model, {"loss": "mse", **arguments}),
    )
    history = model.fit(
        x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, **(fit or {})
    )
    outputs = model.predict(x, batch_size=4, verbose=0)
    return history.history, [v.numpy() for v in model.variables], outputs


def pipeline(k, m, **arguments):
    return lambda layers: tfgpipe.GPipe(layers, k, m, **arguments)


def assert_close(found, expected, rtol=1e-10):
    keras.tree.assert_same_structure(found, expected)
    for a, b in zip(keras.tree.flatten(found), keras.tree.flatten(expected)):
        np.testing.assert_allclose(a, b, rtol, 1e-2 * rtol)


def check(make, x, y, points, reference=keras.Sequential, **arguments):
    """Compares pipelines of (K, M) with Keras."""
    expected = trained(make, reference, x, y, **arguments)
    for k, m in points:
        assert_close(trained(make, pipeline(k, m), x, y, **arguments), expected)
