"""The promise of replicas: the numbers of one pipeline, and of Keras.

R replicas with M micro-batches each are one pipeline with R M micro-batches.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from kinds import KINDS
from replicated import (
    NOISY,
    OPTIMIZERS,
    SMALL,
    all_variables,
    difference,
    point,
    replicas,
)
from test_transparency import SCHEDULES, WHOLE, largest_difference

import tfgpipe
from tfgpipe.named_schedules import SCHEDULES as NAMED
from tfgpipe.replicas import Replicas
from tfgpipe.tasks import Task


# ------------------------------------------------------ who computes what
def test_micro_batches_are_shared_in_the_order_of_the_rows():
    shared = Replicas([("a0", "a1", "a2"), ("b0", "b1", "b2")], 7)
    assert [list(shared.micro_batches(r)) for r in range(3)] == [
        [0, 1],
        [2, 3],
        [4, 5, 6],
    ]
    assert [shared.of(m) for m in range(7)] == [0, 0, 1, 1, 2, 2, 2]
    assert [shared.device(1, m) for m in (0, 3, 6)] == ["b0", "b1", "b2"]


def test_fewer_micro_batches_than_replicas_leave_some_idle():
    shared = Replicas([("a0", "a1", "a2")], 2)
    assert [shared.of(m) for m in range(2)] == shared.busy == [1, 2]


@pytest.mark.parametrize("name", NAMED)
def test_tasks_of_all_replicas_come_after_those_they_need(name):
    shared = Replicas([("a0", "a1"), ("b0", "b1")], 7)
    shared.plan(lambda count: NAMED[name](2, count, 1))
    tasks = shared.tasks(lambda k, m: shared.goes_back_first(k, m))
    assert len(set(tasks)) == len(tasks)
    recomputed = {t.micro_batch for t in tasks if t.kind == "recompute"}
    first = {"gpipe": {2, 6}}.get(name, {0, 3})
    assert recomputed == set(range(7)) - first
    places = {task: i for i, task in enumerate(tasks)}
    for task, i in places.items():
        needed = [t for t in task.needs(2) if t in places]
        assert all(places[t] < i for t in needed)
    forward_only = shared.tasks(None)
    assert sorted(forward_only) == [
        Task("forward", k, m) for k in range(2) for m in range(7)
    ]


def test_all_forward_tasks_of_fill_drain_come_first():
    shared = Replicas([("a0", "a1"), ("b0", "b1")], 5)
    shared.plan(lambda count: NAMED["gpipe"](2, count, 1))
    kinds = [task.kind for task in shared.tasks(lambda k, m: True)]
    assert kinds == ["forward"] * 10 + ["backward"] * 10


# ------------------------------------------------------- the numbers of Keras
# (kind, R, K, M, schedule, optimizer, rows of a batch)
CASES = [
    ("dense", 2, 2, 2, "gpipe", "adam", 8),
    ("dense", 3, 1, 2, "1f1b", "clipnorm", 9),
    ("outputs", 2, 3, 1, "1f1b", "average", 9),
    ("tied", 2, 2, 2, "gpipe", "global_clipnorm", 9),
    ("weighted_mean", 3, 2, 1, "zero_bubble", "momentum", 9),
    ("class_weight", 2, 2, 1, "interleaved", "accumulation", 9),
    ("user_loss", 2, 2, 2, "gpipe", "momentum", 9),
    ("counters", 3, 2, 1, "gpipe", "momentum", 9),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "r", "k", "m", "schedule", "optimizer", "batch_size"), CASES
)
def test_replicas_in_float64_equal_keras(
    name, r, k, m, schedule, optimizer, batch_size
):
    """Twelve steps; validation, evaluation, prediction; uneven replicas."""
    worst = difference(
        f"small_{name}",
        optimizer,
        lambda layers: point(layers, r, k, m, schedule),
        batch_size,
        infers=name in ("outputs", "user_loss"),
    )
    assert worst < 1e-10


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", KINDS)
def test_replicas_of_every_kind_equal_keras(name):
    points = itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 4))
    schedules = ("gpipe",) if name in WHOLE else SCHEDULES
    for i, (r, k, m) in enumerate(points):
        schedule = schedules[i % len(schedules)]
        if schedule == "interleaved" and k == 3:
            schedule = "gpipe"
        optimizer = list(OPTIMIZERS)[i % len(OPTIMIZERS)]
        if name == "attention":
            optimizer = "momentum"  # Adam amplifies rounding
        worst = difference(
            name,
            optimizer,
            lambda layers, p=(r, k, m, schedule): point(layers, *p),
            batch_size=(8, 9)[i % 2],
            infers=i % 3 == 0,
        )
        assert worst < 1e-10, (r, k, m, schedule, optimizer)


# ----------------------------------------------------- the numbers of one more
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("r", "k", "m", "schedule", "batch_size"),
    [(2, 2, 2, "gpipe", 8), (3, 2, 1, "1f1b", 9)],
)
def test_replicas_are_one_pipeline_of_all_micro_batches(
    r, k, m, schedule, batch_size
):
    """Masks, moments, seeds and statistics; also where shards are uneven."""
    one = all_variables(
        lambda layers: tfgpipe.GPipe(layers, 1, r * m, schedule=schedule),
        batch_size=batch_size,
    )
    found = all_variables(
        lambda layers: replicas(layers, r, k, m, schedule=schedule),
        batch_size=batch_size,
    )
    assert largest_difference(found, one) < 1e-10


def test_weights_are_bit_identical_for_any_number_of_cells():
    found = [
        all_variables(lambda layers, k=k: replicas(layers, 2, k, 2))
        for k in (1, 3)
    ]
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


class Recorder(kl.Layer):
    """Keeps the dropout masks of the last step, row by row."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dropout = kl.Dropout(0.5, seed=3)

    def call(self, x, training=False):
        return self.dropout(keras.ops.ones_like(x), training=training) * x


def test_replicas_draw_different_masks():
    model = replicas([keras.Input((64,)), Recorder(), kl.Identity()], 2, 2)
    x = tf.ones([2, 64])

    @tf.function(autograph=False)
    def step():
        run = model._pipeline(x, None, None, training=True)
        run.run(model._arguments.schedule_of)
        return run.results.joined_outputs()

    first, second = step().numpy()
    assert (first == 0).any() and (first != second).any()


@pytest.mark.usefixtures("float64")
def test_batches_of_a_known_size_that_replicas_do_not_divide():
    kind = SMALL["dense"]
    rng = np.random.default_rng(3)
    x, y = kind.x(rng), kind.y(rng)

    def run(make):
        keras.utils.set_random_seed(5)
        model = make(kind.layers())
        model.compile(OPTIMIZERS["momentum"](), "mse")
        for rows in (7, 3, 1):
            batches = tf.data.Dataset.from_tensor_slices((x, y))
            batches = batches.batch(rows, drop_remainder=True).take(2)
            model.fit(batches, epochs=1, shuffle=False, verbose=0)
        return [w.numpy() for w in model.weights]

    worst = largest_difference(
        run(lambda layers: replicas(layers, 2, 2, 2)), run(keras.Sequential)
    )
    assert worst < 1e-10


def test_statistics_of_idle_replicas_are_no_business_of_others():
    """One row, three replicas, with a batch whose size is known."""
    model = replicas(NOISY.layers(), 3, 2)
    model.compile("sgd", "mse")
    logs = model.train_on_batch(np.ones((1, 5)), np.ones((1, 6)))
    assert np.isfinite(logs)
    assert all(np.isfinite(v.numpy()).all() for v in model.variables)
