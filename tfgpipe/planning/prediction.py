"""What a training step takes, before it is run.

A step is the operations of its program, each as long as its layers take,
between transfers; then the update.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfgpipe.planning.machine import Machine
from tfgpipe.planning.memory import DeviceMemory, by_device, memory
from tfgpipe.planning.setting import Setting
from tfgpipe.planning.workload import CellNeeds, Workload
from tfgpipe.schedules import GRADIENTS, LAST, Op


class Prediction(NamedTuple):
    """What a setting comes to.

    Attributes:
        setting: What is predicted.
        step_seconds: Of a training step.
        bubble: Share of the pipeline's time in which devices wait.
        recompute_seconds: Spent computing again, by the device that does most.
        busy_seconds: Of a device's tasks that are no recomputation, the mean.
        update_seconds: Of the update, and of what replicas exchange for it.
        memory: Of each device of a replica.
    """

    setting: Setting
    step_seconds: float
    bubble: float
    recompute_seconds: float
    busy_seconds: float
    update_seconds: float
    memory: list[DeviceMemory]

    @property
    def device_bytes(self) -> list[int]:
        """What each device of a replica holds, in all."""
        return [own.total for own in self.memory]


def predict(
    workload: Workload, setting: Setting, machine: Machine | None
) -> Prediction:
    """What a setting comes to.

    Args:
        workload: The layers, for the micro-batches of the setting.
        setting: What `GPipe` is told.
        machine: How fast it sends and updates; None: in no time.
    """
    by_cell = workload.cells(setting.layers_per_cell, setting.remat_groups)
    groups = [group for own in by_cell for group in own]
    program = setting.program(tuple(group.facts for group in groups))
    # There are no sums yet to which these add gradients.
    first: dict[int, int] = {}
    there = set()  # what a backward task needs not compute by itself
    for op in program.ops:
        if op.kind in LAST:
            first.setdefault(op.cell, op.micro_batch)
        elif op.keeps or op.kind == "recompute":
            there.add((op.cell, op.micro_batch))

    def duration(op: Op) -> float:
        group = groups[op.cell]
        found = group.seconds[op.kind]
        if op.kind in GRADIENTS and (op.cell, op.micro_batch) not in there:
            found += group.seconds["recompute"]
        if op.kind in LAST and first[op.cell] == op.micro_batch:
            found -= group.addition
        return max(0.0, found)

    def link(op: Op) -> float:
        """For which what an operation hands on is under way."""
        if machine is None:
            return 0.0
        group = groups[op.cell]
        is_forward = op.kind == "forward"
        count = group.outputs if is_forward else group.gradient_bytes
        return machine.latency + count / machine.bandwidth

    times = program.simulate(duration, link)
    busy, again, free = ([0.0] * program.num_devices for _ in range(3))
    for op, (start, end) in zip(program.ops, times):
        busy[op.device] += end - start
        again[op.device] += (end - start) * (op.kind == "recompute")
        free[op.device] = end
    updates = [
        _update_seconds(own, setting.num_replicas, machine)
        for own in by_device(by_cell, setting)
    ]
    length = max(free)
    return Prediction(
        setting,
        max(end + update for end, update in zip(free, updates)),
        1 - sum(busy) / (program.num_devices * length) if length else 0.0,
        max(again),
        (sum(busy) - sum(again)) / program.num_devices,
        max(updates),
        memory(by_cell, setting),
    )


def _update_seconds(
    own: Sequence[CellNeeds], num_replicas: int, machine: Machine | None
) -> float:
    """Reads gradients, reads and writes weights and slots; replicas share it.

    Each replica sends what others own of the gradients, and gets their weights.
    """
    if machine is None:
        return 0.0
    weights = sum(one.weights for one in own)
    slots = sum(one.slots for one in own)
    gradients = sum(one.gradients for one in own)
    moved = (gradients + 2 * weights + 2 * slots) / num_replicas
    sent = 2 * gradients * (num_replicas - 1) / num_replicas
    latency = machine.latency if num_replicas > 1 else 0.0
    return moved / machine.memory_bandwidth + sent / machine.bandwidth + latency
