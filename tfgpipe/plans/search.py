"""Finds the settings that train fastest within a memory limit.

For every number of replicas, devices, cells and micro-batches, and every
schedule, there is a time that no order of the tasks is below. Settings are
predicted in the order of these bounds, until the next bound is above the best
predictions: so the search is exact, and most settings are never simulated.

Predictions are not exact. So of settings that are nearly as fast as the fastest
the first is the one of fewest micro-batches: a cost of each task that is not
modelled favours fewer tasks.

Settings are made to fit into a device's memory, in the order of
what it costs:

1. the cells are even in seconds, and everything is kept;
2. cells that do not fit compute again what they must: all but one micro-batch,
   or all; then in groups of layers. Or what they keep goes to the host, if that
   is faster. Or a wide head goes in parts, if that is;
3. the cut is that with the fastest slowest cell of those that fit.

If the weights are too large for all that, they are on the host, and each device
has more cells: as many as it has two of at a time.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tfgpipe.plans.prediction import Prediction, Setting, memory, predict
from tfgpipe.plans.workload import CellNeeds, Machine, Workload
from tfgpipe.schedules import CHUNKS, Rule

# "breadth_first" is as fast as "interleaved" and holds more.
_SHAPES = [
    (name, chunks)
    for name, count in CHUNKS.items()
    if name != "breadth_first"
    for chunks in ((2, 4) if count is None else (count,))
]

# If weights are on the host, a device has the weights of two cells.
_HOST_SHAPES = [("breadth_first", chunks) for chunks in (1, 2, 4, 8, 16, 32)]

# Of a step: beyond, its graph takes minutes to trace.
_MOST_MICRO_BATCHES = 512

_MOST_TASKS = 40_000
_MOST_ON_HOST = 8_000  # each with a transfer, at worst


# So much slower than the fastest is nearly as fast.
NEAR = 1.02


class _Candidate(NamedTuple):
    bound: float
    setting: Setting


def fastest_settings(problem: PlanProblem, count: int) -> list[Prediction]:
    """Returns the settings nearly as fast as the fastest, then the others.

    The first is the one of these with the fewest micro-batches; what follows
    comes in the order of its time. At most `count`, of those that fit. If none
    does, weights are on the host.
    """
    on_devices = _fastest(problem, count)
    if on_devices or not problem.has_host:
        return on_devices
    return _fastest(dataclasses.replace(problem, weights_on="host"), count)


def _fastest(problem: PlanProblem, count: int) -> list[Prediction]:
    predictions: list[Prediction] = []
    # In the order of what their time is not below: from some on, none can be
    # faster than what was found.
    for bound, setting in sorted(_candidates(problem)):
        if len(predictions) >= count and bound >= max(
            NEAR * predictions[0].step_seconds,
            predictions[count - 1].step_seconds,
        ):
            break
        prediction = prediction_that_fits(problem, setting)
        if prediction is not None:
            predictions.append(prediction)
            # Of equally fast ones, what holds less.
            predictions.sort(
                key=lambda p: (p.step_seconds, max(p.device_bytes))
            )
    if not predictions:
        return []
    near = [
        p
        for p in predictions
        if p.step_seconds <= NEAR * predictions[0].step_seconds
    ]
    first = min(near, key=lambda p: p.setting.num_micro_batches)
    others = [p for p in predictions if p is not first]
    return [first, *others][:count]


def _candidates(problem: PlanProblem) -> Iterator[_Candidate]:
    is_away = problem.weights_on != "devices"
    most = _MOST_ON_HOST if is_away else _MOST_TASKS
    for replicas, d in _grids(problem):
        if not weights_fit(problem, replicas, d):
            continue
        for m in _micro_batches(problem.batch_size // replicas, d):
            shapes = _SHAPES if d > 1 else [("gpipe", 1)]
            if is_away:
                shapes = _HOST_SHAPES
            workload = problem.workload(replicas, m)
            for schedule, chunks in shapes:
                if d * chunks > problem.num_layers:
                    continue
                if 3 * m * d * chunks > most:
                    continue
                cut = even_cut(problem, workload, d * chunks, m)
                setting = Setting(
                    replicas,
                    d,
                    cut,
                    m,
                    schedule,
                    ("never",) * len(cut),
                    remat_groups=None if workload.is_compiled else 1,
                    weights_on=problem.weights_on,
                )
                yield _Candidate(_bound(workload, setting), setting)


def _grids(problem: PlanProblem) -> Iterator[tuple[int, int]]:
    """Yields numbers of replicas, and of the devices of each."""
    for replicas in problem.num_replicas:
        most = min(problem.num_devices // replicas, problem.num_layers)
        for d in range(1, most + 1):
            is_round = d & (d - 1) == 0 or d == most
            if d <= 8 or is_round or problem.num_devices % d == 0:
                yield replicas, d


def _micro_batches(rows: int, num_devices: int) -> list[int]:
    """Returns powers of two and multiples of devices, up to a row each."""
    most = min(rows, _MOST_MICRO_BATCHES)
    powers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    multiples = [num_devices * i for i in (1, 2, 3, 4, 8)]
    return sorted({*powers, *(m for m in multiples if m <= most)})


def even_cut(
    problem: PlanProblem,
    workload: Workload,
    k: int,
    m: int,
    recomputes: bool = False,
) -> tuple[int, ...]:
    """Returns the cut into k cells that are even in seconds.

    Where XLA compiles, they begin at the regions of m micro-batches.
    """
    regions = None
    if workload.regions_of is not None:
        regions = tuple(workload.regions_of(m, recomputes))
    # Proportional costs are cut alike, so that one cut serves many settings.
    total = sum(workload.costs) or 1.0
    whole = tuple(round(1e9 * cost / total) for cost in workload.costs)
    return tuple(problem.cut(whole, k, regions))


def _bound(workload: Workload, setting: Setting) -> float:
    """Returns the seconds that no order of a step's tasks is below.

    A device works on all micro-batches, after the first one has come through
    the devices before it; then the last one goes back through these. Where the
    backward pass is split, it may have gone back earlier.
    """
    cells = [cell for (cell,) in workload.cells(setting.layers_per_cell)]
    m, d = setting.num_micro_batches, setting.num_devices
    forward = [cell.seconds["forward"] for cell in cells]
    backward = [
        cell.facts.has_backward * cell.seconds["backward"] for cell in cells
    ]
    added = [cell.facts.has_backward * cell.addition for cell in cells]
    busy = [0.0] * d
    for device, f, b, more in zip(setting.devices, forward, backward, added):
        busy[device] += m * (f + b) - more
    if setting.chunks > 1:
        return max(busy)
    is_split = setting.schedule in ("zero_bubble", "zero_bubble_2p")
    back = [b - more for b, more in zip(backward, added)]
    way = forward if is_split else [f + b for f, b in zip(forward, back)]
    before = itertools.accumulate(way, initial=0.0)
    return max(cell + more for cell, more in zip(busy, before))


def smallest(problem: PlanProblem) -> Prediction:
    """Returns what holds least of those with most cells and micro-batches.

    Weights are on the host, if they may be.
    """
    rows = problem.batch_size // min(problem.num_replicas)
    replicas, d = max(_grids(problem), key=lambda grid: grid[1])
    chunks = [c for _, c in _HOST_SHAPES if c * d <= problem.num_layers]
    k = max([1, *chunks]) * d
    counts = _micro_batches(rows, d)
    m = max([1, *(n for n in counts if 3 * n * k <= _MOST_ON_HOST)])
    workload = problem.workload(replicas, m)
    setting = Setting(
        replicas,
        d,
        even_cut(problem, workload, k, m, recomputes=True),
        m,
        "breadth_first",
        ("always",) * k,
        remat_groups=None if workload.is_compiled else 1,
        weights_on="host" if problem.has_host else "devices",
    )
    groups = [n for n in GROUPS if n <= min(setting.layers_per_cell)]
    parts = [HEAD_PARTS] if m > 1 and workload.is_wide else []
    settings = [
        setting._replace(remat_groups=n, head_parts=p)
        for n in (setting.remat_groups, *groups)
        for p in (1, *parts)
    ]
    predictions = [predict(workload, s, problem.machine) for s in settings]
    return min(predictions, key=lambda p: max(p.device_bytes))


# From the fastest on; recomputations hold less, the more micro-batches
# there are.
RULES: tuple[Rule, ...] = ("never", 0.7, 0.4, "except_last", "always")

GROUPS = (2, 4, 8, 16)

# Of a wide head, and the rows that there are for them.
HEAD_PARTS = 4


@dataclasses.dataclass(frozen=True)
class PlanProblem:
    """The task of a plan.

    Attributes:
        workload_of: The layers, for micro-batches of so many rows.
        cut: Cuts a tuple of costs into cells, which begin at regions if there
            are some.
        num_layers: How many layers there are, and cells at most.
        batch_size: Rows of a mini-batch, of all replicas together.
        num_devices: All devices.
        num_replicas: The numbers of replicas to choose from.
        memory_limit: Bytes of a device; None for any.
        machine: How fast it sends and updates; None: in no time.
        has_host: Whether what a device needs may be on its host.
        weights_on: Where weights are.
    """

    workload_of: Callable[[float], Workload]
    cut: Callable[[tuple[float, ...], int, tuple[int, ...] | None], list[int]]
    num_layers: int
    batch_size: int
    num_devices: int
    num_replicas: tuple[int, ...]
    memory_limit: float | None
    machine: Machine | None
    has_host: bool = True
    weights_on: str = "devices"

    def workload(self, num_replicas: int, num_micro_batches: int) -> Workload:
        """Returns the layers, for so many micro-batches of each replica."""
        parts = num_replicas * num_micro_batches
        return self.workload_of(self.batch_size / parts)

    def workload_for(self, setting: Setting) -> Workload:
        """Returns the layers, for the micro-batches of a setting."""
        return self.workload(setting.num_replicas, setting.num_micro_batches)

    @property
    def limit(self) -> float:
        """The memory limit as a number."""
        return math.inf if self.memory_limit is None else self.memory_limit


def prediction_that_fits(
    problem: PlanProblem, setting: Setting
) -> Prediction | None:
    """Predicts a setting that is changed until it fits; None if none does."""
    whole = _that_fits(problem, setting)
    workload = problem.workload_for(setting)
    keeps_all = whole is not None and {*whole.setting.remat} == {"never"}
    if keeps_all or setting.num_micro_batches == 1 or not workload.is_wide:
        return whole
    # Not every loss and head lets it go in parts: so it has to pay.
    in_parts = _that_fits(problem, setting._replace(head_parts=HEAD_PARTS))
    if whole is None or in_parts is None:
        return whole or in_parts
    is_faster = NEAR * in_parts.step_seconds < whole.step_seconds
    return in_parts if is_faster else whole


def _that_fits(problem: PlanProblem, setting: Setting) -> Prediction | None:
    workload = problem.workload_for(setting)
    held = memory(workload, setting)
    if max(device.total for device in held) <= problem.limit:
        return predict(workload, setting, problem.machine)
    cuts = [setting.layers_per_cell]
    other = _cut_that_fits(problem, workload, setting)
    if other is not None:
        cuts.append(other)
    for cut in cuts:
        changed = setting._replace(layers_per_cell=cut)
        more = (g for g in GROUPS if g <= min(cut))
        for groups in (setting.remat_groups, *more):
            prediction = _with_remat(problem, workload, changed, groups)
            if prediction is not None:
                return prediction
    return None


def weights_fit(
    problem: PlanProblem, num_replicas: int, num_devices: int
) -> bool:
    """Returns whether the weights of all layers do, shared out."""
    if problem.weights_on != "devices":
        return True
    workload = problem.workload_of(1.0)
    everything = workload.cell(0, len(workload.sizes))
    return _static(everything, num_replicas) / num_devices <= problem.limit


def _static(needs: CellNeeds, replicas: int) -> float:
    return needs.weights + needs.slots / replicas + needs.gradients


def _with_remat(
    problem: PlanProblem,
    workload: Workload,
    setting: Setting,
    groups: int | None,
) -> Prediction | None:
    """With the fastest rule for each device that lets it fit."""
    limit = problem.limit
    d, k = setting.num_devices, setting.num_partitions
    rules: list[Rule | None] = [None] * d
    are_more = groups != setting.remat_groups
    rest = RULES[-2:] if are_more else RULES
    # The fastest first: a device takes the first within which it fits.
    for rule in rest:
        trial = setting._replace(remat=(rule,) * k, remat_groups=groups)
        held = [device.total for device in memory(workload, trial)]
        for device in range(d):
            if rules[device] is None and held[device] <= limit:
                rules[device] = rule
        if None not in rules:
            break
    known = [rule for rule in rules if rule is not None]
    if len(known) < d:
        return None
    changed = setting._replace(
        remat=tuple(known[device] for device in setting.devices),
        remat_groups=groups,
    )
    recomputed = predict(workload, changed, problem.machine)
    away = changed._replace(
        remat=tuple(r if r == "never" else "offload" for r in changed.remat)
    )
    if are_more or problem.machine is None or not problem.has_host:
        return recomputed
    needs = memory(workload, away)
    if max(device.total for device in needs) <= limit:
        sent = predict(workload, away, problem.machine)
        if NEAR * sent.step_seconds < recomputed.step_seconds:
            return sent
    return recomputed


def _cut_that_fits(
    problem: PlanProblem, workload: Workload, setting: Setting
) -> tuple[int, ...] | None:
    """Returns the cut with the fastest slowest cell of those that fit, or None.

    A cell fits if its weights, one micro-batch and the inputs of all that its
    device holds do. Cells are filled one after the other up to a time, which
    is halved and halved.
    """
    k = setting.num_partitions
    whole = setting._replace(remat_groups=1, head_parts=1)
    by_device = whole.program(workload).held()
    held = [by_device[device] for device in setting.devices]
    costs = [0.0, *itertools.accumulate(workload.costs)]

    @functools.cache
    def least(cell: int, start: int, stop: int) -> float:
        needs = workload.cell(start, stop)
        needed = needs.inputs * held[cell]
        needed += needs.kept - needs.kept_inputs + needs.backward
        needed += needs.gradients * (setting.num_micro_batches > 1)
        if setting.weights_on != "devices":
            # Of all cells of the device, two have weights there.
            two = needs.weights + needs.gradients
            return needed + 2 / setting.chunks * two
        return needed + _static(needs, setting.num_replicas)

    # Cells that share a device share its memory, too.
    limit = problem.limit / setting.chunks

    #     layers   | 0 1 2 | 3 4 | 5 6 7 8 |     stops: 3, 5, 9
    #
    # Each cell takes all that it can in this time and memory; the others
    # have one layer each, at least.
    def fill(seconds: float) -> list[int] | None:
        stops, at = [], 0
        for cell in range(k):
            last = problem.num_layers - (k - 1 - cell)
            stop = at
            while (
                stop < last
                and costs[stop + 1] - costs[at] <= seconds
                and least(cell, at, stop + 1) <= limit
            ):
                stop += 1
            if stop == at:
                return None
            stops.append(stop)
            at = stop
        return stops if at == problem.num_layers else None

    # In any time: it is memory that fails.
    if fill(costs[-1]) is None:
        return None
    low, high = costs[-1] / k, costs[-1]
    # The slowest cell takes a k-th of all at least.
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fill(middle) else (middle, high)
    stops = fill(high)
    if stops is None:
        return None
    return tuple(b - a for a, b in itertools.pairwise([0, *stops]))
