"""Finds the settings that train fastest within a memory limit.

For every number of replicas, devices, cells and micro-batches, and every
schedule, there is a time that no order of the tasks is below. Settings are
predicted in the order of these bounds, until the next bound is above the best
predictions: so the search is exact, and most settings are never simulated.

Predictions are not exact. So of settings that are nearly as fast as the fastest
the first is the one of fewest micro-batches: a cost of each task that is not
modelled favours fewer tasks.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tfgpipe.planning.fit import Problem, fitted, may_fit
from tfgpipe.planning.prediction import Prediction, predict
from tfgpipe.planning.setting import Setting
from tfgpipe.planning.workload import Workload
from tfgpipe.schedules import CHUNKS

_SHAPES = [
    (name, chunks)
    for name, own in CHUNKS.items()
    for chunks in ((2, 4) if own is None else (own,))
]
# Of a step: beyond, its graph takes minutes to trace.
_MOST_MICRO_BATCHES = 512
_MOST_TASKS = 40_000


# So much slower than the fastest is nearly as fast.
NEAR = 1.02


class _Candidate(NamedTuple):
    bound: float
    setting: Setting


def search(problem: Problem, count: int) -> list[Prediction]:
    """The settings that are nearly as fast as the fastest, then the others.

    The first is the one of these with the fewest micro-batches; what follows
    comes in the order of its time.

    Args:
        problem: What is to be planned.
        count: How many to return; fewer, if there are fewer that fit.
    """
    found: list[Prediction] = []
    for bound, setting in sorted(_candidates(problem)):
        if len(found) >= count and bound >= max(
            NEAR * found[0].step_seconds, found[count - 1].step_seconds
        ):
            break
        prediction = fitted(problem, setting)
        if prediction is not None:
            found.append(prediction)
            # Of equally fast ones, what holds less.
            found.sort(key=lambda p: (p.step_seconds, max(p.device_bytes)))
    if not found:
        return []
    near = [p for p in found if p.step_seconds <= NEAR * found[0].step_seconds]
    first = min(near, key=lambda p: p.setting.num_micro_batches)
    others = [p for p in found if p is not first]
    return [first, *others][:count]


def _candidates(problem: Problem) -> Iterator[_Candidate]:
    most = len(problem.starts)
    for replicas, d in _grids(problem):
        if not may_fit(problem, replicas, d):
            continue
        for m in _micro_batches(problem.batch_size // replicas, d):
            shapes = _SHAPES if d > 1 else [("gpipe", 1)]
            workload = problem.workload(replicas, m)
            for schedule, chunks in shapes:
                if d * chunks > most or 3 * m * d * chunks > _MOST_TASKS:
                    continue
                cut = _even_cut(problem, workload, d * chunks)
                if cut is None:
                    continue
                setting = Setting(
                    replicas, d, cut, m, schedule, ("never",) * len(cut)
                )
                yield _Candidate(_bound(workload, setting), setting)


def _grids(problem: Problem) -> Iterator[tuple[int, int]]:
    """Numbers of replicas, and of the devices of each."""
    for replicas in problem.num_replicas:
        most = min(problem.num_devices // replicas, len(problem.starts))
        for d in range(1, most + 1):
            is_round = d & (d - 1) == 0 or d == most
            if d <= 8 or is_round or problem.num_devices % d == 0:
                yield replicas, d


def _micro_batches(rows: int, num_devices: int) -> list[int]:
    """Powers of two, and multiples of the devices, that leave a row each."""
    most = min(rows, _MOST_MICRO_BATCHES)
    powers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    multiples = [num_devices * i for i in (1, 2, 3, 4, 8)]
    return sorted({*powers, *(m for m in multiples if m <= most)})


def _even_cut(
    problem: Problem, workload: Workload, k: int
) -> tuple[int, ...] | None:
    # Proportional costs are cut alike, so that one cut serves many settings.
    total = sum(workload.costs) or 1.0
    whole = tuple(round(1e9 * cost / total) for cost in workload.costs)
    try:
        return tuple(problem.cut(whole, k))
    except ValueError:  # there are not as many places to cut
        return None


def _bound(workload: Workload, setting: Setting) -> float:
    """Seconds that no order of a step's tasks is below.

    A device works on all micro-batches, after the first one has come through
    the devices before it; then the last one goes back through these. Where the
    backward pass is split, it may have gone back earlier.
    """
    cells = [own for (own,) in workload.cells(setting.layers_per_cell)]
    m, d = setting.num_micro_batches, setting.num_devices
    forward = [one.seconds["forward"] for one in cells]
    backward = [
        one.facts.has_backward * one.seconds["backward"] for one in cells
    ]
    added = [one.facts.has_backward * one.addition for one in cells]
    busy = [0.0] * d
    for device, f, b, more in zip(setting.devices, forward, backward, added):
        busy[device] += m * (f + b) - more
    if setting.chunks > 1:
        return max(busy)
    is_split = setting.schedule in ("zero_bubble", "zero_bubble_2p")
    back = [b - more for b, more in zip(backward, added)]
    way = forward if is_split else [f + b for f, b in zip(forward, back)]
    before = itertools.accumulate(way, initial=0.0)
    return max(own + more for own, more in zip(busy, before))


def smallest(problem: Problem) -> Prediction | None:
    """Of the settings with most cells and micro-batches, what holds least."""
    rows = problem.batch_size // min(problem.num_replicas)
    replicas, d = max(_grids(problem), key=lambda grid: grid[1])
    m = max(_micro_batches(rows, d))
    workload = problem.workload(replicas, m)
    cut = _even_cut(problem, workload, d)
    if cut is None:
        return None
    setting = Setting(replicas, d, cut, m, "1f1b", ("always",) * d)
    found = predict(workload, setting, problem.machine)
    low, high = 0.0, float(max(found.device_bytes))
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        trial = dataclasses.replace(problem, memory_limit=middle)
        fits = fitted(trial, setting)
        if fits is None:
            low = middle
        else:
            found, high = fits, middle
    return found
