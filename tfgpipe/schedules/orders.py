"""The orders of the schedules that have a name.

First those whose backward passes are whole: all forward, then all backward; or
backward as soon as possible. Then those of halves of backward passes.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import collections
import functools
import heapq
import math
from collections.abc import Callable, Sequence

from tfgpipe.checks import checked_amount, checked_counts
from tfgpipe.schedules.schedule import Schedule
from tfgpipe.schedules.task import KINDS, Task

_ROUNDING = 1e-9  # of quotients


def breadth_first(
    num_devices: int, num_micro_batches: int, num_chunks: int = 1
) -> Schedule:
    """All forward, then all backward, last micro-batch first.

    A device runs all micro-batches through a cell before it goes on to its
    next one: weights that are elsewhere are sent to it twice a mini-batch. With
    one cell a device it is "gpipe".

    Args:
        num_devices: D, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: V, the cells of a device; cell c is on device c mod D.

    Example:

    >>> [f"{kind[0]}{c}.{m}" for kind, c, m in breadth_first(2, 2, 2).tasks[0]]
    ['f0.0', 'f0.1', 'f2.0', 'f2.1', 'b2.1', 'b2.0', 'b0.1', 'b0.0']

    References: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), figure
    2c; [Lamy-Poirier, 2022](https://arxiv.org/abs/2211.05953)
    """
    tasks = []
    for d in range(num_devices):
        forward = [
            Task("forward", v * num_devices + d, m)
            for v in range(num_chunks)
            for m in range(num_micro_batches)
        ]
        back = [task._replace(kind="backward") for task in reversed(forward)]
        tasks.append(forward + back)
    return Schedule(tasks)


def interleaved(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    link_share: float = 0.0,
) -> Schedule:
    """Several cells on each device, so that pipelines fill and drain faster.

    With one cell a device it is "1f1b", PipeDream-flush, which goes backward as
    soon as possible, then forward and backward in turns.

    Micro-batches go through the V cells of a device in groups of at least D,
    where there are as many, so that M need not be a multiple of D. Before its
    first backward task a device runs as many forward tasks as are under way
    then: a group in each further round, and one for each device that follows,
    one less than in the reference. That is as short where a tensor is on the
    next device at once. For links that take time, one more for each device
    that follows hides up to half of a cell's time, two more a whole one: all
    but the first way there and the last one back.

    Args:
        num_devices: D, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: V, the cells of a device; cell c is on device c mod D.
        link_share: How long a tensor takes from a device to the next, as a
            share of what a cell takes for a micro-batch: forward, backward, and
            to compute again.

    Example:

    >>> [interleaved(4, 16, link_share=s).held()[0] for s in (0, 0.25, 1)]
    [4, 7, 10]

    References: [Narayanan et al., 2021](https://arxiv.org/abs/2104.04473), 2.2,
    and, of one cell, [2021](https://arxiv.org/abs/2006.09503), 3.2; for links
    [Zhuang et al., 2022](https://arxiv.org/abs/2211.05322), 4
    """
    share = checked_amount(
        "link_share", link_share, "a transfer's share of a cell's time"
    )
    share = min(share, num_micro_batches)  # all are under way then
    # A group goes through a device's cells together. It comes back to a device
    # when it has been on all others: with as many micro-batches as devices, or
    # more, the device has work until then; links take as many more as forward
    # tasks, a third of a cell's time, fit in them.
    least = math.ceil(num_devices * (1 + 3 * share) - _ROUNDING)
    num_groups = max(1, num_micro_batches // least)
    small, large = divmod(num_micro_batches, num_groups)
    visits, start = [], 0  # (chunk, micro-batch), as a device runs them forward
    for i in range(num_groups):
        group = range(start, start + small + (i < large))
        visits += [(v, m) for v in range(num_chunks) for m in group]
        start = group.stop
    last = num_chunks - 1
    # For each device that follows.
    under_way = 1 + math.ceil(2 * share - _ROUNDING)
    tasks = []
    for d in range(num_devices):
        forward = [Task("forward", v * num_devices + d, m) for v, m in visits]
        backward = [
            Task("backward", (last - v) * num_devices + d, m) for v, m in visits
        ]
        warm_up = under_way * (num_devices - 1 - d) + last * (
            small + (large > 0)
        )
        tasks_of_device = forward[:warm_up]
        for i, task in enumerate(backward):
            tasks_of_device += [*forward[warm_up + i : warm_up + i + 1], task]
        tasks.append(tasks_of_device)
    return Schedule(tasks)


# ------------------------------------------------- halves of backward passes
# Schedules of halves of backward passes: of zero bubble, and of V shapes.
#
# The order of a device's forward tasks and input gradients is given. Its weight
# gradients run where it would wait for another device, where it holds as many
# micro-batches as it may, and at the end, see `filled`:
#
#     given   f0 f1 .. i0 f2 i1 .. i2
#     filled  f0 f1 .. i0 f2 i1 w0 i2 w1 w2
#
# In a V, device d of D has two cells: d, and 2 D - 1 - d. A micro-batch goes
# forward to the last device and back to the first one, which has the loss; its
# gradient goes the same way:
#
#     device 0    0         7     forward tasks and input gradients of cells
#     device 1      1     6
#     device 2        2 5
#     device 3        3 4
#
# What a device holds is what lies between a cell's forward task and its weight
# gradient. Every device has long waits in one cell and short ones in the other:
# so all hold the same, and how much follows from the *gaps* of a micro-batch
# from one device to the next.
#
# References: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), of the V in
# section 6, and [Qi et al., 2024](https://arxiv.org/abs/2405.15362), section 3.

# A micro-batch has six tasks on each device: forward, input gradient and
# weight gradient of two cells.
_PERIOD = 6


def filled(
    orders: Sequence[Sequence[Task]],
    most_held: Sequence[int],
    duration: Callable[[Task], float] = lambda task: 1,
) -> Schedule:
    """Returns the schedule with each weight gradient where it costs least.

    Of each device, `orders` are its other tasks, and `most_held` the
    micro-batches that it may hold, once a cell. Where the order needs more,
    they are held.
    """
    device_of = {t.cell: d for d, tasks in enumerate(orders) for t in tasks}
    devices = [device_of[k] for k in range(len(device_of))]
    running = Running(devices)
    waiting = [collections.deque(tasks) for tasks in orders]
    late: list[collections.deque[Task]] = [collections.deque() for _ in orders]

    def choose(d: int) -> Task | None:
        task = waiting[d][0] if waiting[d] else None
        is_full = running.held[d] >= most_held[d]
        is_ready = task is not None and running.is_ready(*task)
        if late[d] and (
            not is_ready or (task and task.kind == "forward" and is_full)
        ):
            return late[d].popleft()
        if task is None or not is_ready:
            return None
        if task.kind == "input_gradient":
            late[d].append(task._replace(kind="weight_gradient"))
        return waiting[d].popleft()

    running.run(choose, duration)
    return Schedule(running.tasks)


# Of a cell whose backward passes are all in halves.
TASKS = ("forward", "input_gradient", "weight_gradient")


class Running:
    """Devices at work on tasks in halves, micro-batch after micro-batch.

    Args:
        devices: For each cell, its device.

    Attributes:
        tasks: The tasks that each device has started, in order.
        held: How many micro-batches each device holds, once a cell.
        started: For each cell and kind, how many tasks have started.
        ended: And how many of them have ended.
    """

    def __init__(self, devices: Sequence[int]):
        self._devices = devices
        num_devices = 1 + max(devices)
        self.tasks: list[list[Task]] = [[] for _ in range(num_devices)]
        self.held = [0] * num_devices
        self.started, self.ended = (
            [dict.fromkeys(TASKS, 0) for _ in devices] for _ in range(2)
        )

    def is_ready(self, kind: str, k: int, m: int) -> bool:
        """Returns whether all has ended that a task takes."""
        if kind == "weight_gradient":
            return m < self.ended[k]["input_gradient"]
        if kind == "input_gradient" and m >= self.ended[k]["forward"]:
            return False
        near = k - 1 if kind == "forward" else k + 1
        is_outside = not 0 <= near < len(self._devices)
        return is_outside or m < self.ended[near][kind]

    def run(
        self,
        choose: Callable[[int], Task | None],
        duration: Callable[[Task], float],
    ) -> float:
        """Runs tasks until no device chooses one; returns when the last ends.

        `choose` returns the task that a device begins, or None to wait.
        """
        ends: list[tuple[float, Task]] = []
        idle, now = set(range(len(self.tasks))), 0.0
        while True:
            for device in sorted(idle):
                task = choose(device)
                if task is not None:
                    idle.discard(device)
                    self.tasks[device].append(task)
                    self.started[task.cell][task.kind] += 1
                    self.held[device] += KINDS[task.kind].holds > 0
                    heapq.heappush(ends, (now + duration(task), task))
            if not ends:
                return now
            now = ends[0][0]
            while ends and ends[0][0] <= now:
                task = heapq.heappop(ends)[1]
                self.ended[task.cell][task.kind] += 1
                idle.add(self._devices[task.cell])
                self.held[self._devices[task.cell]] -= KINDS[task.kind].ends


def zero_bubble(num_devices: int, num_micro_batches: int) -> Schedule:
    """Fills the bubble with weight gradients, for which no device waits: ZB-H1.

    "1f1b" with the backward tasks in halves; device k runs its weight gradients
    k micro-batches late, and so holds as many micro-batches as device 0.

    Example:

    >>> [f"{kind[0]}{m}" for kind, _, m in zero_bubble(2, 3).tasks[1]]
    ['f0', 'i0', 'f1', 'i1', 'w0', 'f2', 'i2', 'w1', 'w2']

    Reference: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), section 2.1
    """
    tasks = []
    for k, order in enumerate(
        interleaved(num_devices, num_micro_batches).tasks
    ):
        late = [Task("weight_gradient", k, m) for m in range(num_micro_batches)]
        tasks_of_device = []
        for task in order:
            if task.kind == "forward":
                tasks_of_device.append(task)
            else:
                tasks_of_device.append(task._replace(kind="input_gradient"))
                if task.micro_batch >= k:
                    tasks_of_device.append(late.pop(0))
        tasks.append(tasks_of_device + late)
    return Schedule(tasks)


def zero_bubble_2p(num_devices: int, num_micro_batches: int) -> Schedule:
    """Warms up with twice as many micro-batches as "zero_bubble": ZB-H2.

    It is as short where all tasks take equal time, and has more to fill waits
    with where input gradients take longer, as with recomputations.

    Reference: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), section 2.2
    """
    micro_batches = range(num_micro_batches)
    orders = []
    for k in range(num_devices):
        forward = [Task("forward", k, m) for m in micro_batches]
        warm_up = min(num_micro_batches, 2 * (num_devices - k) - 1)
        tasks_of_device = forward[:warm_up]
        for m in micro_batches:
            tasks_of_device.append(Task("input_gradient", k, m))
            tasks_of_device += forward[warm_up + m : warm_up + m + 1]
        orders.append(tasks_of_device)
    return filled(orders, [2 * num_devices - 1] * num_devices)


# --------------------------------------------------------------------- V shapes
def _orders(
    num_devices: int, num_micro_batches: int, gaps: Sequence[int]
) -> list[list[Task]]:
    """Orders each device's tasks but weight gradients, by their start.

    A micro-batch follows the one before by a period. On no device, two of its
    tasks start at times that are a multiple of the period apart.

    Args:
        num_devices: D.
        num_micro_batches: M.
        gaps: Tasks from a device to the next: forward there and back, then
            backward there and back.
    """
    row = [*range(num_devices)]
    way = [*row, *reversed(row)] * 2
    taken: list[set[int]] = [set() for _ in row]
    starts: list[list[tuple[int, Task]]] = [[] for _ in row]
    last, time = 2 * num_devices - 1, 0
    for place, device in enumerate(way):
        turn, step = divmod(place, num_devices)
        time += gaps[turn] if step else min(place, 1)
        while time % _PERIOD in taken[device]:
            time += 1
        taken[device].add(time % _PERIOD)
        task = Task("forward", place, 0)
        if turn > 1:
            task = Task("input_gradient", 2 * last + 1 - place, 0)
        starts[device] += [
            (time + _PERIOD * m, task._replace(micro_batch=m))
            for m in range(num_micro_batches)
        ]
    return [[task for _, task in sorted(timed)] for timed in starts]


def _units(task: Task) -> int:
    """Returns how many forward tasks a task takes, among equal cells.

    Nothing takes the gradient of the model's inputs: the first cell has all of
    its backward pass in the weight gradient.
    """
    if task.cell == 0 and task.kind != "forward":
        return 2 if task.kind == "weight_gradient" else 0
    return 1


def zero_bubble_v(d: int, m: int) -> Schedule:
    """Hardly a wait, and what "1f1b" holds: ZB-V.

    Reference: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), section 6
    """
    return filled(_orders(d, m, (1, 4, 1, 2)), [2 * d] * d, _units)


def v_half(d: int, m: int) -> Schedule:
    """Holds about half of what "1f1b" does, and takes less time.

    Reference: [Qi et al., 2024](https://arxiv.org/abs/2405.15362), section 3.2
    """
    return filled(_orders(d, m, (2, 1, 2, 1)), [d + 2 - d % 2] * d, _units)


def v_min(d: int, m: int) -> Schedule:
    """Holds about a third of what "1f1b" does, and takes no more time.

    Reference: [Qi et al., 2024](https://arxiv.org/abs/2405.15362), section 3.2
    """
    return filled(
        _orders(d, m, (1, 1, 1, 1)), [2 * ((d + 1) // 3) + 2] * d, _units
    )


def dualpipe_v(d: int, m: int) -> Schedule:
    """DualPipe for a V: most backward tasks are whole, few in halves.

    Where there are fewer than 2 D micro-batches, it is the schedule for 2 D
    without what is missing.

    Reference: [DualPipe](https://github.com/deepseek-ai/DualPipe), DualPipeV;
    DeepSeek-AI, [2024](https://arxiv.org/abs/2412.19437), section 3.2.1
    """
    most = max(m, 2 * d)
    return Schedule(
        [t for t in _dualpipe_tasks(d, rank, most) if t.micro_batch < m]
        for rank in range(d)
    )


def _dualpipe_tasks(d: int, rank: int, m: int) -> list[Task]:
    """Returns the tasks of a device, for at least 2 D micro-batches."""
    cells = rank, 2 * d - 1 - rank
    run: collections.Counter[tuple[str, int]] = collections.Counter()
    late: collections.deque[Task] = collections.deque()
    tasks: list[Task] = []

    def add(*chosen: tuple[str, int]) -> None:
        for kind, chunk in chosen:
            way = "forward" if kind == "forward" else "backward"
            tasks.append(Task(kind, cells[chunk], run[way, chunk]))
            run[way, chunk] += 1
            if kind == "input_gradient":
                late.append(tasks[-1]._replace(kind="weight_gradient"))

    forward, back = (
        [(kind, c) for c in (0, 1)] for kind in ("forward", "backward")
    )
    half = [("input_gradient", c) for c in (0, 1)]
    before_turn = d - 1 - rank
    add(*[forward[0]] * (2 * before_turn))
    add(*forward * (rank + 1))
    for _ in range(before_turn):
        add(half[1])
        tasks.append(late.popleft())
        add(forward[1])
    add(*[forward[0], back[1], forward[1], back[0]] * (m - 2 * d + rank + 1))
    add(*[back[1], forward[1], back[0]] * before_turn)
    # The second half of the rest is in halves.
    for i in range(2 * (rank + 1)):
        add((half if i > rank else back)[1 - i % 2])
    for _ in range(before_turn):
        tasks.append(late.popleft())
        add(half[0])
    return [*tasks, *late]


# -------------------------------------------------------------------- by name
# How many cells a device has; None where it may be any number.
_ORDERS: dict[str, tuple[Callable[..., Schedule], int | None]] = {
    "gpipe": (breadth_first, 1),
    "1f1b": (interleaved, 1),
    "interleaved": (interleaved, None),
    "breadth_first": (breadth_first, None),
    "zero_bubble": (zero_bubble, 1),
    "zero_bubble_2p": (zero_bubble_2p, 1),
    "zero_bubble_v": (zero_bubble_v, 2),
    "v_half": (v_half, 2),
    "v_min": (v_min, 2),
    "dualpipe_v": (dualpipe_v, 2),
}

CHUNKS = {name: chunks for name, (_, chunks) in _ORDERS.items()}


def _checked(
    order: Callable[..., Schedule], wanted: int | None
) -> Callable[..., Schedule]:
    def schedule(
        num_devices: int,
        num_micro_batches: int,
        num_chunks: int = wanted or 1,
        **options: float,
    ) -> Schedule:
        d, m, v = checked_counts(
            num_devices=num_devices,
            num_micro_batches=num_micro_batches,
            num_chunks=num_chunks,
        )
        if wanted not in (None, v):
            raise ValueError(
                f"`num_chunks` must be {wanted} under this schedule. Received: "
                f"num_chunks={v}. Use 'interleaved' for any number."
            )
        return order(d, m, *([v] if wanted is None else []), **options)

    return schedule


# By D devices, M micro-batches, and V cells a device.
SCHEDULES = {name: _checked(*pair) for name, pair in _ORDERS.items()}


def devices_for(name: str, num_cells: int, num_devices: int) -> int:
    """Returns how many of the devices a schedule uses for K cells."""
    chunks = CHUNKS[name]
    if chunks is None:
        return max(1, min(num_cells, num_devices))
    return num_cells // chunks


@functools.cache
def devices_of_cells(
    name: str, num_devices: int, num_chunks: int
) -> tuple[int, ...]:
    """Returns the device of each cell, for V cells a device."""
    schedule = SCHEDULES[name](num_devices, 1, num_chunks)
    return tuple(map(schedule.device_of, range(schedule.num_cells)))
