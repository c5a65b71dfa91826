"""Makes settings fit into a device's memory.

In this order, which is that of what it costs:

1. the cells are even in seconds, and everything is kept;
2. cells that do not fit compute again what they must: all but one micro-batch,
   or all; then in groups of layers;
3. the cut is that with the fastest slowest cell of those that fit.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

from tfgpipe.planning.machine import Machine
from tfgpipe.planning.memory import memory
from tfgpipe.planning.prediction import Prediction, predict
from tfgpipe.planning.setting import Setting
from tfgpipe.planning.workload import CellNeeds, Workload
from tfgpipe.schedules import Facts

# From the fastest to the one that holds least.
RULES = ("never", "except_last", "always")
GROUPS = (2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Attributes:
        workload_of: The layers, for micro-batches of so many rows.
        cut: Cuts a tuple of costs into cells; raises ValueError where it
            cannot.
        starts: Indices of the layers with which a cell can begin.
        batch_size: Rows of a mini-batch.
        num_devices: All devices.
        num_replicas: The numbers of replicas to choose from.
        memory_limit: Bytes of a device; None for any.
        machine: How fast it sends and updates; None: in no time.
    """

    workload_of: Callable[[float], Workload]
    cut: Callable[[tuple[float, ...], int], list[int]]
    starts: tuple[int, ...]
    batch_size: int
    num_devices: int
    num_replicas: tuple[int, ...]
    memory_limit: float | None
    machine: Machine | None

    def workload(self, num_replicas: int, num_micro_batches: int) -> Workload:
        """The layers, for micro-batches of a part of the mini-batch each."""
        parts = num_replicas * num_micro_batches
        return self.workload_of(self.batch_size / parts)

    def workload_for(self, setting: Setting) -> Workload:
        """The layers, for the micro-batches of a setting."""
        return self.workload(setting.num_replicas, setting.num_micro_batches)

    @property
    def limit(self) -> float:
        """The memory limit as a number."""
        return math.inf if self.memory_limit is None else self.memory_limit


def fitted(problem: Problem, setting: Setting) -> Prediction | None:
    """The prediction for a setting that is changed until it fits, or None."""
    workload = problem.workload_for(setting)
    held = memory(workload.cells(setting.layers_per_cell), setting)
    if max(own.total for own in held) <= problem.limit:
        return predict(workload, setting, problem.machine)
    cuts = [setting.layers_per_cell]
    other = _cut_that_fits(problem, workload, setting)
    if other is not None:
        cuts.append(other)
    for cut in cuts:
        changed = setting._replace(layers_per_cell=cut)
        for groups in (1, *(g for g in GROUPS if g <= min(cut))):
            found = _with_remat(problem, workload, changed, groups)
            if found is not None:
                return found
    return None


def may_fit(problem: Problem, num_replicas: int, num_devices: int) -> bool:
    """Whether the weights of all layers do, shared out."""
    workload = problem.workload_of(1.0)
    everything = workload.cell(0, len(workload.sizes))
    return _static(everything, num_replicas) / num_devices <= problem.limit


def _static(needs: CellNeeds, replicas: int) -> float:
    return needs.weights + needs.slots / replicas + needs.gradients


def _with_remat(
    problem: Problem, workload: Workload, setting: Setting, groups: int
) -> Prediction | None:
    """With the fastest rule for each device that lets it fit."""
    limit = problem.limit
    d, k = setting.num_devices, setting.num_partitions
    rules: list[str | None] = [None] * d
    rest = RULES if groups == 1 else RULES[1:]
    for rule in rest:
        trial = setting._replace(remat=(rule,) * k, remat_groups=groups)
        cells = workload.cells(trial.layers_per_cell, groups)
        held = [own.total for own in memory(cells, trial)]
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
    return predict(workload, changed, problem.machine)


def _cut_that_fits(
    problem: Problem, workload: Workload, setting: Setting
) -> tuple[int, ...] | None:
    """The cut with the fastest slowest cell of those that fit, or None.

    A cell fits if its weights, one micro-batch and the inputs of all that its
    device holds do. Cells are filled one after the other up to a time, which
    is halved and halved.
    """
    places = [*problem.starts, len(workload.sizes)]
    k = setting.num_partitions
    cells = workload.cells(setting.layers_per_cell)
    held = _held(setting, tuple(own.facts for (own,) in cells))
    costs = [0.0, *itertools.accumulate(workload.costs)]

    @functools.cache
    def least(cell: int, start: int, stop: int) -> float:
        needs = workload.cell(places[start], places[stop])
        own = needs.inputs * held[cell]
        own += needs.kept - needs.kept_inputs + needs.backward
        own += needs.gradients * (setting.num_micro_batches > 1)
        return own + _static(needs, setting.num_replicas)

    limit = problem.limit / setting.chunks

    def fill(seconds: float) -> list[int] | None:
        stops, at = [], 0
        for cell in range(k):
            last = len(places) - 1 - (k - 1 - cell)  # one each for the others
            stop = at
            while (
                stop < last
                and costs[places[stop + 1]] - costs[places[at]] <= seconds
                and least(cell, at, stop + 1) <= limit
            ):
                stop += 1
            if stop == at:
                return None
            stops.append(stop)
            at = stop
        return stops if at == len(places) - 1 else None

    if fill(costs[-1]) is None:
        return None
    low, high = costs[-1] / k, costs[-1]
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fill(middle) else (middle, high)
    stops = fill(high)
    if stops is None:
        return None
    ends = [0, *(places[stop] for stop in stops)]
    return tuple(b - a for a, b in itertools.pairwise(ends))


def _held(setting: Setting, facts: tuple[Facts, ...]) -> list[int]:
    """How many micro-batches the device of each cell holds."""
    held = setting.program(facts).held()
    return [held[device] for device in setting.devices]
