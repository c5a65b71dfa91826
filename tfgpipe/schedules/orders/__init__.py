"""The schedules that have a name, and which devices their cells are on.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tfgpipe.schedules.orders.halves import (
    dualpipe_v,
    v_half,
    v_min,
    zero_bubble,
    zero_bubble_2p,
    zero_bubble_v,
)
from tfgpipe.schedules.orders.whole_backward import (
    breadth_first,
    gpipe,
    interleaved,
    one_forward_one_backward,
)
from tfgpipe.schedules.schedule import Schedule

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "breadth_first": breadth_first,
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
    "breadth_first": None,
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
