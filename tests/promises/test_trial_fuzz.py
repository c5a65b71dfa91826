"""Composed layers that mix rows are named when they are tried; others not.

`make fuzz FUZZ_FLAGS=--trial` draws many.
"""

import pytest
import trial_fuzz
from row_operations import APART, MIXING, PLACES
from trial_fuzz import Composition, generate, run, said

# Those before and behind it keep what the operation does.
CHOSEN = {
    "outputs": Composition(
        (3, 4),
        ("dense", "layer_norm"),
        (
            ("loop", False, "tanh"),
            ("branch", True, "cumsum"),
            ("map", False, "centre"),
        ),
    ),
    "outputs of any length": Composition(
        (None, 4),
        ("batch_norm", "dropout"),
        (("branch of a loop", True, "sort"), ("function", False, "scale")),
    ),
    "outputs, twice": Composition((4,), (), (("map", True, "roll"),) * 2),
    "a loss that is no mean": Composition(
        (4,), ("dense",), (("function", True, "matmul"),), "loss"
    ),
    "state": Composition((4,), (), (("plain", True, "neighbours"),), "state"),
    "a metric": Composition(
        (3, 4), ("dense",), (("loop", True, "scan"),), "metric"
    ),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_composed_layer_that_mixes_rows_is_named(name):
    kind, reason = run(CHOSEN[name])
    assert kind == "passed", reason
    assert any("'composed'" in text for text in said(CHOSEN[name]))


@pytest.mark.parametrize("use", ["outputs", "loss", "state", "metric"])
def test_composed_layer_that_treats_rows_apart_is_not_named(use):
    """All operations, in all places, one after the other."""
    places = sorted(PLACES)
    operations = tuple(
        (places[i % len(places)], False, name)
        for i, name in enumerate(sorted(APART))
    )
    composition = Composition((3, 4), ("dense",), operations, use)
    assert run(composition)[0] == "passed"
    assert not said(composition)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(60))
def test_random_layer_is_named_if_it_mixes_rows(index):
    kind, reason = run(generate(0, index))
    assert kind in ("passed", "unclear"), reason


def test_compositions_are_the_same_every_time_and_can_be_printed():
    every = [generate(3, index) for index in range(500)]
    assert every == [generate(3, index) for index in range(500)]
    assert every == [Composition.parse(str(one)) for one in every]
    tags = {tag for one in every for tag in one.tags()}
    assert {f"mixes {name}" for name in MIXING} <= tags
    assert {f"apart {name}" for name in APART} <= tags
    assert {f"in {place}" for place in PLACES} <= tags


def test_trial_that_says_nothing_is_a_failure(monkeypatch):
    monkeypatch.setattr(trial_fuzz, "said", lambda _: [])
    kind, reason = run(CHOSEN["outputs"])
    assert kind == "failed"
    assert "not named" in reason
