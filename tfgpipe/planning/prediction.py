"""What a training step takes, before it is run.

A step is the tasks of its schedule, each as long as its layers take, between
transfers; then the update. A recomputation awaits nothing: it comes as soon as
the device is free, and what follows it may await a gradient.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfgpipe.planning.machine import Machine
from tfgpipe.planning.memory import (
    DeviceMemory,
    by_device,
    first_backward,
    memory,
)
from tfgpipe.planning.setting import Setting
from tfgpipe.planning.workload import CellNeeds, Workload
from tfgpipe.schedules import Remat, Task


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
    tasks = setting.tasks
    cells = workload.cells(setting.layers_per_cell, setting.remat_groups)
    times = _Times(cells, setting, machine)
    free = [0.0] * tasks.num_devices
    ends: dict[Task, float] = {}
    for task in tasks.order():
        device = tasks.device_of(task.cell)
        start = free[device] + times.lead(task)
        for need in tasks.needs(task):
            there = ends[need]
            if tasks.device_of(need.cell) != device:
                there += times.delay(need)
            start = max(start, there)
        free[device] = ends[task] = start + times.duration(task)
    updates = [
        _update_seconds(own, setting.num_replicas, machine)
        for own in by_device(cells, setting)
    ]
    again = [sum(map(times.again, own)) for own in tasks.tasks]
    busy = sum(times.lead(t) + times.duration(t) for t in ends)
    length = max(free)
    return Prediction(
        setting,
        max(end + update for end, update in zip(free, updates)),
        1 - busy / (tasks.num_devices * length) if length else 0.0,
        max(again),
        (busy - sum(again)) / tasks.num_devices,
        max(updates),
        memory(cells, setting),
    )


class _Times:
    """Seconds of the tasks of a setting.

    Args:
        cells: The groups of each cell.
        setting: What `GPipe` is told.
        machine: How fast it sends.
    """

    def __init__(
        self,
        cells: Sequence[Sequence[CellNeeds]],
        setting: Setting,
        machine: Machine | None,
    ):
        self._cells = cells
        self._machine = machine
        remat = Remat(setting.remat)
        first = self._first = first_backward(setting.tasks)
        self._keeps = lambda k, m: remat.keeps(k, first.get(k) == m)
        self._sums = [
            {
                kind: sum(group.seconds[kind] for group in groups)
                for kind in groups[0].seconds
            }
            for groups in cells
        ]

    def duration(self, task: Task) -> float:
        """Of a task, and of recomputations inside it."""
        kind, k, m = task
        found = self._duration(task)
        if kind in ("backward", "weight_gradient") and self._first.get(k) == m:
            # There are no sums yet to which its gradients are added.
            found -= sum(group.addition for group in self._cells[k])
        return max(0.0, found)

    def _duration(self, task: Task) -> float:
        """The same of a micro-batch whose gradients are added to sums."""
        kind, k, _ = task
        own = self._sums[k]
        if kind == "forward":
            return own[kind]
        if not self._cells[k][-1].has_backward:
            return 0.0
        if not self._cells[k][0].gradient_bytes:
            # Nothing takes the gradient of the inputs: all is in one half.
            if kind == "input_gradient":
                return self._between(task)
            if kind == "weight_gradient":
                return own["backward"]
        return own[kind] + self._between(task)

    def lead(self, task: Task) -> float:
        """Of the recomputation right before a task, which awaits nothing."""
        groups = self._cells[task.cell]
        return groups[-1].seconds["recompute"] if self._is_again(task) else 0.0

    def _between(self, task: Task) -> float:
        """Of recomputations of other groups, which come in between."""
        if not self._is_again(task):
            return 0.0
        return sum(g.seconds["recompute"] for g in self._cells[task.cell][:-1])

    def again(self, task: Task) -> float:
        """Of all recomputations for a task."""
        return self.lead(task) + self._between(task)

    def _is_again(self, task: Task) -> bool:
        kind, k, m = task
        return (
            kind in ("backward", "input_gradient")
            and self._cells[k][-1].has_backward
            and not self._keeps(k, m)
        )

    def delay(self, task: Task) -> float:
        """For which what a task hands on is under way."""
        if self._machine is None:
            return 0.0
        groups = self._cells[task.cell]
        is_forward = task.kind == "forward"
        count = groups[-1].outputs if is_forward else groups[0].gradient_bytes
        return self._machine.latency + count / self._machine.bandwidth


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
