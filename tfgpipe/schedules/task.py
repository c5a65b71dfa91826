"""Tasks, and lists of them: checked, and merged into one order.

A task is one computation of one micro-batch m in one cell k. What there is to
know of its kind is in one table, which all others read:

    forward(k, m)          after forward(k - 1, m)
    recompute(k, m)        after forward(k, m)
    backward(k, m)         after forward(k, m), recompute(k, m) if there is one,
                           and backward(k + 1, m) or input_gradient(k + 1, m)
    input_gradient(k, m)   the same as backward(k, m)
    weight_gradient(k, m)  after input_gradient(k, m)
    head(k, m)             forward and backward at once, of the last cell's
                           head: after forward(k - 1, m)
    offload(k, m)          after forward(k, m): what is kept goes to the host
    fetch(k, m)            after offload(k, m): and comes back

A recomputation does not need the gradient: it fills the time in which a device
waits for it. A new kind is a row here, and a case of `Pipeline._ready` and
`_take`, in `run/pipeline.py`.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import graphlib
import heapq
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfgpipe.checks import as_integer

# The lane of shards on devices that run other cells, or none.
BESIDE = "shards"


class Shard(NamedTuple):
    """A cell that computes some columns of a layer, beside others.

    Attributes:
        cells: The cells that compute the layer, one after the other; all take
            what the cell before the first gives, and the one behind the last
            takes what all give.
        device: Index of its device in the first replica.
        caller: Index of the device of the cell that hands it what it takes.
    """

    cells: range
    device: int
    caller: int

    @property
    def is_beside(self) -> bool:
        """Returns whether it runs beside what its device runs."""
        return self.device != self.caller


class Kind(NamedTuple):
    """The properties of a kind.

    Attributes:
        letter: In texts.
        needs: The operations on the same micro-batch whose results it takes,
            as far as a schedule has them: each a kind, and how many cells
            further on.
        units: How long it takes among equal cells, a forward pass as the unit.
        lane: Which of a device's lanes it takes: those run side by side. In
            others than "compute", it follows what was computed before it.
        sends: What another cell takes of it: "outputs", "gradients" or "".
        holds: How many micro-batches more a cell holds after it.
        ends: Whether it ends the work on the micro-batch.
    """

    letter: str
    needs: tuple[tuple[str, int], ...]
    units: float = 1
    lane: str = "compute"
    sends: str = ""
    holds: int = 0
    ends: bool = False


_FOR_GRADIENTS = (
    *(("forward", 0), ("recompute", 0), ("fetch", 0)),
    *(("backward", 1), ("input_gradient", 1), ("head", 1)),
)

KINDS = {
    "forward": Kind("F", (("forward", -1),), sends="outputs", holds=1),
    "recompute": Kind("R", (("forward", 0),)),
    "backward": Kind(
        "B", _FOR_GRADIENTS, 2, sends="gradients", holds=-1, ends=True
    ),
    "input_gradient": Kind("I", _FOR_GRADIENTS, sends="gradients"),
    "weight_gradient": Kind("W", (("input_gradient", 0),), holds=-1, ends=True),
}

SCHEDULED = tuple(KINDS)  # of which schedules are made; passes add the others

KINDS |= {
    "head": Kind("H", (("forward", -1),), 3, sends="gradients", ends=True),
    # As slow as pays: a transfer takes half the time of a forward pass.
    "offload": Kind("O", (("forward", 0),), 0.5, "to host", holds=-1),
    "fetch": Kind("T", (("offload", 0),), 0.5, "from host", holds=1),
}

# A backward pass is whole, or has these.
HALVES = ("input_gradient", "weight_gradient")


class Task(NamedTuple):
    """One computation of one micro-batch in one cell.

    Attributes:
        kind: One of `KINDS`.
        cell: Index of the cell, from 0.
        micro_batch: Index of the micro-batch, from 0.
    """

    kind: str
    cell: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(cell={self.cell}, micro_batch={self.micro_batch})"

    def needs(self) -> list[Task]:
        """Returns the tasks that this one needs, if the schedule has them.

        No schedule has all: a cell runs "backward" or "input_gradient", and
        need not recompute. `in_one_order` takes those that there are.
        """
        kind = KINDS.get(self.kind)  # an update of weights has none
        return [
            Task(other, self.cell + offset, self.micro_batch)
            for other, offset in (kind.needs if kind else ())
        ]


# Device and position of every task, device by device.
Places = dict[Task, tuple[int, int]]


def _at(task: Task, place: tuple[int, int]) -> str:
    return f"{task} at position {place[1]} of device {place[0]}"


def as_tasks(tasks: Any) -> tuple[tuple[Task, ...], ...]:
    """Makes tuples of `Task` of the lists that the user wrote."""
    try:
        listed = [[Task(*task) for task in of_device] for of_device in tasks]
    except TypeError:
        listed = []
    if not listed or not all(listed):
        raise ValueError(
            "`tasks` must be one list of tasks a device, none of them empty, "
            f"in a `schedule`, too. Received: tasks={tasks!r}."
        )
    return tuple(tuple(map(_checked, of_device)) for of_device in listed)


def _checked(task: Task) -> Task:
    k, m = as_integer(task.cell), as_integer(task.micro_batch)
    if task.kind not in SCHEDULED or k is None or m is None or min(k, m) < 0:
        raise ValueError(
            f"`tasks` must be of the kinds {SCHEDULED}, with integers from 0. "
            f"Received: {tuple(task)!r}."
        )
    return Task(task.kind, k, m)


def places_of(tasks: tuple[tuple[Task, ...], ...]) -> Places:
    """Returns the device and position of every task; none comes twice."""
    places: Places = {}
    devices: dict[int, int] = {}
    for device, tasks_of_device in enumerate(tasks):
        for position, task in enumerate(tasks_of_device):
            here = device, position
            if task in places:
                raise ValueError(
                    "`tasks` must have every task once. Received: "
                    f"{_at(task, places[task])}, and {_at(task, here)}."
                )
            if devices.setdefault(task.cell, device) != device:
                raise ValueError(
                    "`tasks` must have all tasks of a cell on one device. "
                    f"Received: {_at(task, here)}, others elsewhere."
                )
            places[task] = here
    return places


def check_complete(
    places: Places, num_cells: int, num_micro_batches: int
) -> None:
    """Every micro-batch has its tasks in every cell."""
    is_training = any(task.kind != "forward" for task in places)
    # Not a product, which would be a list of all.
    pairs = ((k, m) for k in range(num_cells) for m in range(num_micro_batches))
    for k, m in pairs:
        has = [kind for kind in SCHEDULED if Task(kind, k, m) in places]
        needed = ["forward"]
        if {*has} & {*HALVES}:
            needed += HALVES
        elif is_training:
            needed.append("backward")
        if [kind for kind in has if kind != "recompute"] != needed:
            raise ValueError(
                "`tasks` must have, for each micro-batch in each cell, a "
                "forward and, to train, a backward, or an input_gradient and "
                f"a weight_gradient. Received: {', '.join(has) or 'nothing'} "
                f"for micro-batch {m} in cell {k}."
            )


def merged(device_of: Mapping[Task, int]) -> list[Task]:
    """Returns tasks in an order in which they can run.

    They are told with their devices in the order of time, which stays on each
    device, and may be the same for a task and one that it needs.
    """
    by_device = sorted(device_of, key=device_of.__getitem__)
    places = {task: (device_of[task], i) for i, task in enumerate(by_device)}
    return in_one_order(places)


def in_one_order(places: Places) -> list[Task]:
    """Merges the devices' lists into one in which nothing comes too early.

    Of the tasks that could be next, the last cell's is taken. If devices would
    wait for each other for ever, it is an error.
    """
    awaited = {
        task: [t for t in task.needs() if t in places] for task in places
    }
    for before, task in itertools.pairwise(places):
        if places[before][0] == places[task][0]:
            awaited[task].append(before)
    sorter = graphlib.TopologicalSorter(awaited)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        around = itertools.pairwise(reversed(error.args[1]))
        waiting = "; ".join(
            f"{_at(task, places[task])} waits for {_at(need, places[need])}"
            for task, need in around
            if need in task.needs()
        )
        raise ValueError(
            "`tasks` must not let devices wait for ever. Received: "
            f"{waiting}. Have one of these devices run what is awaited earlier."
        ) from None
    order: list[Task] = []
    ready: list[tuple[int, Task]] = []
    while sorter.is_active():
        for task in sorter.get_ready():
            heapq.heappush(ready, (-task.cell, task))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order
