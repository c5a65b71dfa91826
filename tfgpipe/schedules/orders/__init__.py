"""The schedules that have a name, and which devices their cells are on.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tfgpipe.checks import checked_shape
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

# How many cells a device has; None where it may be any number.
_ORDERS: dict[str, tuple[Callable[..., Schedule], int | None]] = {
    "gpipe": (gpipe, 1),
    "1f1b": (one_forward_one_backward, 1),
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
        d, m, v = checked_shape(
            num_devices, num_micro_batches, num_chunks, wanted
        )
        return order(d, m, *([v] if wanted is None else []), **options)

    return schedule


# By D devices, M micro-batches, and V cells a device.
SCHEDULES = {name: _checked(*pair) for name, pair in _ORDERS.items()}

WITH_LINKS = ("1f1b", "interleaved")  # that can be told of them


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
