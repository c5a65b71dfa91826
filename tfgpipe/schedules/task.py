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

import heapq
import itertools
from collections.abc import Mapping, Sequence
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


class Need(NamedTuple):
    """Operations on the same micro-batch whose results a kind takes.

    Attributes:
        offset: Of their cell: -1 is the cell before, 0 the same one.
        kinds: Which ones, as far as a schedule has them.
    """

    offset: int
    kinds: tuple[str, ...]


class Kind(NamedTuple):
    """The properties of a kind.

    Attributes:
        letter: In texts.
        needs: What it waits for.
        units: How long it takes among equal cells, a forward pass as the unit.
        lane: Which of a device's lanes it takes: those run side by side. In
            others than "compute", it follows what was computed before it.
        is_backward: Whether it takes a gradient: it is of the backward pass.
        sends: What another cell takes of it: "outputs", "gradients" or "".
        begins: Whether a cell holds something of the micro-batch from it on.
        ends: Whether it ends the work on it, and frees its activations.
        leaves: Whether the activations leave the device.
        is_optional: Whether a micro-batch may do without it.
        is_scheduled: Whether schedules have it; else a pass adds it.
    """

    letter: str
    needs: tuple[Need, ...]
    units: float = 1
    lane: str = "compute"
    is_backward: bool = False
    sends: str = ""
    begins: bool = False
    ends: bool = False
    leaves: bool = False
    is_optional: bool = False
    is_scheduled: bool = True


_GRADIENTS = ("backward", "input_gradient", "head")

_FOR_GRADIENTS = (
    Need(0, ("forward", "recompute", "fetch")),
    Need(1, _GRADIENTS),
)

KINDS = {
    "forward": Kind(
        "F", (Need(-1, ("forward",)),), sends="outputs", begins=True
    ),
    "recompute": Kind("R", (Need(0, ("forward",)),), is_optional=True),
    "backward": Kind(
        "B", _FOR_GRADIENTS, 2, is_backward=True, sends="gradients", ends=True
    ),
    "input_gradient": Kind(
        "I", _FOR_GRADIENTS, is_backward=True, sends="gradients"
    ),
    "weight_gradient": Kind(
        "W", (Need(0, ("input_gradient",)),), is_backward=True, ends=True
    ),
}
# Which schedules have not, and passes add.
KINDS["head"] = KINDS["backward"]._replace(
    letter="H",
    needs=KINDS["forward"].needs,
    units=3,
    begins=True,
    is_scheduled=False,
)
# As slow as pays: a transfer takes half the time of a forward pass.
_TRANSFER = Kind("", (), 0.5, is_scheduled=False)
KINDS["offload"] = _TRANSFER._replace(
    letter="O", needs=(Need(0, ("forward",)),), lane="to host", leaves=True
)
KINDS["fetch"] = _TRANSFER._replace(
    letter="T", needs=(Need(0, ("offload",)),), lane="from host", begins=True
)


def scheduled_kinds() -> list[str]:
    """Returns the kinds of which schedules are made."""
    return [
        kind for kind, properties in KINDS.items() if properties.is_scheduled
    ]


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
            for offset, kinds in (kind.needs if kind else ())
            for other in kinds
        ]


# Device and position of every task, device by device.
Places = dict[Task, tuple[int, int]]


def _at(task: Task, places: Places) -> str:
    device, position = places[task]
    return f"{task} at position {position} of device {device}"


def as_tasks(tasks: Any) -> tuple[tuple[Task, ...], ...]:
    """Makes tuples of `Task` of the lists that the user wrote."""
    try:
        devices = [list(tasks_of_device) for tasks_of_device in tasks]
    except TypeError:
        devices = []
    if not devices or not all(devices):
        raise ValueError(
            "`tasks` must be one list of tasks a device, none of them empty. "
            f"Received: tasks={tasks!r}. Pass a list of lists of `Task`."
        )
    return tuple(
        tuple(
            _as_task(entry, f"at position {position} of device {d}")
            for position, entry in enumerate(tasks_of_device)
        )
        for d, tasks_of_device in enumerate(devices)
    )


