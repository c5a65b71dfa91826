"""Which replica computes which micro-batches, and on which devices.

Of the micro-batches of a mini-batch, replica r has those from `count * r // R`
to `count * (r + 1) // R`: R M micro-batches are M each. A mini-batch of few
rows, which has fewer micro-batches, may leave some replicas idle.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from tfgpipe.schedules import Schedule, Task


class Replicas:
    """How the micro-batches of one mini-batch are shared among replicas.

    Args:
        grid: Names of devices, grid[r][k] that of cell k in replica r.
        num_micro_batches: Micro-batches of the mini-batch.

    Attributes:
        count: R, the number of replicas.
        busy: The replicas that have micro-batches.
        schedules: Of each busy replica the schedule, once there is a plan.
    """

    def __init__(self, grid: Sequence[Sequence[str]], num_micro_batches: int):
        self._grid = grid
        self.count = len(grid)
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
        return self._grid[r][k]

    def micro_batches(self, r: int) -> range:
        """The micro-batches of replica r."""
        return range(self._bounds[r], self._bounds[r + 1])

    def normalized_at_once(self, together: bool) -> list[list[int]]:
        """The micro-batches whose moments are taken at once.

        Args:
            together: Whether over replicas: the i-th of all of them. If not,
                each micro-batch has its own.
        """
        every = [self.micro_batches(r) for r in self.busy]
        if not together:
            return [[m] for own in every for m in own]
        partners = itertools.zip_longest(*every)
        return [[m for m in row if m is not None] for row in partners]

    def plan(
        self, schedule_of: Callable[[int], Schedule], together: bool = False
    ) -> None:
        """Gives every replica its schedule.

        Args:
            schedule_of: Returns the schedule for a number of micro-batches.
            together: Whether partners run together: the same tasks of the i-th
                micro-batches of all replicas. Then all schedules are those of
                the most micro-batches, without what a replica has not.
        """
        self._together = together
        counts = {r: len(self.micro_batches(r)) for r in self.busy}
        self._longest = schedule_of(max(counts.values()))
        self.schedules = {
            r: self._longest.limited_to(count)
            if together
            else schedule_of(count)
            for r, count in counts.items()
        }

    def goes_back_first(self, k: int, m: int) -> bool:
        """Whether micro-batch m goes back through cell k before any other.

        Any other of its replica.
        """
        r = self.of(m)
        first = self.schedules[r].first_backward(k)
        return first == m - self._bounds[r]

    def groups(
        self,
        keeps: Callable[[int, int], bool] | None,
        sort: Callable[[list[Task]], list[Task]] | None = None,
    ) -> list[list[Task]]:
        """The tasks of all replicas, those that run together in a list.

        Nothing comes before what it needs. The replicas take turns, but what
        all begin with, forward tasks, comes first: what is known after the
        last of them is known before the first backward task.

        Args:
            keeps: Says of (cell, micro-batch) whether nothing has to be
                recomputed. None where there is no backward pass.
            sort: Sorts tasks, to replace the schedule's order.
        """
        own = {r: self._own_tasks(r, keeps) for r in self.busy}
        if self._together:
            every = self._longest.with_recompute(lambda k, m: False).order()
            groups = [
                [self._of_replica(r, task) for r in own if task in own[r]]
                for task in (sort(every) if sort else every)
            ]
            return [group for group in groups if group]
        begins, rests = [], []
        for r, tasks in own.items():
            tasks = [self._of_replica(r, task) for task in tasks]
            begin = list(itertools.takewhile(_is_forward, tasks))
            begins.append(begin)
            rests.append(tasks[len(begin) :])
        every = [*_in_turn(begins), *_in_turn(rests)]
        return [[task] for task in (sort(every) if sort else every)]

    def _own_tasks(
        self, r: int, keeps: Callable[[int, int], bool] | None
    ) -> list[Task]:
        """The tasks of one replica, with micro-batches from 0."""
        if keeps is None:
            order = self.schedules[r].order()
            return [task for task in order if _is_forward(task)]
        start = self._bounds[r]
        return (
            self.schedules[r]
            .with_recompute(lambda k, m: keeps(k, start + m))
            .order()
        )

    def _of_replica(self, r: int, task: Task) -> Task:
        return task._replace(micro_batch=self._bounds[r] + task.micro_batch)


def _is_forward(task: Task) -> bool:
    return task.kind == "forward"


def _in_turn(lists: list[list[Task]]) -> list[Task]:
    """One of each list, again and again."""
    turns = itertools.zip_longest(*lists)
    return [task for turn in turns for task in turn if task is not None]
