"""The fuzzer finds faults by chance whose cures are taken out.

Each must be found by one of the first 300 cases. Only those that have what the
fault needs are run, from one on that is known to find it: a change of the
generator may ask for another one, which `candidates` names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import compare
import pytest
import tensorflow as tf
from case import Case
from generate import generate

from tfgpipe.cells import ModelCall
from tfgpipe.graphs import gradient_sums, same_graph
from tfgpipe.loss import WholeMiniBatchLoss
from tfgpipe.loss.objective import Penalty
from tfgpipe.sequence import source, steps
from tfgpipe.state import flow, rules
from tfgpipe.state import scope as state_scope
from tfgpipe.state.batch_normalization import MovingStatistics

pytestmark = pytest.mark.slow
MOST = 300


class _WithoutStops:
    """TensorFlow, but gradients stop nowhere."""

    stop_gradient = staticmethod(tf.identity)

    def __getattr__(self, name):
        return getattr(tf, name)


def let_gradients_through_state(monkeypatch):
    monkeypatch.setattr(state_scope, "tf", _WithoutStops())


def follow_next_seeds_only(monkeypatch):
    monkeypatch.setattr(state_scope, "_is_next", lambda *_: True)


def average_equal_values(monkeypatch):
    def mean(values, micro_batches):
        parts = [
            value * micro_batches.fraction(m, value.dtype)
            for m, value in enumerate(values)
        ]
        return rules.sum_of(parts)

    monkeypatch.setattr(rules, "weighted_mean", mean)


def take_complex_state_for_integers(monkeypatch):
    rule = flow.StateFlow._rule

    def first(self, variable):
        is_complex = tf.as_dtype(variable.dtype).is_complex
        return rules.FirstRule() if is_complex else rule(self, variable)

    monkeypatch.setattr(flow.StateFlow, "_rule", first)


def take_constants_for_equal(monkeypatch):
    original = same_graph.without_names

    def without(node, *args):
        original(node, *args)
        if node.op == "Const":
            node.attr.pop("value")

    monkeypatch.setattr(same_graph, "without_names", without)


def regularise_own_weights(monkeypatch):
    times = Penalty.times

    def own(self, factor):
        found = times(self, factor)
        return [(v, g) for v, g in found if v.regularizer is not None]

    monkeypatch.setattr(Penalty, "times", own)


def add_up_replacements(monkeypatch):
    monkeypatch.setattr(gradient_sums, "is_replaced", lambda _: False)


def take_no_gradient_for_zero(monkeypatch):
    original = WholeMiniBatchLoss._differentiated

    def differentiated(self, data, y_pred, extra, values):
        found = original(self, data, y_pred, extra, values)
        zeros = [
            [tf.zeros_like(v) if d is None else d for v, d in zip(*own)]
            for own in zip(extra, found.extra)
        ]
        return found._replace(extra=zeros)

    monkeypatch.setattr(WholeMiniBatchLoss, "_differentiated", differentiated)


def look_at_no_class(monkeypatch):
    monkeypatch.setattr(source, "_overridden", lambda _: [])


def move_by_the_momentum(monkeypatch):
    own = ModelCall.normalizations.fget

    def always_at_the_end(self):
        return own(dataclasses.replace(self, is_split=True))

    def assign(self, variable, old, value):
        layer, i = self._owners[id(variable)]
        self.rules[id(layer)][-1][i] = layer.momentum, 1.0 - layer.momentum

    monkeypatch.setattr(
        ModelCall, "normalizations", property(always_at_the_end)
    )
    monkeypatch.setattr(MovingStatistics, "assign", assign)


def look_at_no_rows(monkeypatch):
    monkeypatch.setattr(steps, "check_model_rows", lambda *_: None)


@dataclasses.dataclass(frozen=True)
class Cure:
    """What is taken out.

    Attributes:
        take_out: Does so, by a `monkeypatch`.
        first: The case that is tried first.
        needs: Tags of a case that may find the fault.
    """

    take_out: Callable[[Any], None]
    first: int
    needs: frozenset[str] = frozenset()


def _needs(*tags: str) -> frozenset[str]:
    return frozenset(tags)


CURES = {
    "gradients flow through the assignment of state": Cure(
        let_gradients_through_state, 82, _needs("layer kept_target of after")
    ),
    "a seed that was assigned is not followed": Cure(
        follow_next_seeds_only, 21, _needs("layer unordered_noise", "M 1")
    ),
    "an infinity is averaged with a micro-batch of no rows": Cure(
        average_equal_values,
        41,
        _needs("layer kept_infinite", "micro-batches without rows"),
    ),
    "complex state is that of the first micro-batch": Cure(
        take_complex_state_for_integers, 91, _needs("layer kept_complex", "M 2")
    ),
    "cells of other numbers are taken for alike": Cure(
        take_constants_for_equal, 25, _needs("alike cells")
    ),
    "a regulariser's gradient is that of its own weight": Cure(
        regularise_own_weights, 2, _needs("layer near_dense")
    ),
    "what overwrites a weight is added up": Cure(
        add_up_replacements, 67, _needs("layer overwritten", "M 2")
    ),
    "losses that are left out have gradients of zero": Cure(
        take_no_gradient_for_zero,
        238,
        _needs("layer idle", "override compute_loss", "optimizer AdamW"),
    ),
    "losses of a functional model's class are left out": Cure(
        look_at_no_class,
        230,
        _needs("override losses of the model", "functional"),
    ),
    "statistics move by the momentum, whatever a layer assigns": Cure(
        move_by_the_momentum, 150, _needs("layer unbiased_norm", "M 1", "R 1")
    ),
    "outputs of rows by rows are those of micro-batches": Cure(
        look_at_no_rows, 148, _needs("layer op of similarities")
    ),
}


def candidates(cure: Cure, kinds: str) -> Iterator[Case]:
    for index in range(cure.first, MOST):
        case = generate(0, index, **{kinds: True})
        if cure.needs <= set(case.tags()):
            yield case


def check_found_without(cure: Cure, kinds: str, monkeypatch: Any) -> None:
    """Some drawn case fails without the cure, and none of it with it.

    Args:
        cure: What is taken out.
        kinds: Which ones are drawn, "wide" or "odd".
        monkeypatch: Takes it out.
    """
    with monkeypatch.context() as patch:
        cure.take_out(patch)
        found = next(
            case
            for case in candidates(cure, kinds)
            if compare.run(case).kind == "failed"
        )
    assert compare.run(found).kind in ("passed", "refused")


@pytest.mark.parametrize("fault", CURES)
def test_fault_is_found_by_chance_without_its_cure(fault, monkeypatch):
    check_found_without(CURES[fault], "wide", monkeypatch)
