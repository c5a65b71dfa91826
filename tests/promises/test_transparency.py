"""The promise: the numbers are Keras's, whatever K, M, schedule and remat."""

import dataclasses
import functools
import itertools

import keras
import numpy as np
import pytest
from all_pairs import all_pairs
from functional import Twice
from keras import layers as kl
from kinds import KINDS, Kind, Plain, normal, user_loss
from matrix import (
    EARLY,
    NAMED,
    REMAT,
    SCHEDULES,
    WHOLE,
    arguments,
    largest_difference,
)
from sharing_layers import Counter
from tiny import assert_same

import tfgpipe
from tfgpipe.schedules import CHUNKS

PARTITIONS = (1, 2, 3, 4, 5)
MICRO_BATCHES = (1, 2, 3, 4, 8)
ROWS = 11  # in batches of 8: 8 and a last one of 3 rows


def train(kind, make, optimizer, epochs, infers=False):
    """Trains, and returns the model, its history and outputs."""
    rng = np.random.default_rng(3)
    keras.utils.set_random_seed(5)
    model = make(kind.layers())
    model.compile(optimizer, **kind.compile())
    x, y = keras.tree.map_structure(
        lambda rows: rows[:ROWS], (kind.x(rng), kind.y(rng))
    )
    fit = kind.fit(rng)
    if "sample_weight" in fit:
        fit["sample_weight"] = fit["sample_weight"][:ROWS]
    steps = {"steps_per_epoch": 1} if epochs == 1 else {}
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=(x, y) if infers else None,
        **steps,
        **fit,
    )
    outputs = model.predict(x, 8, verbose=0) if infers else None
    return model, history.history, outputs


@functools.cache
def reference(name, optimizer, epochs, infers):
    """What plain Keras gives."""
    kind = KINDS[name]
    options = kind.compile()
    # Eagerly it need not be traced, but weighs several losses otherwise.
    if not isinstance(options.get("loss"), (dict, list)):
        options["run_eagerly"] = True
    model, history, outputs = train(
        dataclasses.replace(kind, compile=lambda: options),
        Plain,
        optimizers(optimizer),
        epochs,
        infers,
    )
    return [w.numpy() for w in model.weights], history, outputs


def optimizers(name):
    if name == "adamw":
        return keras.optimizers.AdamW(0.01, weight_decay=0.1)
    if name == "momentum":
        return keras.optimizers.SGD(0.01, momentum=0.9)
    return keras.optimizers.Adam(0.01)


def check(
    name, k, m, schedule, remat, optimizer, epochs, infers=False, **options
):
    weights, history, outputs = reference(name, optimizer, epochs, infers)
    kind = KINDS[name]
    kind = dataclasses.replace(
        kind, compile=lambda: {**KINDS[name].compile(), **options}
    )
    model, found_history, found_outputs = train(
        kind,
        lambda layers: tfgpipe.GPipe(
            layers, **arguments(k, m, schedule, remat)
        ),
        optimizers(optimizer),
        epochs,
        infers,
    )
    assert len(model.cells()) == k
    found = [w.numpy() for w in model.weights]
    assert largest_difference(found, weights) < 1e-10
    assert largest_difference(found_history, history) < 1e-10
    if infers:
        assert largest_difference(found_outputs, outputs) < 1e-10


POINT = ("k", "m", "schedule", "remat")
POINTS = [
    tuple(point.values())
    for point in all_pairs(
        k=(2, 3, 4), m=(2, 3, 4), schedule=SCHEDULES, remat=REMAT
    )
]


# Schedules that are not in the matrix; more of them in the slow tests.
NOT_IN_MATRIX = [name for name in CHUNKS if name not in SCHEDULES]
OTHERS = [
    ("counters", 4, "zero_bubble_v", "never"),
    ("tied", 4, "dualpipe_v", "except_last"),
]


def dealt():
    """A point for each kind, and each point for some kind.

    With momentum: Adam hides a gradient of the wrong size. Weight decay tells a
    gradient of zeros from none.
    """
    points = sorted(POINTS, key=lambda point: point[2] != "gpipe")
    kinds = sorted(KINDS, key=lambda name: name not in WHOLE)
    kinds += ["dense"] * (len(points) - len(kinds))
    return [
        *((n, *p, "momentum") for n, p in zip(kinds, points, strict=True)),
        ("dense", 1, 1, "gpipe", "never", "adamw"),
        ("dense", 8, 8, "1f1b", "except_last", "adam"),
        *((kind, 4, *rest, "momentum") for kind, *rest in OTHERS),
    ]


CASES = dealt()
# Every K with every M and schedule.
MATRIX = [
    (*point, REMAT[i % 4])
    for i, point in enumerate(
        itertools.product(PARTITIONS, MICRO_BATCHES, SCHEDULES)
    )
]


