"""What a `GPipe` can be told, as a planner sees it.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from tfgpipe.schedules import (
    SCHEDULES,
    Facts,
    Program,
    Remat,
    Schedule,
    devices_of_cells,
    lower,
)


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

    def program(self, facts: tuple[Facts, ...]) -> Program:
        """What runs in a replica.

        Args:
            facts: Those of the groups of all cells.
        """
        # A search asks for the same again and again, before it goes to the
        # next: the memory of a program, then its seconds.
        return _program(self._replace(num_replicas=1), facts)


@functools.lru_cache(maxsize=2)
def _program(setting: Setting, facts: tuple[Facts, ...]) -> Program:
    k = setting.num_partitions
    remat = Remat.of(dict(enumerate(setting.remat)), k, setting.remat_groups)
    schedule = _schedule(
        setting.schedule,
        setting.num_devices,
        setting.num_micro_batches,
        setting.chunks,
    )
    return lower(lambda _: schedule, facts, remat, [schedule.num_micro_batches])


@functools.lru_cache(maxsize=2)
def _schedule(name: str, d: int, m: int, chunks: int) -> Schedule:
    return SCHEDULES[name](d, m, chunks)
