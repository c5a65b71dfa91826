"""The promise: the numbers are Keras's, whatever K, M, schedule and remat."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest
from all_pairs import all_pairs
from keras import layers as kl
from kinds import KINDS, Plain, user_loss
from matrix import (
    EARLY,
    NAMED,
    REMAT,
    SCHEDULES,
    WHOLE,
    arguments,
    largest_difference,
)
from quick import quick
from table import (
    FEATURES,
    LOOPS,
    MODES,
    ROUNDS,
    WHOLE_HEADS,
    Case,
    assert_file_goes_on,
    assert_same,
)

import tfgpipe
from tfgpipe.schedules import CHUNKS

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
        *(Case(n, *p, epochs=2) for n, p in zip(kinds, points, strict=True)),
        Case("dense", 1, 1, remat="never", optimizer="adamw", epochs=2),
        Case("dense", 8, 8, "1f1b", optimizer="adam", epochs=2),
        *(Case(kind, 4, *rest, epochs=2) for kind, *rest in OTHERS),
    ]


CASES = dealt()
# Others have as much, and take less.
SLOW = {
    *("attention", "complex", "dense", "frozen", "hinge"),
    *("masked_sequence", "sum", "tied", "user_loss", "weighted_mean"),
}


def slow(cases, chosen=()):
    """Cases, of which those with some indices are quick."""
    cases = [*cases]
    return [*quick(cases, [cases[i] for i in chosen])]


def dealt_by_schedule():
    """Each kind with each schedule, and K, M and rules in turn."""
    points = itertools.product((4, 2, 1, 5, 3), (1, 2, 3, 4, 8), REMAT)
    points = itertools.cycle(points)
    for kind, schedule in itertools.product(KINDS, [*CHUNKS, "written"]):
        k, m, remat = next(points)
        if CHUNKS.get(schedule) == 2:
            k = 4
        # A loss of whole mini-batches: other schedules refuse it.
        if kind not in WHOLE or schedule == "gpipe":
            yield Case(kind, k, m, schedule, remat, epochs=2, infers=True)


def dealt_features():
    """Each feature with each kind that may have it, and schedules in turn."""
    schedules = itertools.cycle(CHUNKS)
    names = [*FEATURES, *MODES][2:]
    for feature, kind in itertools.product(names, [*KINDS, "noisy"]):
        schedule = next(schedules)
        if kind in WHOLE:
            schedule = "gpipe"
        if feature == "head in parts" and kind in WHOLE_HEADS:
            continue
        if feature == "a share and a rule" and kind in LOOPS:
            continue  # they ask for more
        if feature == "eagerly" and kind == "noisy":
            continue  # Keras's own step, on the whole mini-batch
        if feature == "a share" and kind in LOOPS:
            feature = "a large share"
        k = 4 if CHUNKS[schedule] == 2 else 2
        rules = {"offload": "never", "a share": "never"}
        remat = rules.get(feature, "except_last")
        epochs = 2 if feature == "several steps" else 1
        yield Case(kind, k, 3, schedule, remat, feature, epochs=epochs)


# By XLA: halves that compute again and halves of what is kept, M that do not
# divide the rows, features; which kinds, is for all the same.
COMPILED = [
    Case("complex", 4, 2, feature="skipping"),
    Case("counters", 4, 4, "v_min", "always"),
    Case("dense", 4, 3, "zero_bubble", "never", "shards"),
    Case("inputs", 4, 3, "v_half", "never", "a share"),
    Case("nests", 2, 5, "written", "mapping"),
    Case("frozen", 4, 1, "interleaved", "mapping"),
    Case("regularizers", 4, 2, "zero_bubble_2p", "never", "offload"),
    Case("weighted_mean", 4, 5, "breadth_first", "never"),
]
COMPILED = [dataclasses.replace(case, compiled=True) for case in COMPILED]
# The sums of K cells are those of one, with these too.
OF_REGIONS = ("none", "a share", "head in parts", "offload", "shards")
BLOCKS = [
    Case("blocks", k, m, schedule, feature=feature, compiled=True)
    for i, feature in enumerate(OF_REGIONS)
    for k, m, schedule in ((2, 2, "gpipe"), (4, 3, NAMED[i % 4]))
]


def dealt_compiled():
    """Each kind with three schedules, each feature with some kinds.

    Loops are computed again.
    """
    kinds = [n for n in KINDS if n not in WHOLE and n != "masked_sequence"]
    schedules = itertools.cycle([*SCHEDULES, *NOT_IN_MATRIX])
    features = itertools.cycle(FEATURES)
    for i, kind in enumerate(kinds):
        for j in range(3):
            remat, feature = REMAT[(i + j) % 4], next(features)
            if kind == "masked_summary":
                remat, feature = "always", "none"
            if feature == "head in parts" and kind in WHOLE_HEADS:
                feature = "none"
            m, schedule = (3, 5, 2)[j], next(schedules)
            yield Case(kind, 4, m, schedule, remat, feature, compiled=True)


def test_cases_have_every_kind_and_every_pair_of_values():
    assert {case.model for case in CASES} == set(KINDS)
    points = {(case.k, case.m, case.schedule, case.remat) for case in CASES}
    assert points >= set(POINTS)


def test_cases_have_counts_that_must_be_known_ahead():
    """Masks, weights and rows, before any micro-batch has its loss."""
    early = {case.model for case in CASES if case.schedule in EARLY}
    assert early >= {"weighted_mean", "outputs", "class_weight"}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "case",
    [
        *quick(CASES, [case for case in CASES if case.model not in SLOW]),
        *slow(COMPILED, [1, 3]),
        *slow([*BLOCKS, *dealt_by_schedule(), *dealt_compiled()]),
    ],
    ids=str,
)
def test_fit_in_float64_equals_keras(case):
    infers = (case.k, case.m) in ((1, 1), (4, 4)) and not case.compiled
    assert_same(
        dataclasses.replace(case, infers=infers or case.infers), "keras"
    )


FEATURED = [*dealt_features()]
# What else is quick has heads in parts, shards, and weights on the host.
FIRST = [
    Case("complex", 4, 3, "zero_bubble_v", feature="a share and a rule"),
    Case("counters", feature="groups"),
    Case("dense", feature="skipping"),
    Case("inputs", 2, 3, "1f1b", "never", "offload"),
    Case("outputs", feature="eagerly"),
    Case("tied", 2, 3, "breadth_first", feature="several steps", epochs=2),
]
REPLICATED = [
    *(
        Case("dense", 2, 2, feature=feature, replicas=2, epochs=2)
        for feature in ("eagerly", "head in parts", "several steps")
    ),
    *(
        Case("noisy", 2, 4, feature=feature, replicas=2)
        for feature in FEATURES
        if feature not in ("none", "head in parts")
    ),
]
DRAWING = [
    Case("drawing", 3, 3, "zero_bubble", feature=feature)
    for feature in ("a large share", "offload", "weights on the host")
]


# What has heads in parts, columns or a loop of its own, beside Keras.
SPECIAL = [
    Case("attending", feature="shards"),
    Case("attending", 2, 1, feature="shards"),
    Case("columns", feature="shards", infers=True),
    Case("ignored", feature="head in parts"),
    Case("probabilities", feature="head in parts"),
    Case("smoothed", feature="head in parts"),
    Case("tied", 2, 2, feature="head in parts", epochs=2, infers=True),
    Case("without_rows", 2, 2, feature="head in parts"),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:Layer .*was passed an input with a mask")
@pytest.mark.parametrize("case", slow(SPECIAL, [0, 7]), ids=str)
def test_special_model_with_a_feature_equals_keras(case):
    assert_same(case, "keras")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "case",
    [
        *FIRST,
        *slow([case for case in FEATURED if case not in FIRST]),
        *slow([*REPLICATED, *DRAWING], [0]),
        Case("mapped", 2, feature="a large share"),
        Case("recomputes_frozen", feature="weights on the host"),
    ],
    ids=str,
)
def test_feature_has_the_numbers_of_a_pipeline_without(case):
    """The bits, if it adds up in the same order."""
    tolerance = 1e-10 if case.feature in ROUNDS else 0
    without = dataclasses.replace(case, feature="none")
    assert_same(case, without, tolerance)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", slow(BLOCKS, [0]), ids=str)
def test_compiled_bits_of_equal_blocks_do_not_depend_on_k(case):
    assert_same(case, dataclasses.replace(case, k=1, schedule="gpipe"), 0)


# A case, and another that has its bits.
BITWISE = {
    case: dataclasses.replace(case, k=1)
    for case in (
        Case("pairs", 4),
        Case("tied", 4),
        Case("noisy", 4),
        Case("noisy", 3, 2, replicas=2),
    )
}
# The gradients of micro-batches are added in the same order.
BITWISE |= dict.fromkeys(
    (
        Case("pairs", 4, 3, "interleaved", "always"),
        Case("pairs", 2, 3, "zero_bubble", "always"),
    ),
    Case("pairs", 1, 3, "1f1b", "never"),
)


@pytest.mark.parametrize("case", slow(BITWISE, [0, 5]), ids=str)
def test_weights_are_bit_identical_for_any_number_of_cells(case):
    assert_same(case, BITWISE[case], 0)


FILES = [
    Case("inputs", 3, 2, "1f1b"),
    Case("noisy", 3, 2, "1f1b", feature="offload"),
    Case("noisy", 3, 2, "1f1b", feature="shards"),
    Case("noisy", 3, 2, "1f1b", feature="weights on the host"),
    Case("tied", 5, 2),
]


@pytest.mark.parametrize("case", slow(FILES, [3]), ids=str)
def test_file_goes_on_with_other_cells_bit_by_bit(case):
    changes = {"num_partitions": 2, "schedule": "gpipe"}
    assert_file_goes_on(case, **changes, weights_on="devices")


class Stop(kl.Layer):
    """Nothing before it is trained by what follows."""

    def call(self, x):
        return keras.ops.stop_gradient(x)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("schedule", ["zero_bubble", "zero_bubble_v"])
def test_cell_without_gradients_of_its_inputs_does_not_stop_others(schedule):
    """What comes before it has a loss of its own."""
    x = np.random.default_rng(0).normal(size=(8, 4))
    found, given = [], arguments(4, 4, schedule, "never")
    for make in (Plain, lambda own: tfgpipe.GPipe(own, **given)):
        keras.utils.set_random_seed(1)
        own = kl.Dense(4, "tanh", activity_regularizer="l2")
        model = make([kl.Dense(4), kl.Dense(4), own, Stop(), kl.Dense(4)])
        model.compile("sgd", "mse")
        model.fit(x, x, batch_size=8, epochs=2, verbose=0)
        found.append([w.numpy() for w in model.weights])
    assert largest_difference(*found) < 1e-10


# ------------------------------------------------------- schedule by schedule
@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "case",
    [
        # Masks follow from the micro-batch, not from when it is computed.
        Case("noisy", 4, 3, "written"),
        # A mask that depends on what layers compute is known ahead.
        Case("drawn_mask", 5, 3, "written", "always"),
    ],
    ids=str,
)
def test_numbers_do_not_depend_on_the_schedule(case):
    assert_same(case, dataclasses.replace(case, schedule="gpipe"), 1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:Layer .*was passed an input with a mask")
@pytest.mark.parametrize(
    "case",
    slow(
        [
            # A half of a task has nothing to carry.
            Case("doubled", 3, 3, "zero_bubble", "always"),
            Case("lookups", 2, 3),
            # A tensor that crosses twice is one for masks.
            Case("masked_twice", 5, 3, infers=True),
            # Its outputs are kept, but no gradient waits for them.
            Case("whole_metric", 4, 3, "1f1b", "always"),
            Case("masked_twice", 1, 1, remat="never", infers=True),
            Case("lookups", 2, 2, feature="eagerly"),
        ],
        range(4),
    ),
    ids=str,
)
def test_odd_model_equals_keras(case):
    assert_same(case, "keras")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_mixed_precision_does_not_depend_on_the_schedule(policy, schedule):
    keras.config.set_dtype_policy(policy)
    assert_same(Case("pairs", 2, 3, schedule), Case("pairs", 2), 1e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("schedule", ["written", *NAMED])
def test_batch_of_fewer_rows_than_micro_batches(schedule):
    """With rows that are known when the step is traced, and later."""
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

    given = arguments(4, 5, schedule, "never")
    found = losses(lambda layers: tfgpipe.GPipe(layers, **given))
    assert largest_difference(found, losses(Plain)) < 1e-10


# ---------------------------------------------------- losses of whole batches
class Overridden(tfgpipe.GPipe):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean((keras.ops.cast(y, y_pred.dtype) - y_pred) ** 2)


@pytest.mark.parametrize(
    ("cls", "loss", "schedule"),
    [
        (tfgpipe.GPipe, user_loss, "1f1b"),
        (tfgpipe.GPipe, "huber", "interleaved"),
        (tfgpipe.GPipe, keras.losses.Dice(), "written"),
        (Overridden, "mse", "zero_bubble"),
    ],
    ids=["function", "name", "whole", "compute_loss"],
)
def test_loss_of_whole_mini_batches_needs_all_outputs_first(
    cls, loss, schedule
):
    layers = [kl.Dense(4), kl.Dense(2)]
    model = cls(layers, **arguments(2, 3, schedule, "never"))
    model.compile("sgd", loss)
    x, y = np.ones((6, 4)), np.ones((6, 2))
    with pytest.raises(ValueError, match="does not add up over rows"):
        model.train_on_batch(x, y)
    assert np.isfinite(model.test_on_batch(x, y))  # it needs no gradient
