"""Batch normalisation over replicas: `BatchNormalization(synchronized=True)`.

The i-th micro-batches of all replicas are normalised as if they were one.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import step_graph, tasks
from keras import layers as kl
from matrix import OPTIMIZERS, REMAT, SCHEDULES, largest_difference
from replicated import point, refused, replicas
from tiny import quickly

from tfgpipe.devices.names import Replicas
from tfgpipe.schedules import CellFacts, Remat, lower
from tfgpipe.schedules.orders import SCHEDULES as NAMED
from tfgpipe.state.batch_normalization import moments_over_replicas


def norm(**kwargs):
    return kl.BatchNormalization(momentum=0.9, synchronized=True, **kwargs)


def normalized():
    """No bias is without effect: its gradient would be rounding alone."""
    return [
        kl.Dense(6, use_bias=False),
        norm(),
        kl.Activation("tanh"),
        kl.Dense(5, use_bias=False),
        norm(),
        kl.Activation("relu"),
        kl.Dense(2),
    ]


def vectors(rows=19):
    rng = np.random.default_rng(3)
    return rng.standard_normal((rows, 4)), rng.standard_normal((rows, 2))


def fitted(make, layers, optimizer, data, **compiling):
    """Trains six steps, of 9, 9 and 1 row; all weights, and the losses."""
    x, y = data()
    keras.utils.set_random_seed(5)
    model = make(layers())
    compiling = quickly(model, {"loss": "mse", **compiling})
    model.compile(OPTIMIZERS[optimizer](), **compiling)
    losses = model.fit(x, y, 9, 2, shuffle=False, verbose=0).history["loss"]
    return [w.numpy() for w in model.weights], losses


@functools.cache
def plain_keras(layers, optimizer, data):
    return fitted(keras.Sequential, layers, optimizer, data)


def difference(make, layers=normalized, optimizer="adam", data=vectors, **how):
    """The largest difference to plain Keras."""
    expected = plain_keras(layers, optimizer, data)
    found = fitted(make, layers, optimizer, data, **how)
    return largest_difference(found, expected)


POINTS = list(itertools.product((2, 3), (1, 2), SCHEDULES, REMAT))[::3]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("r", "k", "schedule", "remat"),
    [
        (3, 2, "gpipe", "always"),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in POINTS),
    ],
)
def test_one_micro_batch_a_replica_is_plain_keras(r, k, schedule, remat):
    """Uneven replicas; at last, one row, and replicas without any."""
    worst = difference(
        lambda layers: point(layers, r, k, 1, schedule, remat),
        optimizer=("momentum", "adam")[(r + k) % 2],
    )
    assert worst < 1e-10


class Branches(kl.Layer):
    """Normalises twice by each of two layers, one of another axis."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = kl.Dense(3, use_bias=False)
        self.norm, self.across = norm(), norm(axis=1, center=False)

    def build(self, input_shape):
        self.dense.build(input_shape)
        shape = (*input_shape[:-1], 3)
        self.norm.build(shape)
        self.across.build(shape)

    def call(self, x, training=False):
        x = self.dense(x)
        a = self.norm(x, training=training)
        b = self.across(x, training=training)
        again = self.norm(keras.ops.tanh(a + b), training=training)
        return keras.ops.sin(again) * self.across(b * b, training=training)


def nested():
    return [kl.Reshape((2, 2)), Branches(), kl.Flatten(), kl.Dense(2)]


def masked():
    return [
        kl.Embedding(7, 4, mask_zero=True),
        norm(),
        kl.Dense(4, "tanh", use_bias=False),
        norm(axis=1),
        kl.GlobalAveragePooling1D(),
        kl.Dense(2),
    ]


def tokens():
    rng = np.random.default_rng(3)
    return rng.integers(0, 7, (19, 3)), rng.standard_normal((19, 2))


CASES = {
    "nested": {"layers": nested},
    "masked": {"layers": masked, "data": tokens},
    "jit_compile": {"jit_compile": True},
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.slow] * (name in ("jit_compile", "nested"))
        )
        for name in CASES
    ],
)
def test_layers_and_ways_to_run_are_those_of_plain_keras(name):
    worst = difference(
        lambda layers: replicas(layers, 2, 1, remat="always"), **CASES[name]
    )
    assert worst < 1e-10


