"""Finds an order of the tasks for cells of unequal cost.

A named schedule is made for equal cells. Here all policies are
tried, each with several limits of how many micro-batches a cell may have under
way; then the limits of single cells are changed as long as that helps. What is
returned is the shortest schedule that fits, named ones among them.

Finding the shortest order of all is hard: this is a heuristic, which is never
worse than the named schedules.

The tasks of unequal cells run as soon as a policy has them. A device that is
free runs, of the tasks that could start now, what a *policy* prefers; weight
gradients run where nothing else can. How many micro-batches a cell may have
under way is limited, and so is what a device holds.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tfgpipe.checks import checked_counts
from tfgpipe.schedules.orders import (
    CHUNKS,
    SCHEDULES,
    TASKS,
    Running,
    devices_of_cells,
)
from tfgpipe.schedules.schedule import Schedule
from tfgpipe.schedules.task import Task

_MOST_TASKS = 400_000  # that are run in all trials together

_SCALES = (1.0, 1.25, 1.5, 2.0, 3.0, 1e9)  # of the limits tried first


def search(
    durations: Sequence[Sequence[float]],
    num_micro_batches: int,
    memory: float = math.inf,
    *,
    devices: Sequence[int] | None = None,
) -> Schedule:
    """Finds a short schedule for given durations, within a memory limit.

    Args:
        durations: For each cell, how long its forward task takes, the gradient
            of its inputs, and the gradient of its weights, in any unit.
        num_micro_batches: M, at least 1.
        memory: How many micro-batches a device may hold at once: one counts,
            once a cell, from its forward task to its weight gradient.
        devices: For each cell, the index of its device. By default, each has
            one of its own.

    Returns:
        The shortest found. It is as short as every schedule with a name that
        fits and has the cells on the same devices.

    Raises:
        ValueError: If an argument is wrong, or nothing fits.

    Example:

    >>> found = search([(1, 1, 1), (1, 1, 2)], num_micro_batches=4)
    >>> found.length(lambda task: 2 if task == ("weight_gradient", 1, 0) else 1)
    14
    """
    k = len(durations)
    places = [*range(k)] if devices is None else [*devices]
    num_devices = len({*places})
    if not k or len(places) != k or {*places} != {*range(num_devices)}:
        raise ValueError(
            f"`devices` must have the index of a device for each of the {k} "
            f"cells, and leave none out. Received: devices={devices!r}."
        )
    seconds = np.array(durations, float)
    if seconds.shape != (k, len(TASKS)) or not (seconds >= 0).all():
        raise ValueError(
            f"`durations` must have {len(TASKS)} numbers from 0 for each cell. "
            f"Received: durations={durations!r}."
        )
    work = UnequalCells(
        [dict(zip(TASKS, of_cell)) for of_cell in seconds.tolist()],
        places,
        memory,
        checked_counts(num_micro_batches=num_micro_batches)[0],
    )
    best = _shortest(work)
    if best is None:
        raise ValueError(
            "`memory` must be enough to hold a micro-batch in each cell of a "
            f"device. Received: memory={memory}, and devices={places}."
        )
    return best


def _shortest(work: UnequalCells) -> Schedule | None:
    """Returns the shortest schedule that was found; None if nothing fits."""
    best: Schedule | None = None
    shortest = math.inf
    for schedule in _named(work):
        length = schedule.length(work.duration)
        if length < shortest and max(schedule.held()) <= work.memory:
            best, shortest = schedule, length
    left = _MOST_TASKS // (3 * len(work.devices) * work.num_micro_batches)
    chosen = None
    for policy, limits in itertools.islice(_starts(work), max(8, left // 2)):
        tasks, length = run(work, policy, limits)
        if length < shortest:
            best, shortest, chosen = Schedule(tasks), length, (policy, limits)
    if chosen is not None:
        policy, limits = chosen
        for cell, change in itertools.islice(_changes(limits), left // 2):
            limits[cell] += change
            tasks, length = run(work, policy, limits)
            if length < shortest:
                best, shortest = Schedule(tasks), length
            else:
                limits[cell] -= change
    return best


def _named(work: UnequalCells) -> Iterator[Schedule]:
    """Yields the schedules with names that have the cells where they are."""
    num_devices = 1 + max(work.devices)
    chunks, rest = divmod(len(work.devices), num_devices)
    for name, num_chunks in CHUNKS.items():
        # One cell a device: which is "1f1b" then, or "gpipe".
        is_right = chunks > 1 if num_chunks is None else num_chunks == chunks
        if rest or not is_right:
            continue
        if [*devices_of_cells(name, num_devices, chunks)] == work.devices:
            yield SCHEDULES[name](num_devices, work.num_micro_batches, chunks)


def _starts(work: UnequalCells) -> Iterator[tuple[Policy, list[int]]]:
    """Policies, each with several limits.

    A cell has work without a break if as many micro-batches are under way as
    go through the slowest device in the time that one takes from the cell to
    the end and back.
    """
    busy = [0.0] * (1 + max(work.devices))
    for device, seconds in zip(work.devices, work.seconds):
        busy[device] += sum(seconds.values())
    period = max(busy) or 1.0
    ways = [
        seconds["forward"] + seconds["input_gradient"]
        for seconds in work.seconds
    ]
    behind = [*itertools.accumulate(reversed(ways))][::-1]
    several = (False, True) if len(busy) < len(ways) else (False,)
    reserves = several if work.memory < math.inf else (False,)
    for scale in _SCALES:
        limits = [
            max(1, math.ceil(min(scale * way / period, work.num_micro_batches)))
            for way in behind
        ]
        for choice in itertools.product(
            (True, False), several, several, reserves
        ):
            yield choice, [*limits]


def _changes(limits: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Changes of single limits, again and again."""
    while True:
        for cell in range(len(limits)):
            yield cell, 1
            if limits[cell] > 1:
                yield cell, -1


