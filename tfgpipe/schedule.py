"""The order in which every device runs its tasks.

A schedule is one list of tasks a device. A task is the forward or the backward
computation of one micro-batch in one cell:

    forward(m, k)   needs forward(m, k - 1)
    backward(m, k)  needs backward(m, k + 1), and forward(m, k)

Pure Python: nothing here knows TensorFlow.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), figure 2c
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple


class Task(NamedTuple):
    """One computation of one micro-batch in one cell.

    Attributes:
        kind: "forward" or "backward".
        cell: Index of the cell, from 0.
        micro_batch: Index of the micro-batch, from 0.
    """

    kind: str
    cell: int
    micro_batch: int

    def needs(self, num_cells: int) -> list[Task]:
        """The tasks whose results this one takes."""
        kind, k, m = self
        if kind == "forward":
            return [Task(kind, k - 1, m)] if k > 0 else []
        after = [Task(kind, k + 1, m)] if k < num_cells - 1 else []
        return [Task("forward", k, m), *after]


def forward_only(num_cells: int, num_micro_batches: int) -> list[list[Task]]:
    """Every cell runs its micro-batches in order, for evaluation."""
    return [
        [Task("forward", k, m) for m in range(num_micro_batches)]
        for k in range(num_cells)
    ]


def gpipe(num_cells: int, num_micro_batches: int) -> list[list[Task]]:
    """Fill-drain: all forward, then all backward, last micro-batch first.

    Example:

    >>> [f"{kind[0]}{m}" for kind, _, m in gpipe(2, 3)[0]]
    ['f0', 'f1', 'f2', 'b2', 'b1', 'b0']
    """
    return [
        forward
        + [Task("backward", k, m) for m in reversed(range(num_micro_batches))]
        for k, forward in enumerate(forward_only(num_cells, num_micro_batches))
    ]


SCHEDULES: dict[str, Callable[[int, int], list[list[Task]]]] = {
    "gpipe": gpipe,
}


def in_order(tasks: list[list[Task]]) -> Iterator[Task]:
    """Merges the devices' lists into one in which nothing comes too early.

    Of the tasks that could be next, that of the last device is taken: a
    micro-batch goes through all cells before the next one starts.

    Args:
        tasks: The ordered tasks of each device.

    Raises:
        ValueError: If the devices would wait for each other for ever.

    Example:

    >>> [(kind[0], k, m) for kind, k, m in in_order(forward_only(2, 2))]
    [('f', 0, 0), ('f', 1, 0), ('f', 0, 1), ('f', 1, 1)]
    """
    num_cells = 1 + max(task.cell for device in tasks for task in device)
    position = [0] * len(tasks)
    done: set[Task] = set()
    while any(p < len(device) for p, device in zip(position, tasks)):
        for index in reversed(range(len(tasks))):
            if position[index] == len(tasks[index]):
                continue
            task = tasks[index][position[index]]
            if done.issuperset(task.needs(num_cells)):
                position[index] += 1
                done.add(task)
                yield task
                break
        else:
            waiting = [
                device[p]
                for p, device in zip(position, tasks)
                if p < len(device)
            ]
            raise ValueError(
                "A schedule must run every task after the tasks it needs. "
                f"Received: tasks that wait for each other: {waiting}. Check "
                "the order of these tasks on their devices."
            )


def bubble(num_partitions: int, num_micro_batches: int) -> float:
    """Share of a step in which a device idles under fill-drain.

    Args:
        num_partitions: K, at least 1.
        num_micro_batches: M, at least 1.

    Returns:
        (K - 1) / (M + K - 1), for cells of equal cost.

    Example:

    >>> bubble(2, 4)
    0.2

    Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), 2.3
    """
    return (num_partitions - 1) / (num_micro_batches + num_partitions - 1)
