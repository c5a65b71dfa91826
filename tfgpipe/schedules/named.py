"""Known schedules, by name.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from tfgpipe.checks import checked_amount, checked_shape
from tfgpipe.schedules.filled import filled
from tfgpipe.schedules.schedule import Schedule
from tfgpipe.schedules.task import Task
from tfgpipe.schedules.v_shaped import (
    dualpipe_v,
    v_half,
    v_min,
    zero_bubble_v,
)

_ROUNDING = 1e-9  # of quotients


def _group_sizes(
    num_devices: int, num_micro_batches: int, link_share: float
) -> list[int]:
    """Groups of micro-batches that go through a device's cells together.

    A group comes back to a device when it has been on all others: with as many
    micro-batches as devices, or more, the device has work until then; links
    take as many more as forward tasks, a third of a cell's time, fit in them.
    """
    least = math.ceil(num_devices * (1 + 3 * link_share) - _ROUNDING)
    num_groups = max(1, num_micro_batches // least)
    small, large = divmod(num_micro_batches, num_groups)
    return [small + (i < large) for i in range(num_groups)]


def _visits(groups: list[int], num_chunks: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order in which a device runs them forward."""
    visits, start = [], 0
    for size in groups:
        group = range(start, start + size)
        visits += [(v, m) for v in range(num_chunks) for m in group]
        start += size
    return visits


def gpipe(
    num_devices: int, num_micro_batches: int, num_chunks: int = 1
) -> Schedule:
    """Fill-drain: all forward, then all backward, last micro-batch first.

    Args:
        num_devices: K, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: 1.

    Example:

    >>> [f"{kind[0]}{m}" for kind, _, m in gpipe(2, 3).tasks[0]]
    ['f0', 'f1', 'f2', 'b2', 'b1', 'b0']

    Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), figure 2c
    """
    num_devices, num_micro_batches, num_chunks = checked_shape(
        num_devices, num_micro_batches, num_chunks
    )
    micro_batches = range(num_micro_batches)
    return Schedule(
        [Task("forward", k, m) for m in micro_batches]
        + [Task("backward", k, m) for m in reversed(micro_batches)]
        for k in range(num_devices)
    )


def one_forward_one_backward(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    link_share: float = 0.0,
) -> Schedule:
    """Goes backward as soon as possible, then forward and backward in turns.

    Takes as long as `gpipe`, and holds fewer micro-batches.

    Args:
        num_devices: K, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: 1.
        link_share: See `interleaved`.

    Example:

    >>> [f"{kind[0]}{m}" for kind, _, m in SCHEDULES["1f1b"](2, 3).tasks[0]]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']

    Reference: PipeDream-flush,
    [Narayanan et al., 2021](https://arxiv.org/abs/2006.09503), section 3.2
    """
    num_devices, num_micro_batches, num_chunks = checked_shape(
        num_devices, num_micro_batches, num_chunks
    )
    return interleaved(num_devices, num_micro_batches, link_share=link_share)


def interleaved(
    num_devices: int,
    num_micro_batches: int,
    num_chunks: int = 1,
    link_share: float = 0.0,
) -> Schedule:
    """Several cells on each device, so that pipelines fill and drain faster.

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

    References: [Narayanan et al., 2021](https://arxiv.org/abs/2104.04473), 2.2;
    for links [Zhuang et al., 2022](https://arxiv.org/abs/2211.05322), 4
    """
    num_devices, num_micro_batches, num_chunks = checked_shape(
        num_devices, num_micro_batches, num_chunks, None
    )
    share = checked_amount(
        "link_share", link_share, "a transfer's share of a cell's time"
    )
    share = min(share, num_micro_batches)  # all are under way then
    groups = _group_sizes(num_devices, num_micro_batches, share)
    visits = _visits(groups, num_chunks)
    last = num_chunks - 1
    under_way = 1 + math.ceil(
        2 * share - _ROUNDING
    )  # for each device that follows
    tasks = []
    for d in range(num_devices):
        forward = [Task("forward", v * num_devices + d, m) for v, m in visits]
        backward = [
            Task("backward", (last - v) * num_devices + d, m) for v, m in visits
        ]
        warm_up = under_way * (num_devices - 1 - d) + last * max(groups)
        own = forward[:warm_up]
        for i, task in enumerate(backward):
            own += [*forward[warm_up + i : warm_up + i + 1], task]
        tasks.append(own)
    return Schedule(tasks)


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


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zero_bubble_2p": zero_bubble_2p,
    "zero_bubble_v": zero_bubble_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
}
WITH_LINKS = ("1f1b", "interleaved")  # that can be told of them
# Cells of a device; None where it may have any number.
CHUNKS: dict[str, int | None] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": None,
    "zero_bubble": 1,
    "zero_bubble_2p": 1,
    "zero_bubble_v": 2,
    "v_half": 2,
    "v_min": 2,
    "dualpipe_v": 2,
}


def devices_for(name: str, num_cells: int, num_devices: int) -> int:
    """How many devices a schedule uses for some cells.

    Args:
        name: Of the schedule.
        num_cells: K.
        num_devices: How many there are.
    """
    chunks = CHUNKS[name]
    if chunks is None:
        return max(1, min(num_cells, num_devices))
    return num_cells // chunks


@functools.cache
def devices_of_cells(
    name: str, num_devices: int, num_chunks: int
) -> tuple[int, ...]:
    """Which device a schedule has each cell on.

    Args:
        name: Of the schedule.
        num_devices: D.
        num_chunks: V, the cells of a device.
    """
    schedule = SCHEDULES[name](num_devices, 1, num_chunks)
    return tuple(map(schedule.device_of, range(schedule.num_cells)))