# ------------------------------------------------- several micro-batches each
def partners(rows, r, m, is_known):
    """The rows that are normalised together, group by group."""
    count = min(r * m, rows) if is_known else r * m
    bounds = [rows * i // count for i in range(count + 1)]
    shared = Replicas([["CPU:0"]] * r, count)
    groups = [[] for _ in range(m)]
    for replica in shared.busy:
        for i, b in enumerate(shared.micro_batches(replica)):
            groups[i].extend(range(bounds[b], bounds[b + 1]))
    return [group for group in groups if group]


def reference_step(model, x, y, groups):
    """Normalises each group of rows by its own moments."""
    layers = model.layers
    norms = [la for la in layers if isinstance(la, kl.BatchNormalization)]
    old = [(n.moving_mean.numpy(), n.moving_variance.numpy()) for n in norms]
    seen = {id(n): [] for n in norms}
    with tf.GradientTape() as tape:
        loss = 0.0
        for group in groups:
            h = tf.constant(x[group])
            for layer in layers:
                if id(layer) in seen:
                    seen[id(layer)].append(h.numpy())
                h = layer(h, training=True)
            error = tf.reduce_mean(tf.square(h - y[group]))
            loss += error * len(group) / len(x)
    values = [w.value for w in model.trainable_weights]
    gradients = tape.gradient(loss, values)
    model.optimizer.apply(gradients, model.trainable_weights)
    for layer, (mean, variance) in zip(norms, old):
        rows = np.concatenate(seen[id(layer)])
        layer.moving_mean.assign(0.9 * mean + 0.1 * rows.mean(0))
        layer.moving_variance.assign(0.9 * variance + 0.1 * rows.var(0))
    return float(loss)


def check_micro_batches(r, k, m, schedule, remat, optimizer, sizes):
    """Batches of any rows, then batches of known rows."""
    x, y = vectors(sum(sizes) + 2 * sizes[0])
    keras.utils.set_random_seed(5)
    plain = keras.Sequential(normalized())
    plain.compile(OPTIMIZERS[optimizer](), "mse")
    plain.build((None, 4))
    keras.utils.set_random_seed(5)
    model = point(normalized(), r, k, m, schedule, remat)
    model.compile(OPTIMIZERS[optimizer](), "mse")
    step = tf.function(
        model.train_step,
        input_signature=[
            (
                tf.TensorSpec([None, 4], x.dtype),
                tf.TensorSpec([None, 2], x.dtype),
            )
        ],
        autograph=False,
    )
    model.build((None, 4))
    start = 0
    for i, size in enumerate([*sizes, sizes[0]]):
        is_known = i == len(sizes)
        a, b = x[start : start + size], y[start : start + size]
        start += size
        groups = partners(size, r, m, is_known)
        expected = reference_step(plain, a, b, groups)
        model.reset_metrics()
        if is_known:
            known = tf.function(model.train_step, autograph=False)
            logs = known((tf.constant(a), tf.constant(b)))
        else:
            logs = step((a, b))
        np.testing.assert_allclose(logs["loss"], expected, 1e-10)
    found = [w.numpy() for w in model.weights]
    worst = largest_difference(found, [w.numpy() for w in plain.weights])
    assert worst < 1e-10


MICRO_BATCHES = list(
    itertools.product((2, 3), (1, 2), (2, 3), SCHEDULES, REMAT)
)[::7]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("r", "k", "m", "schedule", "remat", "sizes"),
    [
        (2, 2, 2, "zero_bubble", "except_last", (7, 3, 1)),
        (2, 1, 2, "gpipe", "always", (3,)),  # 2 and 1 of them
        *(
            pytest.param(*p, (9, 3, 1, 14), marks=pytest.mark.slow)
            for p in MICRO_BATCHES
        ),
    ],
)
def test_partners_are_normalised_as_one(r, k, m, schedule, remat, sizes):
    # Adam magnifies the rounding of gradients near zero, as of three rows.
    optimizer = ("momentum", "adam")[(r + k + m) % 2 and len(sizes) > 1]
    check_micro_batches(r, k, m, schedule, remat, optimizer, sizes)


def test_weights_are_bit_identical_for_any_number_of_cells():
    found = []
    for k in (1, 2):
        keras.utils.set_random_seed(5)
        model = replicas(normalized(), 3, k, 1)
        model.compile(OPTIMIZERS["momentum"](), "mse")
        for _ in range(2):
            model.train_on_batch(*vectors(13))
        found.append([w.numpy() for w in model.weights])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------- what is computed
