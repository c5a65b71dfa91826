"""Schedules whose weight gradients fill the waits.

The order of a device's forward tasks and input gradients is given. Its weight
gradients run where it would wait for another device, where it holds as many
micro-batches as it may, and at the end:

    given   f0 f1 .. i0 f2 i1 .. i2
    filled  f0 f1 .. i0 f2 i1 w0 i2 w1 w2

"zero_bubble_v", of two cells a device, is in `v_shaped.py`.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Sequence

from tfgpipe.checks import checked_shape
from tfgpipe.schedules.orders.whole_backward import interleaved
from tfgpipe.schedules.schedule import Schedule
from tfgpipe.schedules.task import Task


def filled(
    orders: Sequence[Sequence[Task]],
    most_held: Sequence[int],
    duration: Callable[[Task], float] = lambda task: 1,
) -> Schedule:
    """The schedule with each weight gradient where it costs least.

    Args:
        orders: For each device, its "forward" and "input_gradient" tasks.
        most_held: For each device, how many micro-batches it may hold, once a
            cell. Where the order needs more, they are held.
        duration: How long a task takes, in any unit.
    """
    devices = [_Device(own, most) for own, most in zip(orders, most_held)]
    num_cells = 1 + max(task.cell for own in orders for task in own)
    ends: dict[Task, float] = {}
    asleep: dict[Task, list[int]] = collections.defaultdict(list)
    awake = [(0.0, d) for d in range(len(devices))]
    while awake:
        now, d = heapq.heappop(awake)
        own = devices[d]
        task = own.next_task
        needs = [] if task is None else _needs(task, num_cells)
        # What has not run yet would have started now, or later.
        missing = next((need for need in needs if need not in ends), None)
        ready = max((ends.get(need, now) for need in needs), default=now)
        must_wait = missing is not None or ready > now
        if own.late and (task is None or must_wait or own.is_full):
            task = own.run_late()
            ready = now
        elif task is None:
            continue
        elif missing is not None:
            asleep[missing].append(d)
            continue
        else:
            own.run_next()
        ends[task] = max(now, ready) + duration(task)
        heapq.heappush(awake, (ends[task], d))
        for other in asleep.pop(task, ()):
            heapq.heappush(awake, (ends[task], other))
    return Schedule(own.tasks for own in devices)


def _needs(task: Task, num_cells: int) -> list[Task]:
    """What a task needs where all backward tasks are in halves."""
    kinds = ("forward", "input_gradient")
    return [need for need in task.needs(num_cells) if need.kind in kinds]


class _Device:
    """What a device has run, and what it has to.

    Args:
        order: Its "forward" and "input_gradient" tasks.
        most_held: How many micro-batches it may hold.

    Attributes:
        tasks: What it has run.
        late: Weight gradients that it could run.
    """

    def __init__(self, order: Sequence[Task], most_held: int):
        self._order = collections.deque(order)
        self._most_held = most_held
        self._held = 0
        self.tasks: list[Task] = []
        self.late: collections.deque[Task] = collections.deque()

    @property
    def next_task(self) -> Task | None:
        """What is next in its order."""
        return self._order[0] if self._order else None

    @property
    def is_full(self) -> bool:
        """Whether it may not hold one more, and its next task would."""
        if not self._order or self._order[0].kind != "forward":
            return False
        return self._held >= self._most_held

    def run_next(self) -> None:
        """Runs what is next."""
        task = self._order.popleft()
        self.tasks.append(task)
        if task.kind == "forward":
            self._held += 1
        else:
            self.late.append(task._replace(kind="weight_gradient"))

    def run_late(self) -> Task:
        """Runs the oldest weight gradient, and returns it."""
        task = self.late.popleft()
        self.tasks.append(task)
        self._held -= 1
        return task


def zero_bubble(
    num_devices: int, num_micro_batches: int, num_chunks: int = 1
) -> Schedule:
    """Fills the bubble with weight gradients, for which no device waits: ZB-H1.

    "1f1b" with the backward tasks in halves; device k runs its weight gradients
    k micro-batches late, and so holds as many micro-batches as device 0.

    Args:
        num_devices: K, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: 1.

    Example:

    >>> [f"{kind[0]}{m}" for kind, _, m in zero_bubble(2, 3).tasks[1]]
    ['f0', 'i0', 'f1', 'i1', 'w0', 'f2', 'i2', 'w1', 'w2']

    Reference: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), section 2.1
    """
    num_devices, num_micro_batches, num_chunks = checked_shape(
        num_devices, num_micro_batches, num_chunks
    )
    tasks = []
    for k, order in enumerate(
        interleaved(num_devices, num_micro_batches).tasks
    ):
        own = []
        for kind, _, m in order:
            if kind == "forward":
                own.append(Task(kind, k, m))
                continue
            own.append(Task("input_gradient", k, m))
            if m >= k:
                own.append(Task("weight_gradient", k, m - k))
        late = range(max(0, num_micro_batches - k), num_micro_batches)
        tasks.append(own + [Task("weight_gradient", k, m) for m in late])
    return Schedule(tasks)


def zero_bubble_2p(
    num_devices: int, num_micro_batches: int, num_chunks: int = 1
) -> Schedule:
    """Warms up with twice as many micro-batches as "zero_bubble": ZB-H2.

    It is as short where all tasks take equal time, and has more to fill waits
    with where input gradients take longer, as with recomputations.

    Args:
        num_devices: K, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: 1.

    Reference: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), section 2.2
    """
    num_devices, num_micro_batches, num_chunks = checked_shape(
        num_devices, num_micro_batches, num_chunks
    )
    micro_batches = range(num_micro_batches)
    orders = []
    for k in range(num_devices):
        forward = [Task("forward", k, m) for m in micro_batches]
        warm_up = min(num_micro_batches, 2 * (num_devices - k) - 1)
        own = forward[:warm_up]
        for m in micro_batches:
            own.append(Task("input_gradient", k, m))
            own += forward[warm_up + m : warm_up + m + 1]
        orders.append(own)
    return filled(orders, [2 * num_devices - 1] * num_devices)
