"""When each task of a training step runs, and on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tfgpipe.schedule import Schedule, Task


class Event(NamedTuple):
    """One task and when it ran.

    Attributes:
        task: What ran. An update of weights is `Task("update", device, -1)`:
            it belongs to no cell and no micro-batch.
        device: Index of the device, from 0.
        start: Seconds from the start of the step.
        end: Seconds from the start of the step.
    """

    task: Task
    device: int
    start: float
    end: float


def simulated(
    schedule: Schedule, duration: Callable[[Task], float]
) -> list[Event]:
    """What a step would be if tasks took only their own time.

    Args:
        schedule: The tasks of each device.
        duration: Seconds that a task takes.

    Returns:
        An event a task, device by device.
    """
    times = schedule.simulate(duration)
    return [
        Event(task, device, *times[task])
        for device, tasks in enumerate(schedule.tasks)
        for task in tasks
    ]
