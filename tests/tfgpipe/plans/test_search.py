"""The settings found are those of an exhaustive search."""

import itertools
import math

import pytest
from quick import quick
from simple_layers import equal_tasks, random_seconds, size

from tfgpipe.partition import partition
from tfgpipe.plans.prediction import Setting, predict
from tfgpipe.plans.search import (
    RULES,
    PlanProblem,
    _candidates,
    fastest_settings,
    prediction_that_fits,
)
from tfgpipe.plans.workload import Machine, Workload

LINK = Machine(1, 1, 1e3, 1e3, latency=0.05, task_seconds=0, efficiency=1)


def problem(seconds, limit=math.inf, devices=4, machine=LINK, **changed):
    sizes = [
        size(1 + i % 3, kept=16 + 8 * (i % 2)) for i in range(len(seconds))
    ]

    def workload_of(rows):
        times = [equal_tasks(rows * s / 8) for s in seconds]
        return Workload(sizes, 8, times, 0.1, rows)

    options = {
        "workload_of": workload_of,
        "cut": lambda costs, k, regions: partition(costs, k),
        "num_layers": len(seconds),
        "batch_size": 16,
        "num_devices": devices,
        "num_replicas": (1,),
        "limit": limit,
        "machine": machine,
    }
    return PlanProblem(**{**options, **changed})


@pytest.mark.parametrize("seed", quick(range(4), [0]))
@pytest.mark.parametrize("limit", [math.inf, 1200, 700])
def test_best_of_all_candidates_is_found(seed, limit):
    """Bounds leave nothing out; the first has few micro-batches."""
    given = problem(random_seconds(8, seed), limit)
    every = [
        prediction_that_fits(given, setting)
        for _, setting in _candidates(given)
    ]
    expected = sorted(
        (p for p in every if p is not None), key=lambda p: p.step_seconds
    )
    assert expected or limit == 700
    if not expected:
        assert fastest_settings(given, 3) == []
        return
    first, *others = fastest_settings(given, 3)
    least = expected[0].step_seconds
    assert first.step_seconds <= 1.02 * least
    assert first.setting.num_micro_batches == min(
        p.setting.num_micro_batches
        for p in expected
        if p.step_seconds <= 1.02 * least
    )
    seconds = [p.step_seconds for p in expected]
    seconds.remove(first.step_seconds)
    assert [p.step_seconds for p in others] == pytest.approx(seconds[:2])


def test_rules_are_the_fastest_that_fit():
    """Cell by cell: under 1F1B later cells hold less, and keep more."""
    given = problem([1.0] * 8, machine=None)
    setting = Setting(1, 4, (2,) * 4, 8, "1f1b", ("never",) * 4)
    workload = given.workload_for(setting)
    everything = predict(workload, setting, None).device_bytes
    limit = sorted(everything)[1]
    tight = problem([1.0] * 8, limit, machine=None)
    found = prediction_that_fits(tight, setting)
    trials = [
        predict(workload, setting._replace(remat=rules), None)
        for rules in itertools.product((*RULES, "always"), repeat=4)
    ]
    fits = [t for t in trials if max(t.device_bytes) <= limit]
    assert "never" in found.setting.remat
    assert len(set(found.setting.remat)) > 1
    assert found.step_seconds == min(t.step_seconds for t in fits)


def test_cut_moves_where_weights_do_not_fit():
    """Memory first, then time."""
    seconds = [1.0, 1.0, 1.0, 5.0]
    sizes = [size(100), size(100), size(100), size(1)]

    def workload_of(rows):
        return Workload(sizes, 8, [equal_tasks(s) for s in seconds], 0, 1)

    setting = Setting(1, 2, (3, 1), 1, "gpipe", ("never",) * 2)
    three = 3 * 100 * 16
    given = problem(seconds, three - 1, 2, workload_of=workload_of)
    found = prediction_that_fits(given, setting)
    assert found.setting.layers_per_cell == (2, 2)


def test_weights_are_on_the_host_where_no_devices_hold_them():
    (known,) = fastest_settings(problem([1.0] * 24, devices=2, batch_size=1), 1)
    everything = sum(sum(own[:3]) for own in known.memory)
    limit = 0.45 * everything  # of each of two devices
    choices = fastest_settings(
        problem([1.0] * 24, limit, devices=2, batch_size=1), 5
    )
    assert choices
    for found in choices:
        assert found.setting.weights_on == "host"
        assert max(found.device_bytes) <= limit
    (found,) = fastest_settings(
        problem([1.0] * 24, 3 * limit, devices=2, batch_size=1), 1
    )
    assert found.setting.weights_on == "devices"


def test_replicas_are_chosen_if_asked_for():
    given = problem([1.0] * 8, num_replicas=(1, 2, 4), machine=None)
    replicas = {p.setting.num_replicas for p in fastest_settings(given, 100)}
    assert replicas == {1, 2, 4}
