"""The schedules whose backward passes are whole.

All forward, then all backward; or backward as soon as possible.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import math

from tfgpipe.checks import checked_amount
from tfgpipe.schedules.schedule import Schedule
from tfgpipe.schedules.task import Task

_ROUNDING = 1e-9  # of quotients


def gpipe(num_devices: int, num_micro_batches: int) -> Schedule:
    """Fill-drain: all forward, then all backward, last micro-batch first.

    Example:

    >>> [f"{kind[0]}{m}" for kind, _, m in gpipe(2, 3).tasks[0]]
    ['f0', 'f1', 'f2', 'b2', 'b1', 'b0']

    Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), figure 2c
    """
    return breadth_first(num_devices, num_micro_batches)


def breadth_first(
    num_devices: int, num_micro_batches: int, num_chunks: int = 1
) -> Schedule:
    """As `gpipe`, with several cells on each device, one after the other.

    A device runs all micro-batches through a cell before it goes on to its
    next one: weights that are elsewhere are sent to it twice a mini-batch.

    Args:
        num_devices: D, at least 1.
        num_micro_batches: M, at least 1.
        num_chunks: V, the cells of a device; cell c is on device c mod D.

    Example:

    >>> [f"{kind[0]}{c}.{m}" for kind, c, m in breadth_first(2, 2, 2).tasks[0]]
    ['f0.0', 'f0.1', 'f2.0', 'f2.1', 'b2.1', 'b2.0', 'b0.1', 'b0.0']

    Reference: [Lamy-Poirier, 2022](https://arxiv.org/abs/2211.05953)
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
        tasks_of_device = forward[:warm_up]
        for i, task in enumerate(backward):
            tasks_of_device += [*forward[warm_up + i : warm_up + i + 1], task]
        tasks.append(tasks_of_device)
    return Schedule(tasks)


def one_forward_one_backward(
    num_devices: int,
    num_micro_batches: int,
    link_share: float = 0.0,
) -> Schedule:
    """Goes backward as soon as possible, then forward and backward in turns.

    Takes as long as `gpipe`, and holds fewer micro-batches.

    Example:

    >>> tasks = one_forward_one_backward(2, 3).tasks[0]
    >>> [f"{kind[0]}{m}" for kind, _, m in tasks]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']

    Reference: PipeDream-flush,
    [Narayanan et al., 2021](https://arxiv.org/abs/2006.09503), section 3.2
    """
    return interleaved(num_devices, num_micro_batches, link_share=link_share)