def dealt_by_pairs():
    """A fifth of the matrix for each kind: all pairs of K, M and schedule."""
    found = []
    for k, m, schedule, remat in MATRIX:
        group = k + MICRO_BATCHES.index(m) + list(SCHEDULES).index(schedule)
        for name in list(KINDS)[group % 5 :: 5]:
            # A loss of whole mini-batches: other schedules refuse it.
            if name not in WHOLE or schedule == "gpipe":
                found.append((name, k, m, schedule, remat))
    return found


def dealt_others():
    """Each kind once, with other schedules, M and rules in turn."""
    kinds = [name for name in KINDS if name not in WHOLE]
    rules, counts = itertools.cycle(REMAT), itertools.cycle(range(1, 10))
    return [
        (kind, next(counts), name, next(rules))
        for kind, name in itertools.product(kinds, NOT_IN_MATRIX)
    ]


def test_cases_have_every_kind_and_every_pair_of_values():
    assert {case[0] for case in CASES} == set(KINDS)
    assert {case[1:5] for case in CASES} >= set(POINTS)


def test_cases_have_counts_that_must_be_known_ahead():
    """Masks, weights and rows, before any micro-batch has its loss."""
    early = {case[0] for case in CASES if case[3] in EARLY}
    assert early >= {"weighted_mean", "outputs", "class_weight"}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", *POINT, "optimizer"), CASES)
def test_fit_in_float64_equals_keras(name, k, m, schedule, remat, optimizer):
    infers = (k, m) in ((1, 1), (4, 4))
    check(name, k, m, schedule, remat, optimizer, epochs=2, infers=infers)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "m", "schedule", "remat"), dealt_others())
def test_fit_by_other_schedules_equals_keras(name, m, schedule, remat):
    check(name, 4, m, schedule, remat, "momentum", epochs=1)


class Stop(kl.Layer):
    """Nothing before it is trained by what follows."""

    def call(self, x):
        return keras.ops.stop_gradient(x)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("k", "schedule"), [(4, "zero_bubble"), (4, "zero_bubble_v")]
)
def test_cell_without_gradients_of_its_inputs_does_not_stop_others(k, schedule):
    """What comes before it has a loss of its own."""
    x = np.random.default_rng(0).normal(size=(8, 4))
    found = []
    for make in (
        Plain,
        lambda own: tfgpipe.GPipe(own, **arguments(k, 4, schedule, "never")),
    ):
        keras.utils.set_random_seed(1)
        own = kl.Dense(4, "tanh", activity_regularizer="l2")
        model = make([kl.Dense(4), kl.Dense(4), own, Stop(), kl.Dense(4)])
        model.compile("sgd", "mse")
        model.fit(x, x, batch_size=8, epochs=2, verbose=0)
        found.append([w.numpy() for w in model.weights])
    assert largest_difference(*found) < 1e-10


# By XLA: first halves that compute again, and halves of what is kept; an M that
# does not divide the rows.
COMPILED = [
    ("convolution", 2, 3, "zero_bubble", "never"),
    ("masked_summary", 4, 5, "zero_bubble_v", "always"),
]


def dealt_compiled():
    """Each kind with three schedules, and so on; loops are computed again."""
    kinds = [n for n in KINDS if n not in WHOLE and n != "masked_sequence"]
    schedules = itertools.cycle([*SCHEDULES, *NOT_IN_MATRIX])
    found = []
    for i, kind in enumerate(kinds):
        for j in range(3):
            remat = REMAT[(i + j) % 4]
            if kind == "masked_summary":
                remat = "always"
            found.append((kind, 4, (3, 5, 2)[j], next(schedules), remat))
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", *POINT),
    [
        *COMPILED,
        *(pytest.param(*p, marks=pytest.mark.slow) for p in dealt_compiled()),
    ],
)
def test_fit_compiled_by_xla_equals_keras(name, k, m, schedule, remat):
    given = name, k, m, schedule, remat
    check(*given, "momentum", epochs=1, jit_compile=True)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", *POINT), dealt_by_pairs())
def test_fit_of_the_whole_matrix_equals_keras(name, k, m, schedule, remat):
    check(name, k, m, schedule, remat, "momentum", epochs=2, infers=True)


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
        Pair(first=True),
        Pair(),
        Product(),
    ]


def noisy():
    """Layers whose numbers depend on the micro-batch and on seeds."""
    layers = [kl.Dense(6, activation="tanh"), Counter()]
    for _ in range(2):
        layers += [kl.Dropout(0.3), kl.BatchNormalization(), kl.Dense(6)]
    return layers


