"""The fuzzer finds faults of odd layers whose cures are taken out.

Each must be found by one of the first 300 cases of `generate_odd.py`. Only
those that have what the fault needs are run, from one on that is known to find
it, see `test_wide_cures.py`.
"""

from __future__ import annotations

import contextlib
import importlib

import keras
import pytest
from test_wide_cures import Cure, _needs, check_found_without

from tfgpipe import internals
from tfgpipe.cells import tracer
from tfgpipe.graphs import TracedModel
from tfgpipe.loss import row_wise
from tfgpipe.trial import compare as trial_compare

pytestmark = pytest.mark.slow
PRIVATE = importlib.import_module("tfgpipe.internals.keras")
steps = importlib.import_module("tfgpipe.model.step")


def make_storage_as_it_is_now(monkeypatch):
    monkeypatch.setattr(PRIVATE, "_as_made", lambda _: contextlib.nullcontext())


def train_what_says_so(monkeypatch):
    monkeypatch.setattr(internals, "is_trained", lambda v: v.trainable)


def leave_scopes_to_keras(monkeypatch):
    scope, plain = internals.ReadingScope, keras.StatelessScope
    monkeypatch.setattr(scope, "__enter__", plain.__enter__)
    monkeypatch.setattr(scope, "__exit__", plain.__exit__)
    refuse_no_storage(monkeypatch)


def capture_storage(monkeypatch):
    monkeypatch.setattr(
        PRIVATE, "reading_storage", lambda _: contextlib.nullcontext()
    )
    refuse_no_storage(monkeypatch)


def refuse_no_storage(monkeypatch):
    monkeypatch.setattr(tracer, "_check_captured", lambda *_: None)


def believe_that_losses_add_up(monkeypatch):
    monkeypatch.setattr(row_wise, "_adds_up", lambda *_: True)


def scale_losses_as_numbers(monkeypatch):
    monkeypatch.setattr(steps, "has_own_scale", lambda _: False)


def cast_inputs_at_once(monkeypatch):
    unpack = steps.TrainingSteps._unpack

    def unpacked(self, data, with_loss=True):
        (x, *labels), arrival = unpack(self, data, with_loss)
        return (self.as_taken(x), *labels), arrival

    monkeypatch.setattr(steps.TrainingSteps, "_unpack", unpacked)


def compare_no_outputs(monkeypatch):
    monkeypatch.setattr(trial_compare, "output_distance", lambda *_: 0.0)
    monkeypatch.setattr(trial_compare, "of_gradients", lambda *_: ())


def compare_no(what):
    def take_out(monkeypatch):
        for one in (what, "gradients"):  # which would tell, too
            monkeypatch.setattr(trial_compare, f"of_{one}", lambda *_: ())

    return take_out


def take_all_lookups_for_those_of_rows(monkeypatch):
    monkeypatch.setattr(TracedModel, "varying", lambda _: lambda _: True)


CURES = {
    "what is frozen when it is placed is not watched": Cure(
        make_storage_as_it_is_now, 64, _needs("unfrozen")
    ),
    "what is made frozen is trained": Cure(
        train_what_says_so, 40, _needs("layer frozen_weight of False")
    ),
    "a scope inside a layer reads storage": Cure(
        leave_scopes_to_keras, 21, _needs("layer substituted")
    ),
    "a tape inside a layer finds no handle": Cure(
        leave_scopes_to_keras, 161, _needs("layer differentiating of weights")
    ),
    "storage that a layer keeps is captured": Cure(
        capture_storage, 12, _needs("layer storage_reader")
    ),
    "a loss of rows counts": Cure(
        believe_that_losses_add_up, 59, _needs("loss CountingRows")
    ),
    "a loss of rows draws": Cure(
        believe_that_losses_add_up, 195, _needs("loss DrawingRows")
    ),
    "an optimizer scales the loss": Cure(
        scale_losses_as_numbers, 23, _needs("optimizer Squaring")
    ),
    "a loss gets bytes that were cast": Cure(
        cast_inputs_at_once, 0, _needs("inputs bytes", "override loss of x")
    ),
    "a metric gets bytes that were cast": Cure(
        cast_inputs_at_once, 0, _needs("inputs bytes", "override metrics of x")
    ),
    "a loss gets inputs without names": Cure(
        cast_inputs_at_once, 0, _needs("inputs names", "override loss of x")
    ),
    "rows are mixed": Cure(
        compare_no_outputs, 117, _needs("layer mixed", "M 2")
    ),
    "state is no mean": Cure(
        compare_no("state"), 0, _needs("layer odd_state of none")
    ),
    "an added loss is no mean": Cure(
        compare_no("losses"), 0, _needs("layer odd_penalty")
    ),
    "a metric of a layer is one of micro-batches": Cure(
        compare_no("metrics"), 0, _needs("layer odd_metric")
    ),
    "positions are taken for rows": Cure(
        take_all_lookups_for_those_of_rows, 0, _needs("layer positions")
    ),
}


@pytest.mark.parametrize("fault", CURES)
def test_fault_is_found_by_chance_without_its_cure(fault, monkeypatch):
    check_found_without(CURES[fault], "odd", monkeypatch)