def _as_task(entry: Any, at: str) -> Task:
    """Checks a task that the user wrote, on its own."""
    if not isinstance(entry, (tuple, list)) or len(entry) != 3:
        raise ValueError(
            "`tasks` must hold a `Task` or a tuple (kind, cell, micro-batch) "
            f"for every task. Received: {entry!r} {at}. Pass one list a "
            "device, as in [[('forward', 0, 0), ('backward', 0, 0)]]."
        )
    kind, *indices = entry
    if kind not in scheduled_kinds():
        raise ValueError(
            f"`tasks` must be of the kinds {scheduled_kinds()}. Received: "
            f"{kind!r} {at}."
        )
    k, m = map(as_integer, indices)
    if k is None or m is None or min(k, m) < 0:
        raise ValueError(
            "`tasks` must have cells and micro-batches that are integers from "
            f"0. Received: {tuple(entry)!r} {at}. Write (kind, cell, "
            "micro-batch)."
        )
    return Task(kind, k, m)


def places_of(tasks: tuple[tuple[Task, ...], ...]) -> Places:
    """Returns the device and position of every task; none comes twice."""
    places: Places = {}
    devices: dict[int, int] = {}
    for device, tasks_of_device in enumerate(tasks):
        for position, task in enumerate(tasks_of_device):
            here = f"at position {position} of device {device}"
            if task in places:
                raise ValueError(
                    "`tasks` must have every task once. Received: "
                    f"{_at(task, places)}, and again {here}. Remove one."
                )
            if devices.setdefault(task.cell, device) != device:
                raise ValueError(
                    "`tasks` must have all tasks of a cell on one device. "
                    f"Received: {task} {here}, but others of this cell on "
                    f"device {devices[task.cell]}. Move it there."
                )
            places[task] = device, position
    return places


def check_complete(
    places: Places, num_cells: int, num_micro_batches: int
) -> None:
    """Every micro-batch has its tasks in every cell."""
    is_training = any(task.kind != "forward" for task in places)
    optional = {kind for kind in KINDS if KINDS[kind].is_optional}
    devices = {task.cell: device for task, (device, _) in places.items()}
    # Not a product, which would be a list of all.
    pairs = ((k, m) for k in range(num_cells) for m in range(num_micro_batches))
    for k, m in pairs:
        has = {kind for kind in KINDS if Task(kind, k, m) in places}
        needed = ["forward"]
        if has & {*HALVES}:
            needed += HALVES
        elif is_training:
            needed.append("backward")
        for kind in needed:
            if kind not in has:
                where = f" on device {devices[k]}" if k in devices else ""
                raise ValueError(
                    "`tasks` must have every task of each of the "
                    f"{num_micro_batches} micro-batches in each of the "
                    f"{num_cells} cells. Received: no {Task(kind, k, m)}"
                    f"{where}. Add it."
                )
        if has - {*needed} - optional:
            raise ValueError(
                "`tasks` must have, for a micro-batch in a cell, either a "
                "backward, or an input_gradient and a weight_gradient. "
                f"Received: both for micro-batch {m} in cell {k}. Remove "
                f"{_at(Task('backward', k, m), places)}."
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
    needs = {
        task: [need for need in task.needs() if need in places]
        for task in places
    }
    # A task waits for those it needs and for the one before on its device.
    waits = {task: len(awaited) for task, awaited in needs.items()}
    followers: dict[Task, list[Task]] = {task: [] for task in needs}
    for task, awaited in needs.items():
        for need in awaited:
            followers[need].append(task)
    for before, task in itertools.pairwise(places):
        if places[before][0] == places[task][0]:
            waits[task] += 1
            followers[before].append(task)
    ready = [(-task.cell, task) for task, count in waits.items() if count == 0]
    heapq.heapify(ready)
    order: list[Task] = []
    while ready:
        _, task = heapq.heappop(ready)
        order.append(task)
        for follower in followers[task]:
            waits[follower] -= 1
            if waits[follower] == 0:
                heapq.heappush(ready, (-follower.cell, follower))
    if len(order) < len(places):
        _raise_deadlock(places, needs, {*order})
    return order


def _raise_deadlock(
    places: Places, needs: Mapping[Task, Sequence[Task]], done: set[Task]
) -> None:
    """Names the tasks that wait for each other: the first of some devices."""
    next_of: dict[int, Task] = {}
    for task, (device, _) in places.items():
        if task not in done:
            next_of.setdefault(device, task)
    path: dict[Task, Task] = {}  # each with what it waits for
    task = next(iter(next_of.values()))
    while task not in path:
        path[task] = next(need for need in needs[task] if need not in done)
        task = next_of[places[path[task]][0]]
    waiting = "; ".join(
        f"{_at(t, places)} waits for {_at(path[t], places)}"
        for t in itertools.dropwhile(lambda t: t != task, path)
    )
    raise ValueError(
        "`tasks` must not let devices wait for ever. Received: "
        f"{waiting}. Have one of these devices run what is awaited earlier."
    )
