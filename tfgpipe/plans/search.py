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
   or all; then in groups of layers;
3. the cells are even in the bytes of weights, slots and gradients.

If the weights are too large for all that, they are on the host, and each device
has more cells: as many as it has two of at a time.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from tfgpipe.plans.prediction import Prediction, Setting, memory, predict
from tfgpipe.plans.workload import Machine, Workload
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


def fastest_settings(problem: PlanProblem, count: int) -> list[Prediction]:
    """Returns the settings nearly as fast as the fastest, then the others.

    The first is the one of these with the fewest micro-batches; what follows
    comes in the order of its time. At most `count`, of those that fit. If none
    does, weights are on the host.
    """
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
        if not problem.has_host or problem.weights_on == "host":
            return []
        away = dataclasses.replace(problem, weights_on="host")
        return fastest_settings(away, count)
    limit = NEAR * predictions[0].step_seconds
    near = [p for p in predictions if p.step_seconds <= limit]
    first = min(near, key=lambda p: p.setting.num_micro_batches)
    others = [p for p in predictions if p is not first]
    return [first, *others][:count]


def _candidates(problem: PlanProblem) -> Iterator[tuple[float, Setting]]:
    """Yields settings, each with the seconds that it is not below."""
    is_away = problem.weights_on != "devices"
    most = _MOST_ON_HOST if is_away else _MOST_TASKS
    all_layers = problem.workload_of(1.0).cell(0, problem.num_layers)
    for replicas, d in _grids(problem):
        # The weights of all layers, shared out.
        slots = all_layers.slots / replicas
        held = all_layers.weights + slots + all_layers.gradients
        if held / d > problem.limit and not is_away:
            continue
        shapes = _SHAPES if d > 1 else [("gpipe", 1)]
        for m, (schedule, chunks) in itertools.product(
            _micro_batches(problem.batch_size // replicas, d),
            _HOST_SHAPES if is_away else shapes,
        ):
            k = d * chunks
            if k <= problem.num_layers and 3 * m * k <= most:
                rules, at = ("never",) * k, problem.weights_on
                setting = problem.evenly_cut(
                    Setting(
                        replicas, d, (1,) * k, m, schedule, rules, None, 1, at
                    )
                )
                yield _bound(problem.workload_for(setting), setting), setting


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


def _bound(workload: Workload, setting: Setting) -> float:
    """Returns the seconds that no order of a step's tasks is below.

    A device works on all micro-batches, after the first one has come through
    the devices before it; then the last one goes back through these. Where the
    backward pass is split, it may have gone back earlier.
    """
    ends = itertools.accumulate(setting.layers_per_cell, initial=0)
    cells = [workload.seconds.of_cell(*at) for at in itertools.pairwise(ends)]
    forward, backward, first = (
        np.array([seconds[kind] for seconds in cells])
        for kind in ("forward", "backward", "backward_first")
    )
    added = backward - first
    m, d = setting.num_micro_batches, setting.num_devices
    each = m * (forward + backward) - added
    busy = np.bincount(setting.devices, each, d)
    if setting.chunks > 1:
        return float(busy.max())
    way = forward
    if setting.schedule not in ("zero_bubble", "zero_bubble_2p"):
        way = forward + backward - added
    before = np.cumsum(way) - way
    return float((busy + before).max())


# From the fastest on; then "always", which holds least.
RULES: tuple[Rule, ...] = ("never", 0.7, 0.4, "except_last")

GROUPS = (4, 16)


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
        limit: Bytes that a device may hold.
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
    limit: float
    machine: Machine | None
    has_host: bool = True
    weights_on: str = "devices"

    def workload_for(self, setting: Setting) -> Workload:
        """Returns the layers, for the micro-batches of a setting."""
        parts = setting.num_replicas * setting.num_micro_batches
        return self.workload_of(self.batch_size / parts)

    def evenly_cut(self, setting: Setting, by_bytes: bool = False) -> Setting:
        """Returns the setting with cells that are even in seconds, or in bytes.

        Where XLA compiles, cells begin at regions; else there is a group, if
        none are asked for.
        """
        workload = self.workload_for(setting)
        regions = None
        if workload.regions_of is not None:
            m = setting.num_micro_batches
            regions = tuple(workload.regions_of(m, setting.recomputes))
        # Proportional costs are cut alike: one cut serves many settings.
        costs = np.array(workload.costs) / (sum(workload.costs) or 1.0)
        if by_bytes:
            costs = workload.shares_of_bytes
        whole = tuple((1e9 * costs).round().astype(int).tolist())
        cut = tuple(self.cut(whole, setting.num_partitions, regions))
        groups = setting.remat_groups or (1 if regions is None else None)
        return setting._replace(layers_per_cell=cut, remat_groups=groups)


def prediction_that_fits(
    problem: PlanProblem, setting: Setting
) -> Prediction | None:
    """Predicts a setting that is changed until it fits; None if none does."""
    workload = problem.workload_for(setting)
    cuts = dict.fromkeys([setting, problem.evenly_cut(setting, by_bytes=True)])
    for cut, groups in itertools.product(cuts, (1, *GROUPS)):
        if groups > min(cut.layers_per_cell):
            continue
        changed = cut._replace(remat_groups=groups) if groups > 1 else cut

        def fitting(rule: Rule, changed: Setting = changed) -> dict[int, Rule]:
            trial = changed._replace(remat=(rule,) * changed.num_partitions)
            held = enumerate(memory(workload, trial))
            return {d: rule for d, of in held if of.total <= problem.limit}

        # What holds least tells whether anything fits.
        rules = fitting("always")
        if len(rules) < setting.num_devices:
            continue
        # The fastest first: a device takes the first within which it fits.
        chosen: dict[int, Rule] = {}
        for rule in RULES if groups == 1 else ():
            chosen = fitting(rule) | chosen
            if len(chosen) == setting.num_devices:
                break
        rules |= chosen
        remat = tuple(rules[device] for device in setting.devices)
        changed = changed._replace(remat=remat)
        return predict(workload, changed, problem.machine)
    return None
