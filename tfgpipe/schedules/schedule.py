"""Schedules: the tasks of every device, in the order in which it runs them.

What a task is and needs is in `task.py`; known schedules, by name, are in
`named.py`.

Pure Python: nothing here knows TensorFlow. Everything takes time in proportion
to the number of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tfgpipe.checks import as_count, checked_amount
from tfgpipe.schedules.task import KINDS as KINDS
from tfgpipe.schedules.task import Task as Task
from tfgpipe.schedules.task import (
    as_tasks,
    check_complete,
    check_own_order,
    merged,
    places_of,
)

# What ends the work on a micro-batch in a cell, and frees its activations.
_LAST = ("backward", "weight_gradient")


class Schedule:
    """The ordered tasks of every device.

    A cell has for every micro-batch one "forward", and one "backward", or, in
    its place, one "input_gradient" and one "weight_gradient". A "recompute"
    may come in between. For evaluation, all tasks are "forward".

    Args:
        tasks: One list a device, in the order in which the device runs them:
            all tasks of the cells on that device, as `Task` or as tuples
            (kind, cell, micro-batch).

    Attributes:
        tasks: The tasks of every device, as tuples of `Task`.
        num_devices: How many devices there are.
        num_cells: How many cells there are, K.
        num_micro_batches: How many micro-batches there are, M.

    Raises:
        ValueError: If a task is missing, comes twice or too early, if a cell
            is on two devices, or if devices would wait for each other for
            ever. Names the first such task.

    Example:

    >>> one_cell = Schedule(
    ...     [
    ...         [("forward", 0, 0), ("forward", 0, 1)]
    ...         + [("backward", 0, 1), ("backward", 0, 0)]
    ...     ]
    ... )
    >>> one_cell.length(lambda task: 2 if task.kind == "backward" else 1)
    6
    >>> one_cell.held()
    [2]
    """

    def __init__(self, tasks: Iterable[Iterable[Task | tuple[str, int, int]]]):
        self.tasks = as_tasks(tasks)
        self.num_devices = len(self.tasks)
        self._place = places_of(self.tasks)
        self.num_cells = 1 + max(t.cell for t in self._place)
        self.num_micro_batches = 1 + max(t.micro_batch for t in self._place)
        self._devices = {t.cell: d for t, (d, _) in self._place.items()}
        check_complete(self._place, self.num_cells, self.num_micro_batches)
        self._needs = {
            t: [n for n in t.needs(self.num_cells) if n in self._place]
            for t in self._place
        }
        check_own_order(self._place, self._needs)
        self._order = merged(self._place, self._needs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.tasks == other.tasks

    def __hash__(self) -> int:
        return hash(self.tasks)

    def __repr__(self) -> str:
        return (
            f"<Schedule num_devices={self.num_devices} "
            f"num_cells={self.num_cells} "
            f"num_micro_batches={self.num_micro_batches}>"
        )

    @property
    def is_forward_first(self) -> bool:
        """Whether the last cell runs all its forward tasks first."""
        last = self.num_cells - 1
        own = [t for t in self.tasks[self.device_of(last)] if t.cell == last]
        forward = own[: self.num_micro_batches]
        return all(task.kind == "forward" for task in forward)

    @property
    def is_training(self) -> bool:
        """Whether there are backward tasks."""
        return any(task.kind in _LAST for task in self._order)

    def device_of(self, cell: int) -> int:
        """Index of the device that runs a cell."""
        return self._devices[cell]

    def needs(self, task: Task) -> list[Task]:
        """The tasks of this schedule whose results a task takes."""
        return list(self._needs[task])

    def order(self) -> list[Task]:
        """All tasks, one after the other, nothing before what it needs.

        Of the tasks that could be next, that of the last cell is taken: a
        micro-batch goes through all cells before the next one starts.
        """
        return list(self._order)

    def limited_to(self, num_micro_batches: int) -> Schedule:
        """The schedule without the tasks of later micro-batches.

        Args:
            num_micro_batches: How many are left, from 1 to as many as there
                are.
        """
        count = as_count(num_micro_batches)
        if count is None or count > self.num_micro_batches:
            raise ValueError(
                "`num_micro_batches` must be from 1 to "
                f"{self.num_micro_batches}, those of the schedule. Received: "
                f"num_micro_batches={num_micro_batches!r}. Make a schedule of "
                "more micro-batches, and limit that."
            )
        return Schedule(
            [t for t in own if t.micro_batch < count] for own in self.tasks
        )

    def split(self, groups: Sequence[int]) -> Schedule:
        """The schedule with every cell split into several, on its device.

        Args:
            groups: How many cells each cell becomes, one after the other.

        Example:

        >>> one = Schedule([[("forward", 0, 0), ("backward", 0, 0)]])
        >>> [f"{kind} {k}" for kind, k, _ in one.split([2]).tasks[0]]
        ['forward 0', 'forward 1', 'backward 1', 'backward 0']
        """
        starts = [sum(groups[:k]) for k in range(len(groups))]
        tasks: list[list[Task]] = []
        for own in self.tasks:
            tasks.append([])
            for kind, k, m in own:
                cells = range(starts[k], starts[k] + groups[k])
                order = cells if kind == "forward" else reversed(cells)
                tasks[-1].extend(Task(kind, cell, m) for cell in order)
        return Schedule(tasks)

    def with_recompute(self, keeps: Callable[[int, int], bool]) -> Schedule:
        """The schedule with recomputations right before they are used.

        Args:
            keeps: Says of (cell, micro-batch) whether the forward task keeps
                its activations, so that nothing has to be recomputed.

        Returns:
            The same schedule, with a "recompute" directly before every
            "backward" or "input_gradient" that is not kept and had none.
        """
        tasks: list[list[Task]] = []
        for own in self.tasks:
            tasks.append([])
            for task in own:
                again = Task("recompute", task.cell, task.micro_batch)
                if (
                    task.kind in ("backward", "input_gradient")
                    and again not in self._place
                    and not keeps(task.cell, task.micro_batch)
                ):
                    tasks[-1].append(again)
                tasks[-1].append(task)
        return Schedule(tasks)

    def first_backward(self, cell: int) -> int | None:
        """The micro-batch that goes backward through a cell first, if any."""
        for kind, k, m in self.tasks[self.device_of(cell)]:
            if k == cell and kind in ("backward", "input_gradient"):
                return m
        return None

    def simulate(
        self, duration: Callable[[Task], float], link: float = 0
    ) -> dict[Task, tuple[float, float]]:
        """When every task runs, if only tasks and transfers take time.

        Args:
            duration: How long a task takes, in any unit.
            link: How long it takes to another device, in this unit; no device
                is busy meanwhile.

        Returns:
            Start and end of every task: as early as its device and the tasks
            it needs allow.
        """
        checked_amount("link", link, "the time of a transfer")
        times: dict[Task, tuple[float, float]] = {}
        free: list[float] = [0] * self.num_devices
        for task in self._order:
            device = self.device_of(task.cell)
            ready = [
                times[t][1] + (0 if self.device_of(t.cell) == device else link)
                for t in self._needs[task]
            ]
            start = max([free[device], *ready])
            free[device] = start + duration(task)
            times[task] = start, free[device]
        return times

    def length(
        self, duration: Callable[[Task], float], link: float = 0
    ) -> float:
        """When the last task ends; see `simulate`."""
        return max(end for _, end in self.simulate(duration, link).values())

    def bubble(
        self, duration: Callable[[Task], float], link: float = 0
    ) -> float:
        """Share of the length in which the devices idle; see `simulate`."""
        work = sum(duration(task) for task in self._order)
        return 1 - work / (self.num_devices * self.length(duration, link))

    def held(self) -> list[int]:
        """How many micro-batches every device holds at most.

        One counts, once a cell, from its forward task to the end of its last
        backward task. What has no backward task is not held.
        """
        most = [0] * self.num_devices
        for device, own in enumerate(self.tasks):
            now = 0
            for task in own:
                now += (task.kind == "forward") - (task.kind in _LAST)
                most[device] = max(most[device], now)
        return most if self.is_training else [0] * self.num_devices


def fill_drain(tasks: Iterable[Task]) -> list[Task]:
    """All forward tasks, then all others, a micro-batch after the other."""

    def place(task: Task) -> tuple[int, ...]:
        kind, k, m = task
        if kind == "forward":
            return 0, m, k
        return 1, -m, -k, KINDS.index(kind)

    return sorted(tasks, key=place)