class UnequalCells(NamedTuple):
    """The cells whose tasks are to be ordered.

    Attributes:
        seconds: Of the three tasks of each cell.
        devices: For each cell, its device.
        memory: How many micro-batches a device may hold.
        num_micro_batches: M.
    """

    seconds: list[dict[str, float]]
    devices: list[int]
    memory: float
    num_micro_batches: int

    def duration(self, task: Task) -> float:
        """Returns the seconds of a task; a whole backward task has both."""
        seconds = self.seconds[task.cell]
        if task.kind == "backward":
            return seconds["input_gradient"] + seconds["weight_gradient"]
        return seconds[task.kind]


# The preferences of a device: gradients to forward tasks; of forward tasks, and
# of gradients, the last of its cells; and whether a micro-batch comes to a
# device only if there is room for it in all cells there.
Policy = tuple[bool, bool, bool, bool]


def run(
    work: UnequalCells, policy: Policy, limits: Sequence[int]
) -> tuple[list[list[Task]], float]:
    """Runs tasks by a policy; returns them by device, and the length.

    Cells have at most `limits` micro-batches under way. The length is infinite
    if the devices come to a stop, each without room for what it could run.
    """
    gradients_first, last_forward, last_backward, reserves = policy
    running = Running(work.devices)
    cells: list[list[int]] = [[] for _ in running.held]
    for k, device in enumerate(work.devices):
        cells[device].append(k)
    # For each device, kinds of tasks and its cells, the preferred first.
    wishes = []
    for of_device in cells:
        turned = of_device[::-1]
        first = [
            ("input_gradient", turned if last_backward else of_device),
            ("forward", turned if last_forward else of_device),
        ]
        if not gradients_first:
            first.reverse()
        wishes.append([*first, ("weight_gradient", of_device)])
    # What a micro-batch will take in the cells of a device yet to come.
    room = [
        sum(c == k or (reserves and c > k) for c in cells[device])
        for k, device in enumerate(work.devices)
    ]

    def may_begin(device: int, k: int, m: int) -> bool:
        return (
            m < work.num_micro_batches
            and m - running.ended[k]["input_gradient"] < limits[k]
            and running.held[device] + room[k] <= work.memory
        )

    def next_task(device: int) -> Task | None:
        for kind, of_device in wishes[device]:
            for k in of_device:
                m = running.started[k][kind]
                if running.is_ready(kind, k, m) and (
                    kind != "forward" or may_begin(device, k, m)
                ):
                    return Task(kind, k, m)
        return None

    length = running.run(next_task, work.duration)
    done = [counts["weight_gradient"] for counts in running.ended]
    is_done = min(done) == work.num_micro_batches
    return running.tasks, length if is_done else math.inf
