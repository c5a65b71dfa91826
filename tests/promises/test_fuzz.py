"""Fixed random cases, which are equal to plain Keras or refused by name.

`make fuzz` runs others.
"""

import collections
import dataclasses

import compare
import pytest
from case import Case, Spec
from generate import generate
from grouping import is_random, is_random_in_inference
from layer_kinds import CLASSES, HOLDERS, KINDS, READERS
from objectives import LOSSES, METRICS, OPTIMIZERS, STATEFUL
from own_optimizers import NEW, OWN, SCALING
from quick import quick

import tfgpipe

SEED = 0
# Of many kinds, and equal to Keras; these take least.
QUICK = [6, 9, 10]


@pytest.mark.parametrize("index", quick(range(150), QUICK))
def test_random_case_is_equal_to_keras(index):
    found = compare.run(generate(SEED, index))
    if found.kind in ("refused", "skipped", "unstable") and index not in QUICK:
        pytest.skip(f"{found.kind}: {found.reason}")
    assert found.kind == "passed", found.detail


def dense(name, **options):
    return Spec(name, "dense", {"units": 4, **options})


# ------------------------------------------------------------- the generator
def test_case_is_the_same_every_time_and_can_be_printed():
    for index in range(200):
        case = generate(3, index)
        assert case == generate(3, index) == Case.parse(str(case))


def test_cases_cover_every_kind_of_everything():
    tags = collections.Counter(
        tag for index in range(4000) for tag in generate(0, index).tags()
    )
    kinds = {*CLASSES, *HOLDERS, *KINDS, *READERS}
    # Of fixed cases alone.
    kinds -= {"reshape", "positions", "inner_of", "plus"}
    expected = [
        *(f"layer {kind}" for kind in kinds),
        *(f"loss {name}" for name in {*LOSSES, *STATEFUL}),
        *(f"metric {name}" for name in METRICS),
        *(f"optimizer {name}" for name in {*OPTIMIZERS, *OWN, *NEW, *SCALING}),
        *("layer sized of 0", "layer sized of 1", "then file", "outputs"),
        *("unfreezes True", "cells", "num_replicas 3", "bad_row"),
        *("toggle trainable", "other_micro_batches 3", "other_replicas 2"),
        *(f"override {name}" for name in compare.mid_run.OVERRIDES),
    ]
    assert not [tag for tag in expected if tags[tag] < 3]


def test_random_layers_are_found_inside_of_others():
    def nested(kind, **options):
        inner = {"name": "b", "kind": kind, "options": options}
        return [dense("c"), Spec("a", "sequential", {"layers": [inner]})]

    assert is_random(nested("dropout", rate=0.4))
    assert is_random([Spec("a", "hidden", {"inner": "batch_norm"})])
    assert not is_random([dense("a")])
    for value in (True, False):
        fixed = nested("fixed", inner="dropout", value=value)
        assert is_random_in_inference(fixed) == value


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


@pytest.mark.parametrize(
    ("trial", "expected"), [("warn", "passed"), ("off", "failed")]
)
def test_mixed_rows_are_told_or_a_failure(trial, expected, monkeypatch):
    make = tfgpipe.GPipe.__init__

    def making(self, *args, **kwargs):
        make(self, *args, **{**kwargs, "trial": trial})

    monkeypatch.setattr(tfgpipe.GPipe, "__init__", making)
    mixed = Spec("a", "mixed", {"how": "cumsum", "place": "loop"})
    case = Case(layers=(mixed, dense("b")), num_micro_batches=2)
    assert compare.run(case).kind == expected


def test_clear_error_is_a_refusal_and_another_one_is_not():
    point = {"num_partitions": 2, "num_micro_batches": 2, "schedule": "1f1b"}
    layers = dense("a"), dense("b")
    found = compare.run(Case(layers=layers, losses="own_loss", **point))
    assert found.kind == "refused"
    for error in (ValueError("nothing"), KeyError((0, 0))):
        assert compare.of_error(error, "x").kind == "failed"
    reshape = Spec("a", "reshape", {"target_shape": [3]})
    found = compare.run(Case(layers=(reshape,)))
    assert found.kind == "skipped" and found.reason.startswith("Keras: ")
