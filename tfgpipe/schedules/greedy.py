"""Runs the tasks of unequal cells, each as soon as a policy has it.

A device that is free runs, of the tasks that could start now, what a *policy*
prefers; weight gradients run where nothing else can. How many micro-batches a
cell may have under way is limited, and so is what a device holds.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from tfgpipe.schedules.schedule import Schedule
from tfgpipe.schedules.task import Task

HALVES = ("forward", "input_gradient", "weight_gradient")


class Work(NamedTuple):
    """What is to be ordered.

    Attributes:
        seconds: For each cell, those of its three tasks.
        sizes: For each cell, what it takes to hold a micro-batch.
        devices: For each cell, its device.
        most: What each device may hold, with room for the rounding of sums.
        num_micro_batches: M.
        link: How long it takes to another device.
    """

    seconds: list[dict[str, float]]
    sizes: list[float]
    devices: list[int]
    most: list[float]
    num_micro_batches: int
    link: float

    def duration(self, task: Task) -> float:
        """Of a task; a whole backward task is its halves."""
        own = self.seconds[task.cell]
        if task.kind == "backward":
            return own["input_gradient"] + own["weight_gradient"]
        return own[task.kind]

    def fits(self, schedule: Schedule) -> bool:
        """Whether no device holds more than it may."""
        for most, own in zip(self.most, schedule.tasks):
            now = 0.0
            for kind, k, _ in own:
                if kind == "forward":
                    now += self.sizes[k]
                    if now > most:
                        return False
                elif kind in ("backward", "weight_gradient"):
                    now -= self.sizes[k]
        return True


class Policy(NamedTuple):
    """What a device prefers.

    Attributes:
        gradients_first: Gradients to forward tasks.
        last_forward: The last of its cells, of forward tasks.
        last_backward: The last of its cells, of gradients.
        reserves: Whether a micro-batch comes to a device only if there is
            room for it in all cells there.
    """

    gradients_first: bool
    last_forward: bool
    last_backward: bool
    reserves: bool


def run(
    work: Work, policy: Policy, limits: Sequence[int]
) -> tuple[list[list[Task]], float]:
    """What each device runs, and when the last one ends.

    Args:
        work: What is to be run.
        policy: What devices prefer.
        limits: How many micro-batches each cell may have under way.

    Returns:
        The tasks of each device and the length, which is infinite if the
        devices come to a stop, each without room for what it could run.
    """
    running = _Running(work, policy, limits)
    # Ends of tasks and, on links that take time, what arrives of them.
    events: list[tuple[float, bool, Task]] = []
    idle, now, length = set(range(len(work.most))), 0.0, 0.0
    while True:
        for device in sorted(idle):
            task = running.next_task(device)
            if task is not None:
                idle.discard(device)
                running.start(task)
                heapq.heappush(events, (now + work.duration(task), True, task))
        if not events:
            break
        now = events[0][0]
        while events and events[0][0] <= now:
            _, is_end, task = heapq.heappop(events)
            if is_end:
                length = now
                running.end(task)
                idle.add(work.devices[task.cell])
                if task.kind != "weight_gradient":  # which no other one needs
                    heapq.heappush(events, (now + work.link, False, task))
            else:
                running.arrive(task)
    return running.tasks, length if running.is_done else math.inf


class _Running:
    """Devices at work.

    Args:
        work: What is to be run.
        policy: What devices prefer.
        limits: How many micro-batches each cell may have under way.

    Attributes:
        tasks: What each device has run.
    """

    def __init__(self, work: Work, policy: Policy, limits: Sequence[int]):
        self._work = work
        self._policy = policy
        self._limits = limits
        count = len(work.devices)
        self.tasks: list[list[Task]] = [[] for _ in work.most]
        self._started = [dict.fromkeys(HALVES, 0) for _ in range(count)]
        self._ended = [dict.fromkeys(HALVES, 0) for _ in range(count)]
        self._arrived = [dict.fromkeys(HALVES, 0) for _ in range(count)]
        self._held = [0.0] * len(work.most)
        cells = [
            [k for k in range(count) if work.devices[k] == d]
            for d in range(len(work.most))
        ]
        self._cells = cells
        self._forward = [c[::-1] if policy.last_forward else c for c in cells]
        self._backward = [c[::-1] if policy.last_backward else c for c in cells]
        # What a micro-batch will take in the cells of a device yet to come.
        self._room = [
            sum(
                work.sizes[c]
                for c in cells[work.devices[k]]
                if c == k or (policy.reserves and c > k)
            )
            for k in range(count)
        ]

    @property
    def is_done(self) -> bool:
        """Whether all tasks have run."""
        count = self._work.num_micro_batches
        return all(own["weight_gradient"] == count for own in self._ended)

    def next_task(self, device: int) -> Task | None:
        """What a device runs now, if there is something."""
        ways = [self._next_gradient, self._next_forward]
        if not self._policy.gradients_first:
            ways.reverse()
        for way in (*ways, self._next_late):
            task = way(device)
            if task is not None:
                return task
        return None

    def _next_forward(self, device: int) -> Task | None:
        work, most = self._work, self._work.most[device]
        for k in self._forward[device]:
            m = self._started[k]["forward"]
            if (
                m < work.num_micro_batches
                and (k == 0 or self._got(k, k - 1, "forward") > m)
                and m - self._ended[k]["input_gradient"] < self._limits[k]
                and self._held[device] + self._room[k] <= most
            ):
                return Task("forward", k, m)
        return None

    def _next_gradient(self, device: int) -> Task | None:
        last = len(self._work.devices) - 1
        for k in self._backward[device]:
            m = self._started[k]["input_gradient"]
            before = self._ended[k]["forward"]
            if k < last:
                before = min(before, self._got(k, k + 1, "input_gradient"))
            if m < before:
                return Task("input_gradient", k, m)
        return None

    def _next_late(self, device: int) -> Task | None:
        for k in self._cells[device]:
            m = self._started[k]["weight_gradient"]
            if m < self._ended[k]["input_gradient"]:
                return Task("weight_gradient", k, m)
        return None

    def _got(self, k: int, other: int, kind: str) -> int:
        """How many results of another cell's tasks are where cell k is."""
        is_here = self._work.devices[k] == self._work.devices[other]
        return (self._ended if is_here else self._arrived)[other][kind]

    def start(self, task: Task) -> None:
        """Notes that a task runs."""
        device = self._work.devices[task.cell]
        self.tasks[device].append(task)
        self._started[task.cell][task.kind] += 1
        if task.kind == "forward":
            self._held[device] += self._work.sizes[task.cell]

    def end(self, task: Task) -> None:
        """Notes that a task has ended."""
        kind, k, _ = task
        self._ended[k][kind] += 1
        if kind == "weight_gradient":
            self._held[self._work.devices[k]] -= self._work.sizes[k]

    def arrive(self, task: Task) -> None:
        """Notes that what a task leaves is on other devices."""
        self._arrived[task.cell][task.kind] += 1
