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
from typing import Any, NamedTuple

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
    Task,
    as_tasks,
    check_complete,
    in_one_order,
    places_of,
    scheduled_kinds,
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
        if isinstance(tasks, str):
            tasks_of_text(tasks, self._take)
        else:
            self._take(tasks)

    def _take(
        self, tasks: Any, keeps: frozenset[tuple[int, int]] | None = None
    ) -> None:
        """Takes the tasks, checked."""
        self.keeps = keeps
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
        return [
            Op(*task, self._devices[task.cell], task in kept)
            for task in self._order
        ]

    def recomputing(self) -> set[int]:
        """Returns the cells that recompute, whatever `remat` says."""
        cells = {t.cell for t in self._order if t.kind == "recompute"}
        if self.keeps is not None:
            cells |= {
                t.cell
                for t in self._order
                if t.kind == "forward" and t[1:] not in self.keeps
            }
        return cells

    def program(
        self, remat: Rule = "never", facts: Sequence[CellFacts] | None = None
    ) -> Program:
        """Lowers it to a program, see `lower`.

        Args:
            remat: The rule of all cells, see `Remat`.
            facts: What is known of each cell. None: all are trained.

        Raises:
            ValueError: If there is no such rule, or facts of other cells.
        """
        rules = Remat([checked_rule(remat)] * self.num_cells)
        if facts is None:
            facts = [CellFacts(needs_dx=k > 0) for k in range(self.num_cells)]
        if len(facts) != self.num_cells:
            raise ValueError(
                "`facts` must have one item for each cell of the schedule, "
                f"{self.num_cells}. Received: {len(facts)}. Pass one "
                "`CellFacts` a cell, or none."
            )
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

    def held(self, sizes: Sequence[float] | None = None) -> list[Any]:
        """Returns how many micro-batches every device holds at most.

        One counts, once a cell, from its forward task to the end of its last
        backward task. What has no backward task is not held.

        Args:
            sizes: What it takes to hold one in each cell, to have the sum of
                these instead of the number.
        """
        return self._written.held(sizes)


def _of_ops(
    duration: Callable[[Task], float], link: float
) -> tuple[Callable[[Op], float], Callable[[Op], float]]:
    """Returns the same of operations, checked."""
    checked_amount("link", link, "the time of a transfer")
    return lambda op: duration(op.task), lambda op: link


# ------------------------------------------------------------------- from text
_LABEL = re.compile(r"\s*device\s+([0-9]+)(?!\S)")

_AT = re.compile(r"at position (\d+) of device (\d+)")

_ON = re.compile(r"on device (\d+)")

_WORD = re.compile(r"\S+")


class _Word(NamedTuple):
    """A task, whether it keeps, and where it is written."""

    task: Task
    keeps: bool
    line: int
    end: int


def tasks_of_text(text: str, make: Callable[[Any, Any], Any]) -> Any:
    """Makes something of the tasks that a text says.

    Args:
        text: As a `Program` is printed; what follows a `#` is left out. Without
            names of devices, rows are devices 0, 1 and so on. Where no cell is
            said, it is the device's index.
        make: Makes it of a list of tasks for each device, and the (cell,
            micro-batch) whose forward task keeps, or None where that is not
            said. What it refuses at some position of a device is marked in the
            text.

    Raises:
        ValueError: If the text says something else, or `make` refuses it.
    """
    lines = text.splitlines()
    kinds = {KINDS[kind].letter: kind for kind in scheduled_kinds()}
    task_word = rf"([{''.join(kinds)}])([0-9]+)(?:\.([0-9]+))?(\+?)-*"

    def refused(
        problem: object, line: int, end: int | None = None
    ) -> ValueError:
        """Returns an error with a mark behind a place of the text."""
        shown, written = [*lines], lines[line]
        if end is None:
            end = len(written.partition("#")[0].rstrip())
        shown[line] = f"{written[:end]} <-- here{written[end:]}"
        marked = "\n".join(row for row in shown if row.strip())
        return ValueError(f"{problem}\n{marked}")

    rows: dict[int, list[_Word]] = {}
    line_of: dict[int, int] = {}
    for line, with_comment in enumerate(lines):
        written = with_comment.partition("#")[0]
        label = _LABEL.match(written)
        if not written.strip():
            continue
        device = int(label[1]) if label else len(rows)
        words = []
        for match in _WORD.finditer(written, label.end() if label else 0):
            word = re.fullmatch(task_word, match[0])
            if word is None:
                raise refused(
                    f"`tasks` must be one of the letters {', '.join(kinds)} "
                    "each, and its micro-batch or its cell and micro-batch, as "
                    f"in F0 or F3.0. Received: {match[0]!r}.",
                    line,
                    match.end(),
                )
            letter, first, second, plus = word.groups()
            k, m = (device, first) if second is None else (first, second)
            task = Task(kinds[letter], int(k), int(m))
            words.append(_Word(task, bool(plus), line, match.end()))
        if device in rows or not words:
            received = (
                f"device {device} again" if words else "a row without tasks"
            )
            raise refused(
                "`tasks` must have one row of tasks a device. Received: "
                f"{received}.",
                line,
            )
        rows[device], line_of[device] = words, line
    missing = {*range(len(rows) or 1)} - {*rows}
    if missing:
        problem = (
            "`tasks` must have a row for each device, from 0. Received: no row "
            f"of device {min(missing)}."
        )
        if not rows:
            raise ValueError(problem)
        raise refused(problem, line_of[max(rows)])
    kept = _kept([word for row in rows.values() for word in row], refused)
    tasks = [[word.task for word in rows[d]] for d in range(len(rows))]
    try:
        return make(tasks, kept)
    except ValueError as error:
        device = max(rows)
        if at := _AT.search(str(error)):
            position, device = map(int, at.groups())
            place = rows[device][position]
            raise refused(error, place.line, place.end) from None
        if on := _ON.search(str(error)):
            device = int(on[1])
        raise refused(error, line_of[device]) from None


def _kept(
    words: Sequence[_Word], refused: Callable[..., ValueError]
) -> frozenset[tuple[int, int]] | None:
    """Reads which forward tasks keep: cells and micro-batches, or None."""
    again = {word.task[1:] for word in words if word.task.kind == "recompute"}
    kept = [word for word in words if word.keeps]
    for task, _, line, end in kept:
        if task.kind != "forward" or task[1:] in again:
            raise refused(
                "A + must be at a forward task, which keeps what the backward "
                "pass needs, and of which there is no recomputation. Received: "
                f"one at {task}. Take it, or the R, out.",
                line,
                end,
            )
    return frozenset(word.task[1:] for word in kept) or None
