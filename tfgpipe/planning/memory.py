"""What devices hold at the peak of a training step, before it is run.

Memory is followed through the operations of a device:

    forward     keeps what the backward pass needs, or only the cell's inputs
    recompute   adds what the backward pass needs
    backward    frees all; if it is split, its weight gradient does

beside weights, slots, one sum of gradients, and what the running operation
needs: a backward pass that adds to a sum makes a new one beside it.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfgpipe.planning.setting import Setting
from tfgpipe.planning.workload import CellNeeds
from tfgpipe.schedules import LAST, Op


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
    groups = [group for own in cells for group in own]
    program = setting.program(tuple(group.facts for group in groups))
    found = []
    for ops, own in zip(program.by_device, by_device(cells, setting)):
        activations, working = _peak(ops, groups)
        slots = sum(group.slots for group in own)
        found.append(
            DeviceMemory(
                sum(group.weights for group in own),
                -(-slots // setting.num_replicas),
                sum(group.gradients for group in own),
                round(activations),
                round(working),
            )
        )
    return found


def _peak(
    ops: Sequence[Op], groups: Sequence[CellNeeds]
) -> tuple[float, float]:
    """Bytes kept, and bytes of the running operation, where both are most.

    Args:
        ops: What a device runs.
        groups: Those of all cells, in order.
    """
    now = 0.0
    most = (0.0, 0.0)
    held: dict[tuple[int, int], float] = {}  # of a group and micro-batch
    there: set[tuple[int, int]] = set()  # whose activations are
    has_sum: set[int] = set()

    def hold(at: tuple[int, int], more: float) -> None:
        nonlocal now
        now += more
        held[at] = held.get(at, 0.0) + more

    for kind, k, m, _, keeps in ops:
        group, at = groups[k], (k, m)
        working = group.backward
        if kind == "forward":
            working = group.outputs if keeps else group.forward
            if group.facts.has_backward:
                hold(at, group.kept if keeps else group.inputs)
        elif at not in there and group.kept > group.kept_inputs:
            # Recomputed now, by itself or within.
            hold(at, group.kept - group.kept_inputs)
            is_alone = kind == "recompute"
            working = group.forward if is_alone else max(working, group.forward)
        if keeps or kind != "forward":
            there.add(at)
        if kind in LAST and k in has_sum:
            working += group.gradients
        most = max(most, (now, working), key=sum)
        if kind == "input_gradient":
            hold(at, group.crossing)
        elif kind in LAST:
            now += group.sparse - held.pop(at)
            has_sum.add(k)
    return most


def by_device(
    cells: Sequence[Sequence[CellNeeds]], setting: Setting
) -> list[list[CellNeeds]]:
    """The groups of each device."""
    found: list[list[CellNeeds]] = [[] for _ in range(setting.num_devices)]
    for device, groups in zip(setting.devices, cells):
        found[device] += groups
    return found
