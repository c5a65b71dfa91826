"""The promise: the numbers are Keras's, whatever K, M and remat."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers as kl
from kinds import KINDS, Kind, Plain, normal

import tfgpipe

PARTITIONS = (1, 2, 3, 4, 8)
MICRO_BATCHES = (1, 2, 3, 4, 8)
REMAT = ("except_last", "always", "never")
MATRIX = list(itertools.product(PARTITIONS, MICRO_BATCHES, REMAT))


def train(kind, make, optimizer, epochs, predict=True, validate=True):
    """Trains, and returns the model, its history and outputs."""
    rng = np.random.default_rng(3)
    keras.utils.set_random_seed(5)
    model = make(kind.layers())
    model.compile(optimizer, **kind.compile())
    x, y, fit = kind.x(rng), kind.y(rng), kind.fit(rng)
    steps = {"steps_per_epoch": 1} if epochs == 1 else {}
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=(x, y) if validate else None,
        **steps,
        **fit,
    )
    outputs = model.predict(x, 8, verbose=0) if predict else None
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
    if name == "adamw":
        return keras.optimizers.AdamW(0.01, weight_decay=0.1)
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
        largest_difference(
            list(found_history.values()), list(history.values())
        ),
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


# Adam hides a gradient of the wrong size, momentum does not; weight decay tells
# a gradient of zeros from none.
CASES = [
    (name, *point, ("adam", "momentum", "adamw")[i % 3])
    for seed, name in enumerate(KINDS)
    for i, point in enumerate(pairs(seed)[: 3 if name != "dense" else 5])
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "k", "m", "remat", "optimizer"), CASES)
def test_fit_in_float64_equals_keras(name, k, m, remat, optimizer):
    check(name, k, m, remat, optimizer, epochs=4, predict=k in (2, 4))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", KINDS)
def test_gradients_in_float64_equal_those_of_keras(name):
    """One step of plain descent, from which each gradient can be read."""
    check(name, 2, 3, "except_last", "gradient", epochs=1, predict=False)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("k", "m", "remat"), MATRIX)
def test_fit_of_the_whole_matrix_equals_keras(name, k, m, remat):
    check(name, k, m, remat, "adam", epochs=4)


# ----------------------------------------------------------- bit by bit
class Pair(kl.Layer):
    """Hands on a pair, and uses each part several times."""

    def __init__(self, first=False, **kwargs):
        super().__init__(**kwargs)
        self.first = first
        self.a, self.b = kl.Dense(8), kl.Dense(8)
        self.norm, self.dropout = kl.BatchNormalization(), kl.Dropout(0.2)

    def build(self, shape):
        for layer in (self.a, self.b, self.norm, self.dropout):
            layer.build((None, 8))

    def call(self, x):
        h, before = (x, x) if self.first else x
        t = self.norm(self.a(keras.ops.relu(h))) + self.b(before)
        u = self.dropout(t) * h + keras.ops.tanh(before) + t * before
        return keras.ops.tanh(u + h), h


class Product(kl.Layer):
    def call(self, x):
        return x[0] * x[1]


def pairs_of_tensors():
    return [
        kl.Dense(8),
        *(Pair(i == 0) for i in range(5)),
        Product(),
        kl.Dense(2),
    ]


BITWISE = {
    **{name: KINDS[name] for name in ("tied", "counters")},
    "pairs": Kind(pairs_of_tensors, normal(8), normal(2)),
}


@pytest.mark.parametrize(
    ("name", "remat"),
    [*((name, "except_last") for name in BITWISE), ("pairs", "always")],
)
def test_weights_are_bit_identical_for_any_number_of_cells(name, remat):
    def variables(k):
        model, _, _ = train(
            BITWISE[name],
            lambda layers: tfgpipe.GPipe(layers, k, 3, remat=remat),
            "adam",
            epochs=2,
            predict=False,
            validate=False,
        )
        return [v.numpy() for v in model.variables]

    first = variables(1)
    for k in (2, 8):
        for a, b in zip(first, variables(k), strict=True):
            np.testing.assert_array_equal(a, b)
