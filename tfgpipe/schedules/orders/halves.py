"""Schedules of halves of backward passes: of zero bubble, and of V shapes.

The order of a device's forward tasks and input gradients is given. Its weight
gradients run where it would wait for another device, where it holds as many
micro-batches as it may, and at the end, see `filled`:

    given   f0 f1 .. i0 f2 i1 .. i2
    filled  f0 f1 .. i0 f2 i1 w0 i2 w1 w2

In a V, device d of D has two cells: d, and 2 D - 1 - d. A micro-batch goes
forward to the last device and back to the first one, which has the loss; its
gradient goes the same way:

    device 0    0         7     forward tasks and input gradients of cells
    device 1      1     6
    device 2        2 5
    device 3        3 4

What a device holds is what lies between a cell's forward task and its weight
gradient. Every device has long waits in one cell and short ones in the other:
so all hold the same, and how much follows from the pace of the micro-batch, the
*gaps* from one device to the next.

References: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), of the V in
section 6, and [Qi et al., 2024](https://arxiv.org/abs/2405.15362), section 3.

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

# A micro-batch has six tasks on each device: forward, input gradient and
# weight gradient of two cells.
_PERIOD = 6


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
    devices = [_Device(device, most) for device, most in zip(orders, most_held)]
    num_cells = 1 + max(task.cell for device in orders for task in device)
    ends: dict[Task, float] = {}
    asleep: dict[Task, list[int]] = collections.defaultdict(list)
    awake = [(0.0, d) for d in range(len(devices))]
    while awake:
        now, d = heapq.heappop(awake)
        device = devices[d]
        task = device.next_task
        needs = [] if task is None else _needs(task, num_cells)
        # What has not run yet would have started now, or later.
        missing = next((need for need in needs if need not in ends), None)
        ready = max((ends.get(need, now) for need in needs), default=now)
        must_wait = missing is not None or ready > now
        if device.late and (task is None or must_wait or device.is_full):
            task = device.run_late()
            ready = now
        elif task is None:
            continue
        elif missing is not None:
            asleep[missing].append(d)
            continue
        else:
            device.run_next()
        ends[task] = max(now, ready) + duration(task)
        heapq.heappush(awake, (ends[task], d))
        for other in asleep.pop(task, ()):
            heapq.heappush(awake, (ends[task], other))
    return Schedule(device.tasks for device in devices)


def _needs(task: Task, num_cells: int) -> list[Task]:
    """Returns what a task needs if all backward tasks are in halves."""
    kinds = ("forward", "input_gradient")
    return [need for need in task.needs(num_cells) if need.kind in kinds]


class _Device:
    """The tasks of a device: those that it has run, and those to come.

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
        """The next task of its order."""
        return self._order[0] if self._order else None

    @property
    def is_full(self) -> bool:
        """Returns whether it may not hold one more, and its next task would."""
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
        tasks_of_device = []
        for kind, _, m in order:
            if kind == "forward":
                tasks_of_device.append(Task(kind, k, m))
                continue
            tasks_of_device.append(Task("input_gradient", k, m))
            if m >= k:
                tasks_of_device.append(Task("weight_gradient", k, m - k))
        late = range(max(0, num_micro_batches - k), num_micro_batches)
        tasks.append(
            tasks_of_device + [Task("weight_gradient", k, m) for m in late]
        )
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
    """Each device's tasks but weight gradients, by the time of their start.

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


def _paced(
    num_devices: int,
    num_micro_batches: int,
    gaps: Sequence[int],
    most_held: int,
) -> Schedule:
    """The schedule of a pace, in which each device holds so many at most."""
    orders = _orders(num_devices, num_micro_batches, gaps)
    most = [most_held] * num_devices
    return filled(orders, most, _units)


def _units(task: Task) -> int:
    """How long a task takes among equal cells, a forward task as the unit.

    Nothing takes the gradient of the model's inputs: the first cell has all of
    its backward pass in the weight gradient.
    """
    if task.cell == 0 and task.kind != "forward":
        return 2 if task.kind == "weight_gradient" else 0
    return 1


def zero_bubble_v(
    num_devices: int, num_micro_batches: int, num_chunks: int = 2
) -> Schedule:
    """Hardly a wait, and what "1f1b" holds: ZB-V.

    Args:
        num_devices: D, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: 2.

    Reference: [Qi et al., 2023](https://arxiv.org/abs/2401.10241), section 6
    """
    d, m, _ = checked_shape(num_devices, num_micro_batches, num_chunks, 2)
    return _paced(d, m, (1, 4, 1, 2), 2 * d)


def v_half(
    num_devices: int, num_micro_batches: int, num_chunks: int = 2
) -> Schedule:
    """Holds about half of what "1f1b" does, and takes less time.

    Args:
        num_devices: D, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: 2.

    Reference: [Qi et al., 2024](https://arxiv.org/abs/2405.15362), section 3.2
    """
    d, m, _ = checked_shape(num_devices, num_micro_batches, num_chunks, 2)
    return _paced(d, m, (2, 1, 2, 1), d + 2 - d % 2)


def v_min(
    num_devices: int, num_micro_batches: int, num_chunks: int = 2
) -> Schedule:
    """Holds about a third of what "1f1b" does, and takes no more time.

    Args:
        num_devices: D, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: 2.

    Reference: [Qi et al., 2024](https://arxiv.org/abs/2405.15362), section 3.2
    """
    d, m, _ = checked_shape(num_devices, num_micro_batches, num_chunks, 2)
    return _paced(d, m, (1, 1, 1, 1), 2 * ((d + 1) // 3) + 2)


def dualpipe_v(
    num_devices: int, num_micro_batches: int, num_chunks: int = 2
) -> Schedule:
    """DualPipe for a V: most backward tasks are whole, few in halves.

    Where there are fewer than 2 D micro-batches, it is the schedule for 2 D
    without what is missing.

    Args:
        num_devices: D, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: 2.

    Reference: [DualPipe](https://github.com/deepseek-ai/DualPipe), DualPipeV;
    DeepSeek-AI, [2024](https://arxiv.org/abs/2412.19437), section 3.2.1
    """
    d, m, _ = checked_shape(num_devices, num_micro_batches, num_chunks, 2)
    most = max(m, 2 * d)
    return Schedule(
        [t for t in _dualpipe_tasks(d, rank, most) if t.micro_batch < m]
        for rank in range(d)
    )


def _dualpipe_tasks(d: int, rank: int, m: int) -> list[Task]:
    """The tasks of a device, for at least 2 D micro-batches."""
    cells = rank, 2 * d - 1 - rank
    run: collections.Counter[tuple[str, int]] = collections.Counter()
    late: collections.deque[Task] = collections.deque()
    tasks: list[Task] = []

    def add(kind: str, chunk: int, times: int = 1) -> None:
        for _ in range(times):
            way = "forward" if kind == "forward" else "backward"
            tasks.append(Task(kind, cells[chunk], run[way, chunk]))
            run[way, chunk] += 1
            if kind == "input_gradient":
                late.append(tasks[-1]._replace(kind="weight_gradient"))

    def add_late() -> None:
        tasks.append(late.popleft())

    before_turn = d - 1 - rank
    add("forward", 0, 2 * before_turn)
    for _ in range(rank + 1):
        add("forward", 0)
        add("forward", 1)
    for _ in range(before_turn):
        add("input_gradient", 1)
        add_late()
        add("forward", 1)
    for _ in range(m - 2 * d + rank + 1):
        add("forward", 0)
        add("backward", 1)
        add("forward", 1)
        add("backward", 0)
    for _ in range(before_turn):
        add("backward", 1)
        add("forward", 1)
        add("backward", 0)
    # The second half of the rest is in halves.
    for i in range(2 * (rank + 1)):
        kind = "input_gradient" if i > rank else "backward"
        add(kind, 1 - i % 2)
    for _ in range(before_turn):
        add_late()
        add("input_gradient", 0)
    while late:
        add_late()
    return tasks
