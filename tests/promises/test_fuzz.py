"""Fixed random cases, which are equal to plain Keras or refused by name.

`make fuzz` runs others.
"""

import collections
import dataclasses

import compare
import outcome
import pytest
from case import Case, Spec
from generate import generate
from grouping import is_random, is_random_in_inference
from layer_kinds import CLASSES, KINDS
from objectives import LOSSES, METRICS, OPTIMIZERS, STATEFUL
from own_optimizers import NEW, OWN, SCALING
from quick import quick

import tfgpipe

SEED = 0
# Few, chosen to have most of what `covered` names, and the rest of it.
QUICK = [
    53,
    92,
    212,
    420,
    646,
    1107,
    1183,
    1733,
    2171,
    2240,
    2858,
    2939,
]
CASES = [
    *QUICK,
    29,
    1015,
    1072,
    2296,
    3,
    47,
    99,
    143,
    497,
    565,
    569,
    570,
    660,
    1179,
    1284,
    1710,
    1986,
    2181,
    2292,
    2343,
    2486,
]


def covered(index):
    """What a case has, without what tests of their own have all of.

    Losses and metrics are those of `test_row_wise.py`, optimizers those of
    `test_optimizers.py`. A branch draws random numbers, which is refused.
    """
    others = (
        "loss ",
        "metric ",
        "optimizer ",
        "layer again of",
        "layer block of",
        "layer lambda of",
    )
    tags = set(generate(SEED, index).tags()) - {"layer branch"}
    return {tag for tag in tags if not tag.startswith(others)}


@pytest.mark.parametrize(
    "index",
    [
        *QUICK,
        *(
            pytest.param(i, marks=pytest.mark.slow)
            for i in dict.fromkeys([*CASES, *range(100)])
            if i not in QUICK
        ),
    ],
)
def test_random_case_is_equal_to_keras(index):
    found = compare.run(generate(SEED, index))
    if found.kind in ("refused", "skipped", "unstable") and index not in CASES:
        pytest.skip(f"{found.kind}: {found.reason}")
    assert found.kind == "passed", found.detail


# A functional model with a regulariser that reads another weight; a target
# network; an overridden loss.
@pytest.mark.parametrize("index", quick([2, 82, 141], [2]))
def test_random_case_of_the_wide_kinds_is_equal_to_keras(index):
    found = compare.run(generate(SEED, index, wide=True))
    assert found.kind == "passed", found.detail


def test_cases_of_the_suite_have_all_that_thousands_have():
    every = set().union(*map(covered, range(2000)))
    assert set().union(*map(covered, CASES)) >= every


def dense(name, **options):
    return Spec(name, "dense", {"units": 4, **options})


def dropout(name, **options):
    return Spec(name, "dropout", {"rate": 0.4, **options})


# ------------------------------------------------------------- the generator
@pytest.mark.parametrize("kinds", [(False, False), (True, False), (True, True)])
def test_case_is_the_same_every_time_and_can_be_printed(kinds):
    for index in range(200):
        case = generate(3, index, *kinds)
        assert case == generate(3, index, *kinds) == Case.parse(str(case))


def test_cases_cover_every_kind_of_everything():
    tags = collections.Counter(
        tag
        for index in range(2000)
        for wide, odd in ((False, False), (True, False), (True, True))
        for tag in generate(0, index, wide, odd).tags()
    )
    expected = [
        *(f"layer {kind}" for kind in {*CLASSES, *KINDS} - {"reshape"}),
        *(f"loss {name}" for name in {*LOSSES, *STATEFUL}),
        *(f"metric {name}" for name in METRICS),
        *(f"optimizer {name}" for name in {*OPTIMIZERS, *OWN, *NEW, *SCALING}),
        "layer fixed of dropout",
        "layer hidden of batch_norm",
        "then file",
        "R 3",
        "functional",
        "layer model",
        "layer kept_average of after",
        "layer lookup of draws",
        "layer batch_norm of True",  # renorm
        "layer frozen_weight of False",
        "layer sized of 0",
        "layer sized of 1",
        "length 2050",
        "inputs bytes",
        "inputs names",
        "override loss of x",
        "override losses",
        "override assigns resources",
        "override own policy",
        "override own weights",
        "unfrozen",
        "toggle trainable",
        "skips a mini-batch",
        "alike cells",
        "other_micro_batches 3",
        "other_replicas 2",
    ]
    assert not [tag for tag in expected if tags[tag] < 3]


def test_random_layers_are_found_inside_of_others():
    inner = {"name": "b", "kind": "dropout", "options": {"rate": 0.4}}
    nested = Spec("a", "sequential", {"layers": [inner]})
    assert is_random([dense("c"), nested])
    assert is_random([Spec("a", "hidden", {"inner": "batch_norm"})])
    assert not is_random([dense("a")])


def test_a_nested_layer_that_always_trains_is_found():
    for value in (True, False):
        fixed = {
            "name": "b",
            "kind": "fixed",
            "options": {"inner": "dropout", "value": value},
        }
        nested = Spec("a", "sequential", {"layers": [fixed]})
        assert is_random_in_inference([dense("c"), nested]) == value
    assert not is_random_in_inference([dropout("a")])


# ------------------------------------------------------- what is made of them


def test_difference_is_a_failure(monkeypatch):
    """A pipeline with another loss than Keras's."""
    original = compare.case_models.pipeline

    def wrong(case, *args, **kwargs):
        other = dataclasses.replace(case, losses="MeanAbsoluteError")
        return original(other, *args, **kwargs)

    monkeypatch.setattr(compare.case_models, "pipeline", wrong)
    found = compare.run(Case(layers=(dense("a"),)))
    assert found.kind == "failed"
    assert found.reason.startswith("against Keras")


def mixing_rows(trial):
    """A case of a layer that mixes rows, and is tried or not."""
    make = tfgpipe.GPipe.__init__

    def making(self, *args, **kwargs):
        make(self, *args, **{**kwargs, "trial": trial})

    mixed = Spec("a", "mixed", {"how": "cumsum", "place": "loop"})
    return making, Case(layers=(mixed, dense("b")), num_micro_batches=2)


def test_mixed_rows_are_told_or_a_failure(monkeypatch):
    for trial, expected in (("warn", "passed"), ("off", "failed")):
        making, case = mixing_rows(trial)
        monkeypatch.setattr(tfgpipe.GPipe, "__init__", making)
        assert compare.run(case).kind == expected
        monkeypatch.undo()


def test_clear_error_is_a_refusal_and_another_one_is_not():
    found = compare.run(
        Case(
            layers=(dense("a"), dense("b")),
            losses="own_loss",
            schedule="1f1b",
            num_partitions=2,
            num_micro_batches=2,
        )
    )
    assert found.kind == "refused"
    assert outcome.of_error(ValueError("nothing"), "x").kind == "failed"
    assert outcome.of_error(KeyError((0, 0)), "x").kind == "failed"


def test_what_keras_refuses_is_skipped():
    found = compare.run(
        Case(layers=(Spec("a", "reshape", {"target_shape": [3]}),))
    )
    assert found.kind == "skipped"
    assert found.reason.startswith("Keras: ")