BITWISE = {
    "tied": KINDS["tied"],
    "pairs": Kind(pairs_of_tensors, normal(8), normal(8)),
    "noisy": Kind(noisy, normal(5), normal(6)),
}


def variables(name, k, schedule="gpipe", remat="except_last", m=3, **kwargs):
    """All variables after some steps with some M."""
    model, _, _ = train(
        BITWISE[name],
        lambda layers: tfgpipe.GPipe(
            layers, **{**arguments(k, m, schedule, remat), **kwargs}
        ),
        "adam",
        epochs=1,
    )
    return [v.numpy() for v in model.variables]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "pairs" else pytest.mark.slow)
        for name in BITWISE
    ],
)
def test_weights_are_bit_identical_for_any_number_of_cells(name):
    assert_same(variables(name, 4), variables(name, 1))


def test_schedules_that_go_back_in_order_are_bit_identical():
    """The gradients of micro-batches are added in the same order."""
    first = variables("pairs", 1, "1f1b", "never")
    for k, schedule in ((4, "interleaved"), (2, "zero_bubble")):
        found = variables("pairs", k, schedule, "always")
        assert_same(found, first)


def test_groups_of_recomputation_are_bit_identical():
    one, several = (
        variables(
            "noisy",
            2,
            "zero_bubble",
            "always",
            layers_per_cell=[4, 4],
            remat_groups=n,
        )
        for n in (1, 3)
    )
    assert_same(several, one)


# ------------------------------------------------------- schedule by schedule
@pytest.mark.usefixtures("float64")
def test_dropout_and_statistics_do_not_depend_on_the_schedule():
    """Masks follow from the micro-batch, not from when it is computed."""
    expected = variables("noisy", 4, "gpipe", m=3)
    found = variables("noisy", 4, "written", m=3)
    assert largest_difference(found, expected) < 1e-12


@pytest.mark.usefixtures("float64")
def test_mask_that_depends_on_what_layers_compute_is_known_ahead():
    def layers():
        return [
            kl.Dense(4, activation="relu"),
            kl.Dropout(0.5, seed=1),
            kl.Masking(0.0),
            kl.SimpleRNN(4, return_sequences=True),
            kl.Dense(2),
        ]

    kind = Kind(layers, normal(5, 2), normal(5, 2))
    (model, history, _), (other, other_history, _) = (
        train(
            kind,
            lambda layers, s=schedule: tfgpipe.GPipe(
                layers, **arguments(5, 3, s, "always")
            ),
            optimizers("momentum"),
            epochs=1,
        )
        for schedule in ("gpipe", "written")
    )
    found, expected = ([w.numpy() for w in m.weights] for m in (other, model))
    assert largest_difference(found, expected) < 1e-12
    assert largest_difference(other_history, history) < 1e-12


class Attends(kl.Layer):
    """Takes the mask off one of two names of a tensor."""

    def build(self, shapes):
        self.attention = kl.MultiHeadAttention(2, 3)
        self.attention.build(*shapes)

    def call(self, pair):
        return self.attention(pair[0], pair[0]), pair[1]


class Pools(kl.Layer):
    def build(self, shapes):
        self.pool = kl.GlobalAveragePooling1D()

    def call(self, pair):
        return self.pool(pair[0]) + self.pool(pair[1])


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:Layer .*was passed an input with a mask")
def test_tensor_that_crosses_twice_is_one_for_masks():
    def layers():
        embedding = kl.Embedding(9, 4, mask_zero=True)
        return [embedding, Twice(), Attends(), Pools(), kl.Dense(2)]

    kind = Kind(layers, lambda rng: rng.integers(0, 3, (ROWS, 6)), normal(2))
    (model, history, outputs), *found = (
        train(kind, make, optimizers("momentum"), epochs=1, infers=True)
        for make in (
            keras.Sequential,
            *(
                functools.partial(
                    tfgpipe.GPipe, num_partitions=k, num_micro_batches=m
                )
                for k, m in ((1, 1), (5, 3))
            ),
        )
    )
    for other, other_history, other_outputs in found:
        assert largest_difference(other_outputs, outputs) < 1e-12
        assert largest_difference(other_history, history) < 1e-12
        weights = ([w.numpy() for w in m.weights] for m in (other, model))
        assert largest_difference(*weights) < 1e-12