@pytest.mark.parametrize("m", [1, 3])
def test_partners_have_their_tasks_together(m):
    """Three replicas, of which the last ones have a micro-batch more."""
    shared = Replicas([("a0", "b0"), ("a1", "b1"), ("a2", "b2")], 3 * m + 2)
    program = lower(
        lambda count: NAMED["1f1b"](2, count, 1),
        [CellFacts(synchronizes=True)] * 2,
        Remat(["except_last"] * 2),
        shared.counts,
    )
    groups = [[op.task for op in turn] for turn in program.turns]
    every = [task for group in groups for task in group]
    assert len(set(every)) == len(every)
    starts = [shared.micro_batches(r).start for r in range(3)]
    for group in groups:
        assert len({(kind, k) for kind, k, _ in group}) == 1
        owners = [shared.replica_of(i) for _, _, i in group]
        assert owners == sorted(set(owners))
        assert len({i - starts[r] for r, (_, _, i) in zip(owners, group)}) == 1
    places = {task: n for n, group in enumerate(groups) for task in group}
    for task, n in places.items():
        assert all(places[t] < n for t in task.needs() if t in places)
    assert sum(task.kind == "forward" for task in every) == 2 * (3 * m + 2)
    recomputed = {i for kind, _, i in every if kind == "recompute"}
    assert recomputed == {*range(3 * m + 2)} - {*starts}


def test_inference_exchanges_nothing():
    model = replicas(normalized(), 2, 2, 2)
    model.compile("sgd", "mse")
    x, y = (tf.constant(values) for values in vectors(8))
    model.build((None, 4))
    step = tf.function(model.test_step, autograph=False)
    model.prepare(x, y, None, True)
    assert len(tasks(step.get_concrete_function((x, y)).graph)) == 2 * 2 * 2


# ---------------------------------------------------------------- the moments
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("with_mask", [False, True])
def test_moments_far_from_zero_are_exact(axis, with_mask):
    """As exact as the moving mean is near."""
    rng = np.random.default_rng(1)
    x = (1000 + rng.standard_normal((8, 3, 4))).astype("float32")
    mask = rng.random((8, 3)) < 0.7 if with_mask else None
    layer = norm(axis=axis)
    layer.build(x.shape)
    layer.moving_mean.assign(999.5 * np.ones(layer.moving_mean.shape))
    parts = [x[:3], x[3:]]
    masks = [None, None] if mask is None else [mask[:3], mask[3:]]
    sent = []
    for part, own in zip(parts, masks):
        moments_over_replicas(
            layer, tf.constant(part), own, lambda t: sent.append(t) or t
        )
    found = moments_over_replicas(
        layer, tf.constant(parts[0]), masks[0], lambda _: sent[0] + sent[1]
    )
    kept = np.ones(x.shape, bool) if mask is None else mask[..., None]
    axes = tuple(i for i in range(3) if i != axis % 3)
    counted = np.ma.array(x.astype("float64"), mask=~(kept & (x == x)))
    np.testing.assert_allclose(found[0], counted.mean(axes), 1e-6)
    np.testing.assert_allclose(found[1], counted.var(axes), 1e-3)


def test_moments_of_mixed_precision_are_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = replicas(normalized(), 2, 1, 1)
    model.compile("sgd", "mse")
    graph = step_graph(model, *(v.astype("float32") for v in vectors(8)))
    found = [
        op.outputs[0].dtype
        for op in graph.get_operations()
        if op.type == "Sum" and op.outputs[0].shape.rank == 2
    ]
    assert found and set(found) == {tf.float32}
    model.fit(*vectors(9), 9, verbose=0)
    assert all(w.dtype == "float32" for w in model.weights)
    assert all(np.isfinite(w.numpy()).all() for w in model.weights)


# ------------------------------------------------------------- what is refused
class InLoop(kl.Layer):
    def __init__(self):
        super().__init__()
        self.norm = norm(name="in_loop")

    def build(self, input_shape):
        self.norm.build(input_shape)

    def call(self, x, training=False):
        return tf.function(self.norm, autograph=False)(x, training=training)


def test_normalisation_that_cannot_be_left_is_refused():
    model = replicas([kl.Dense(3), InLoop()], 2, 1)
    model.compile("sgd", "mse")
    with refused("layer 'in_loop'", "`tf.function`", "synchronized=False"):
        model.train_on_batch(np.ones((4, 3)), np.ones((4, 3)))


class MasksNegatives(kl.Layer):
    def compute_mask(self, x, mask=None):
        return x[..., 0] > 0

    def call(self, x):
        return x


def test_early_gradients_of_a_loss_masked_by_what_is_normalised_are_refused():
    def trained(schedule):
        model = replicas([norm(), MasksNegatives()], 2, 1, 2, schedule=schedule)
        model.compile("sgd", "mse")
        x = np.random.default_rng(1).standard_normal((8, 3, 2))
        return model.train_on_batch(x, x)

    assert np.isfinite(trained("gpipe"))
    with refused("divided by", 'schedule="gpipe"'):
        trained("1f1b")
