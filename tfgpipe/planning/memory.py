"""What devices hold at the peak of a training step, before it is run.

Memory is followed through the tasks of a device:

    forward     keeps what the backward pass needs, or only the cell's inputs
    recompute   adds what the backward pass needs
    backward    frees all; with a weight gradient, that does

beside weights, slots, one sum of gradients, and what the running task needs: a
backward task that adds to a sum makes a new one beside it.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfgpipe.planning.setting import Setting
from tfgpipe.planning.workload import CellNeeds
from tfgpipe.schedules import Remat, Schedule, Task


class DeviceMemory(NamedTuple):
    """What a device holds at the peak of a step, in bytes.

    Attributes:
        weights: Its weights.
        slots: The optimizer's slots.
        gradients: One sum of gradients.
        activations: What it keeps of the micro-batches.
        working: What the task needs that runs then.
    """

    weights: int
    slots: int
    gradients: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def memory(
    cells: Sequence[Sequence[CellNeeds]], setting: Setting
) -> list[DeviceMemory]:
    """What each device holds at its peak.

    Args:
        cells: The groups of each cell.
        setting: What `GPipe` is told.
    """
    tasks, rules = setting.tasks, Remat(setting.remat)
    first = first_backward(tasks)
    found = []
    for own, groups in zip(tasks.tasks, by_device(cells, setting)):
        activations, working = _peak(own, cells, rules, first)
        slots = sum(group.slots for group in groups)
        found.append(
            DeviceMemory(
                sum(group.weights for group in groups),
                -(-slots // setting.num_replicas),
                sum(group.gradients for group in groups),
                round(activations),
                round(working),
            )
        )
    return found


def _peak(
    own: Sequence[Task],
    cells: Sequence[Sequence[CellNeeds]],
    rules: Remat,
    first: dict[int, int],
) -> tuple[float, float]:
    """Bytes kept, and bytes of the running task, where both are most.

    Args:
        own: The tasks of a device. Recomputations come right before the tasks
            that need them.
        cells: The groups of each cell.
        rules: What each cell keeps.
        first: For each cell the micro-batch that goes backward first.
    """
    now = 0.0
    most = (0.0, 0.0)
    has_sum: set[int] = set()
    for kind, k, m in own:
        keeps = rules.keeps(k, first.get(k) == m)
        is_last = kind in ("backward", "weight_gradient")
        groups = cells[k] if kind == "forward" else reversed(cells[k])
        for group in groups:
            first_kept = group.kept if keeps else group.inputs
            again = 0.0 if keeps else group.kept - group.kept_inputs
            crossing = group.crossing if group.gradient_bytes else 0.0
            if kind == "forward":
                now += first_kept
                working = group.outputs if keeps else group.forward
            else:
                working = group.backward
            if kind in ("backward", "input_gradient") and not keeps:
                now += again
                working = max(working, group.forward)
            if is_last and k in has_sum:
                working += group.gradients
            most = max(most, (now, working), key=sum)
            if kind == "input_gradient":
                now += crossing
            if is_last:
                now -= first_kept + again
                now -= crossing if kind == "weight_gradient" else 0.0
                now += group.sparse
        if is_last:
            has_sum.add(k)
    return most


def first_backward(tasks: Schedule) -> dict[int, int]:
    """The micro-batch that goes backward through each cell first."""
    found = {k: tasks.first_backward(k) for k in range(tasks.num_cells)}
    return {k: m for k, m in found.items() if m is not None}


def by_device(
    cells: Sequence[Sequence[CellNeeds]], setting: Setting
) -> list[list[CellNeeds]]:
    """The groups of each device."""
    found: list[list[CellNeeds]] = [[] for _ in range(setting.num_devices)]
    for device, groups in zip(setting.devices, cells):
        found[device] += groups
    return found
