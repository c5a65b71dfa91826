"""What a `GPipe` can be told, as a planner sees it.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from tfgpipe.schedules import SCHEDULES, Schedule, devices_of_cells


class Setting(NamedTuple):
    """What a `GPipe` can be told.

    Attributes:
        num_replicas: R.
        num_devices: Of a replica.
        layers_per_cell: The cut.
        num_micro_batches: M, of a replica.
        schedule: Its name.
        remat: The rule of each cell.
        remat_groups: Groups of layers of a cell.
    """

    num_replicas: int
    num_devices: int
    layers_per_cell: tuple[int, ...]
    num_micro_batches: int
    schedule: str
    remat: tuple[str, ...]
    remat_groups: int = 1

    @property
    def num_partitions(self) -> int:
        """K, the number of cells."""
        return len(self.layers_per_cell)

    @property
    def chunks(self) -> int:
        """Cells of a device."""
        return self.num_partitions // self.num_devices

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each cell."""
        return devices_of_cells(self.schedule, self.num_devices, self.chunks)

    @property
    def tasks(self) -> Schedule:
        """The tasks of the devices, without recomputations."""
        return _tasks(
            self.schedule, self.num_devices, self.num_micro_batches, self.chunks
        )


# A search asks for the same again and again, before it goes to the next.
@functools.lru_cache(maxsize=2)
def _tasks(name: str, d: int, m: int, chunks: int) -> Schedule:
    return SCHEDULES[name](d, m, chunks)