MODES = {
    "eagerly": {"run_eagerly": True},
    "compiled": {"jit_compile": True},
    "several_steps": {"steps_per_execution": 2},
}
MODES_WITH_SCHEDULES = [("eagerly", "written")]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("mode", "schedule"),
    [
        *MODES_WITH_SCHEDULES,
        # Each takes a trace of its own, and the modes know no schedules.
        *(
            pytest.param(mode, schedule, marks=pytest.mark.slow)
            for mode in MODES
            for schedule in SCHEDULES
            if (mode, schedule) not in MODES_WITH_SCHEDULES
        ),
    ],
)
def test_modes_of_keras_give_its_numbers_under_each_schedule(mode, schedule):
    kind = KINDS["outputs"]
    kind = dataclasses.replace(
        kind, compile=lambda: {**KINDS["outputs"].compile(), **MODES[mode]}
    )
    results = []
    for make in (
        Plain,
        lambda layers: tfgpipe.GPipe(
            layers, **arguments(2, 3, schedule, "mapping")
        ),
    ):
        model, history, _ = train(
            kind,
            make,
            optimizers("momentum"),
            epochs=1,
            infers=mode != "compiled",
        )
        weights = [w.numpy() for w in model.weights]
        results.append((weights, list(history.values())))
    assert largest_difference(*results) < 1e-10


@pytest.mark.parametrize(
    ("policy", "schedule"),
    [
        ("mixed_float16", "zero_bubble"),
        pytest.param("mixed_float16", "1f1b", marks=pytest.mark.slow),
        pytest.param("mixed_bfloat16", "1f1b", marks=pytest.mark.slow),
        pytest.param("mixed_bfloat16", "zero_bubble", marks=pytest.mark.slow),
    ],
)
def test_mixed_precision_does_not_depend_on_the_schedule(policy, schedule):
    keras.config.set_dtype_policy(policy)
    expected = variables("pairs", 2, "gpipe")
    found = variables("pairs", 2, schedule)
    assert largest_difference(found, expected) < 1e-2


@pytest.mark.parametrize(
    "schedule",
    [
        "written",
        # The split does not know the schedule, which `test_micro_batches.py`
        # has for all counts.
        *(pytest.param(name, marks=pytest.mark.slow) for name in NAMED),
    ],
)
def test_batch_of_fewer_rows_than_micro_batches(schedule):
    """With rows that are known when the step is traced, and later."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    x = np.random.default_rng(0).standard_normal((7, 4))

    def losses(make):
        keras.utils.set_random_seed(1)
        model = make([kl.Dense(4, "tanh") for _ in range(4)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        found = []
        for rows in (1, 3, 7):
            found.append(model.train_on_batch(x[:rows], x[:rows]))
        found.append(model.test_on_batch(x[:3], x[:3]))
        found.append(model.predict_on_batch(x[:3]))
        model.fit(x, x, batch_size=5, verbose=0, shuffle=False)
        return found, [w.numpy() for w in model.weights]

    expected = losses(Plain)
    found = losses(
        lambda layers: tfgpipe.GPipe(
            layers, **arguments(4, 5, schedule, "never")
        )
    )
    assert largest_difference(found, expected) < 1e-10


# ---------------------------------------------------- losses of whole batches
class Overridden(tfgpipe.GPipe):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean((keras.ops.cast(y, y_pred.dtype) - y_pred) ** 2)


@pytest.mark.parametrize(
    ("cls", "loss", "schedule", "eagerly"),
    [
        (tfgpipe.GPipe, user_loss, "1f1b", False),
        (tfgpipe.GPipe, user_loss, "written", True),
        (tfgpipe.GPipe, "huber", "interleaved", False),
        (tfgpipe.GPipe, keras.losses.Dice(), "written", False),
        (Overridden, "mse", "zero_bubble", False),
    ],
    ids=["function", "eagerly", "name", "whole", "compute_loss"],
)
def test_loss_of_whole_mini_batches_needs_all_outputs_first(
    cls, loss, schedule, eagerly
):
    model = cls(
        [kl.Dense(4), kl.Dense(2)], **arguments(2, 3, schedule, "never")
    )
    model.compile("sgd", loss, run_eagerly=eagerly)
    x, y = np.ones((6, 4)), np.ones((6, 2))
    with pytest.raises(ValueError, match="whole mini-batch"):
        model.train_on_batch(x, y)
    assert np.isfinite(model.test_on_batch(x, y))  # it needs no gradient


@pytest.mark.usefixtures("float64")
def test_metric_of_whole_mini_batches_may_come_with_any_schedule():
    """Its outputs are kept, but no gradient waits for them."""
    kind = dataclasses.replace(
        KINDS["dense"], compile=lambda: {"loss": "mse", "metrics": [user_loss]}
    )
    found, expected = (
        train(kind, make, optimizers("momentum"), epochs=1)[1]
        for make in (
            lambda layers: tfgpipe.GPipe(
                layers, **arguments(4, 3, "1f1b", "always")
            ),
            Plain,
        )
    )
    assert largest_difference(found, expected) < 1e-10
