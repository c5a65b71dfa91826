"""Which replica computes which micro-batches, and on which devices.

Of the micro-batches of a mini-batch, replica r has those from `count * r // R`
to `count * (r + 1) // R`: R M micro-batches are M each. A mini-batch of few
rows, which has fewer micro-batches, may leave some replicas idle.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from tfgpipe.schedule import Schedule
from tfgpipe.tasks import Task


class Replicas:
    """How the micro-batches of one mini-batch are shared among replicas.

    Args:
        devices: Of each cell, the devices that run it: one a replica.
        num_micro_batches: Micro-batches of the mini-batch.

    Attributes:
        count: R, the number of replicas.
        busy: The replicas that have micro-batches.
        schedules: Of each busy replica the schedule, once there is a plan.
    """

    def __init__(
        self, devices: Sequence[Sequence[str]], num_micro_batches: int
    ):
        self._devices = devices
        self.count = len(devices[0])
        self._bounds = [
            num_micro_batches * r // self.count for r in range(self.count + 1)
        ]
        self.busy = [r for r in range(self.count) if self.micro_batches(r)]
        self.schedules: dict[int, Schedule] = {}

    def of(self, m: int) -> int:
        """The replica that computes micro-batch m."""
        return bisect.bisect_right(self._bounds, m) - 1

    def device(self, k: int, m: int) -> str:
        """Where cell k computes micro-batch m."""
        return self.device_in(self.of(m), k)

    def device_in(self, r: int, k: int) -> str:
        """Where replica r has cell k."""
        return self._devices[k][r]

    def micro_batches(self, r: int) -> range:
        """The micro-batches of replica r."""
        return range(self._bounds[r], self._bounds[r + 1])

    def plan(self, schedule_of: Callable[[int], Schedule]) -> None:
        """Gives every replica its schedule.

        Args:
            schedule_of: Returns the schedule for a number of micro-batches.
        """
        self.schedules = {
            r: schedule_of(len(self.micro_batches(r))) for r in self.busy
        }

    def goes_back_first(self, k: int, m: int) -> bool:
        """Whether micro-batch m goes back through cell k before any other.

        Any other of its replica.
        """
        r = self.of(m)
        first = self.schedules[r].first_backward(k)
        return first == m - self._bounds[r]

    def tasks(self, keeps: Callable[[int, int], bool] | None) -> list[Task]:
        """The tasks of all replicas, nothing before what it needs.

        The replicas take turns, but what all begin with, forward tasks, comes
        first: what is known after the last of them is known before the first
        backward task.

        Args:
            keeps: Says of (cell, micro-batch) whether nothing has to be
                recomputed. None where there is no backward pass.
        """
        begins, rests = [], []
        for r, schedule in self.schedules.items():
            start = self._bounds[r]
            if keeps is not None:
                schedule = schedule.with_recompute(_shifted(keeps, start))
            own = [
                task._replace(micro_batch=start + task.micro_batch)
                for task in schedule.order()
                if keeps is not None or _is_forward(task)
            ]
            begin = list(itertools.takewhile(_is_forward, own))
            begins.append(begin)
            rests.append(own[len(begin) :])
        return [*_in_turn(begins), *_in_turn(rests)]


def _shifted(
    keeps: Callable[[int, int], bool], start: int
) -> Callable[[int, int], bool]:
    return lambda k, m: keeps(k, start + m)


def _is_forward(task: Task) -> bool:
    return task.kind == "forward"


def _in_turn(lists: list[list[Task]]) -> list[Task]:
    """One of each list, again and again."""
    turns = itertools.zip_longest(*lists)
    return [task for turn in turns for task in turn if task is not None]
