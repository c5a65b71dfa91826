"""The promise: the numbers are Keras's, whatever K, M and remat."""

import itertools

import keras
import numpy as np
import pytest
from kinds import KINDS, Plain

import tfgpipe

PARTITIONS = (1, 2, 3, 4, 8)
MICRO_BATCHES = (1, 2, 3, 4, 8)
REMAT = ("except_last", "always", "never")
MATRIX = list(itertools.product(PARTITIONS, MICRO_BATCHES, REMAT))


def train(kind, make, optimizer, epochs, batch_size=8, predict=True):
    """Trains, and returns the model and its history."""
    rng = np.random.default_rng(3)
    keras.utils.set_random_seed(5)
    model = make(kind.layers())
    model.compile(optimizer, **kind.compile())
    x, y, fit = kind.x(rng), kind.y(rng), kind.fit(rng)
    validation = (x, y)
    history = model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=validation,
        **fit,
    )
    outputs = model.predict(x, batch_size, verbose=0) if predict else None
    return model, history.history, outputs


REFERENCE = {}


def reference(name, optimizer, epochs):
    key = name, optimizer, epochs
    if key not in REFERENCE:
        model, history, outputs = train(
            KINDS[name], Plain, optimizers(optimizer), epochs
        )
        weights = [w.numpy() for w in model.weights]
        REFERENCE[key] = weights, history, outputs
    return REFERENCE[key]


def optimizers(name):
    if name == "gradient":  # one step of plain descent shows the gradient
        return keras.optimizers.SGD(1.0)
    if name == "momentum":
        return keras.optimizers.SGD(0.05, momentum=0.9)
    return keras.optimizers.Adam(0.01)


def largest_difference(found, expected):
    """Largest difference, relative to the largest value of each tensor."""
    worst = 0.0
    for a, b in zip(
        keras.tree.flatten(found), keras.tree.flatten(expected), strict=True
    ):
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        scale = max(np.abs(b).max(), 1e-3)
        worst = max(worst, np.abs(a - b).max() / scale)
    return worst


def check(name, k, m, remat, optimizer, epochs, predict=True):
    weights, history, outputs = reference(name, optimizer, epochs)
    model, found_history, found_outputs = train(
        KINDS[name],
        lambda layers: tfgpipe.GPipe(layers, k, m, remat=remat),
        optimizers(optimizer),
        epochs,
        predict=predict,
    )
    assert len(model.cells()) == k
    assert found_history.keys() == history.keys()
    found = [w.numpy() for w in model.weights]
    worst = max(
        largest_difference(found, weights),
        largest_difference(list(found_history.values()), list(history.values())),
        largest_difference(found_outputs, outputs) if predict else 0.0,
    )
    assert worst < 1e-10
    return worst


def pairs(seed):
    """A few points of the matrix: every value of K, M and remat occurs."""
    rng = np.random.default_rng(seed)
    ks, ms = rng.permutation(PARTITIONS), rng.permutation(MICRO_BATCHES)
    return [
        (int(k), int(m), REMAT[(i + seed) % 3])
        for i, (k, m) in enumerate(zip(ks, ms))
    ]


CASES = [
    (name, *point)
    for seed, name in enumerate(KINDS)
    for point in pairs(seed)[: 3 if name != "dense" else 5]
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "k", "m", "remat"), CASES)
def test_fit_in_float64_equals_keras(name, k, m, remat):
    check(name, k, m, remat, "adam", epochs=4, predict=k in (2, 4))


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("k", "m", "remat"), MATRIX)
@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_fit_of_the_whole_matrix_equals_keras(name, k, m, remat, optimizer):
    check(name, k, m, remat, optimizer, epochs=4)
