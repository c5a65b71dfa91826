"""Schedules: the tasks of every device, in the order in which it runs them.

What a task is and needs is in `task.py`; known schedules, by name, are in
`orders.py`.

Pure Python: nothing here knows TensorFlow. Everything takes time in proportion
to the number of tasks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tfgpipe.checks import checked_amount
from tfgpipe.schedules.lowering import (
    CellFacts,
    Remat,
    Rule,
    checked_rule,
    lower,
)
from tfgpipe.schedules.program import Op, Program
from tfgpipe.schedules.task import (
    KINDS,
    SCHEDULED,
    Task,
    as_tasks,
    check_complete,
    in_one_order,
    places_of,
)


class Schedule:
    """The ordered tasks of every device.

    A cell has for every micro-batch one "forward", and one "backward", or, in
    its place, one "input_gradient" and one "weight_gradient". A "recompute"
    may come in between. For evaluation, all tasks are "forward".

    Args:
        tasks: One list a device, in the order in which the device runs them:
            all tasks of the cells on that device, as `Task` or as tuples
            (kind, cell, micro-batch). Or a text with a row a device, as a
            `Program` is printed: letters F, B and R for forward, backward and
            recompute, I and W for input and weight gradient, each with its
            micro-batch. Cell k is on device k, if it is not said as in F3.0.
            Where a `+` is in it, F0+ keeps what the backward pass needs, and
            F0 does not: then `remat` has no say.

    Attributes:
        tasks: The tasks of every device, as tuples of `Task`.
        num_devices: How many devices there are.
        num_cells: How many cells there are, K.
        num_micro_batches: How many micro-batches there are, M.
        keeps: The (cell, micro-batch) whose forward task keeps what the
            backward pass needs; None where `remat` says it.

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
    >>> one_cell == Schedule("F0 F1 B1 B0")
    True
    """

    def __init__(
        self, tasks: str | Iterable[Iterable[Task | tuple[str, int, int]]]
    ):
        self.keeps: frozenset[tuple[int, int]] | None = None
        if isinstance(tasks, str):
            tasks, self.keeps = _tasks_of_text(tasks)
        self.tasks = as_tasks(tasks)
        self.num_devices = len(self.tasks)
        self._place = places_of(self.tasks)
        self.num_cells = 1 + max(t.cell for t in self._place)
        self.num_micro_batches = 1 + max(t.micro_batch for t in self._place)
        self._devices = {t.cell: d for t, (d, _) in self._place.items()}
        check_complete(self._place, self.num_cells, self.num_micro_batches)
        self._order = in_one_order(self._place)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and self.tasks == other.tasks
            and self.keeps == other.keeps
        )

    def __hash__(self) -> int:
        return hash(self.tasks)

    def __str__(self) -> str:
        """Returns a text of which it can be made again."""
        return str(self._written)

    def __repr__(self) -> str:
        return (
            f"<Schedule num_devices={self.num_devices} "
            f"num_cells={self.num_cells} "
            f"num_micro_batches={self.num_micro_batches}>"
        )

    def plain(self) -> str | list[list[list[Any]]]:
        """As a file can hold it: lists of tasks, or the text if it keeps."""
        if self.keeps is not None:
            return str(self)
        return [[list(task) for task in tasks] for tasks in self.tasks]

    @property
    def is_training(self) -> bool:
        """Returns whether there are backward tasks."""
        return any(KINDS[task.kind].ends for task in self._order)

    def device_of(self, cell: int) -> int:
        """Returns the index of the device that runs a cell."""
        return self._devices[cell]

    def order(self) -> list[Task]:
        """Returns all tasks, one after the other, nothing before what it needs.

        Of the tasks that could be next, the last cell's is taken: a
        micro-batch goes through all cells before the next one starts.
        """
        return list(self._order)

    @functools.cached_property
    def ops(self) -> list[Op]:
        """The tasks in the order of `order`, each with its device."""
        kept = {Task("forward", k, m) for k, m in self.keeps or ()}
        return [Op(*t, self._devices[t.cell], t in kept) for t in self._order]

    def recomputing(self) -> set[int]:
        """Returns the cells that recompute, whatever `remat` says."""
        again = ["recompute"] + ["forward"] * (self.keeps is not None)
        return {op.cell for op in self.ops if op.kind in again and not op.keeps}

    def program(
        self, remat: Rule = "never", facts: Sequence[CellFacts] | None = None
    ) -> Program:
        """Lowers it to a program, see `lower`.

        Args:
            remat: The rule of all cells, see `Remat`.
            facts: What is known of each cell. None: all are trained.

        Raises:
            ValueError: If there is no such rule.
        """
        rules = Remat([checked_rule(remat)] * self.num_cells)
        if facts is None:
            facts = [CellFacts(needs_dx=k > 0) for k in range(self.num_cells)]
        return lower(lambda _: self, facts, rules, [self.num_micro_batches])

    def simulate(
        self, duration: Callable[[Task], float], link: float = 0
    ) -> dict[Task, tuple[float, float]]:
        """Simulates when tasks run, if only they and transfers take time.

        Args:
            duration: How long a task takes, in any unit.
            link: How long it takes to another device, in this unit; no device
                is busy meanwhile.

        Returns:
            Start and end of every task: as early as its device and the tasks
            it needs allow.
        """
        times = self._written.simulate(*_of_ops(duration, link))
        return dict(zip(self._order, times))

    @functools.cached_property
    def _written(self) -> Program:
        """The tasks as they are written."""
        return Program(self.ops, self.num_devices)

    def length(
        self, duration: Callable[[Task], float], link: float = 0
    ) -> float:
        """Returns when the last task ends; see `simulate`."""
        return self._written.length(*_of_ops(duration, link))

    def bubble(
        self, duration: Callable[[Task], float], link: float = 0
    ) -> float:
        """Returns the share of time in which devices idle; see `simulate`."""
        return self._written.bubble(*_of_ops(duration, link))

    def held(self) -> list[int]:
        """Returns how many micro-batches every device holds at most.

        One counts, once a cell, from its forward task to the end of its last
        backward task. What has no backward task is not held.
        """
        return self._written.held()


def _of_ops(
    duration: Callable[[Task], float], link: float
) -> tuple[Callable[[Op], float], Callable[[Op], float]]:
    """Returns the same of operations, checked."""
    checked_amount("link", link, "the time of a transfer")
    return lambda op: duration(op.task), lambda op: link


_LABEL = re.compile(r"\s*device\s+([0-9]+)(?!\S)")


def _tasks_of_text(
    text: str,
) -> tuple[list[list[Task]], frozenset[tuple[int, int]] | None]:
    """Reads the tasks of each device, and which forward tasks keep.

    The text is as a `Program` is printed; what follows a `#` is left out.
    Without names of devices, rows are devices 0, 1 and so on. Where no cell is
    said, it is the device's index. The forward tasks that keep are told by cell
    and micro-batch; None where that is not said.
    """
    kinds = {KINDS[kind].letter: kind for kind in SCHEDULED}
    pattern = rf"([{''.join(kinds)}])([0-9]+)(?:\.([0-9]+))?(\+?)-*"
    rows: list[tuple[int, list[Task]]] = []
    keepers: list[Task] = []
    for line in text.splitlines():
        written = line.partition("#")[0]
        if not written.strip():
            continue
        label = _LABEL.match(written)
        device = int(label[1]) if label else len(rows)
        row: list[Task] = []
        rows.append((device, row))
        for word in written[label.end() if label else 0 :].split():
            match = re.fullmatch(pattern, word)
            if match is None:
                raise ValueError(
                    f"`tasks` must be one of the letters {', '.join(kinds)} "
                    f"each, as in F0 or F3.0. Received: {word!r} in {line!r}."
                )
            letter, first, second, plus = match.groups()
            k, m = (device, first) if second is None else (first, second)
            row.append(Task(kinds[letter], int(k), int(m)))
            keepers += row[-1:] * bool(plus)
    devices = sorted(device for device, _ in rows)
    if devices != [*range(len(rows))] or not all(row for _, row in rows):
        raise ValueError(
            "`tasks` must have one row of tasks for each device, from 0. "
            f"Received: rows of the devices {devices}."
        )
    again = {t[1:] for _, row in rows for t in row if t.kind == "recompute"}
    for task in keepers:
        if task.kind != "forward" or task[1:] in again:
            raise ValueError(
                "A + must be at a forward task of which there is no "
                f"recomputation. Received: one at {task}."
            )
    kept = frozenset(task[1:] for task in keepers) or None
    return [row for _, row in sorted(rows)], kept
