"""Which device each cell is on, in each replica.

Replicas share the micro-batches. Of the micro-batches of a mini-batch, replica
r has those from `count * r // R` to `count * (r + 1) // R`: R M micro-batches
are M each. A mini-batch of few rows, which has fewer micro-batches, may leave
some replicas idle.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

from tfgpipe.devices.names import (
    SPLIT_CPU,
    accelerators,
    name_of,
    resolved,
    why_no_more,
)
from tfgpipe.schedules import CHUNKS, Schedule


class CellDevices:
    """The number of cells, and the devices for them.

    Args:
        names: Devices that the user gave, or None.
        num_partitions: K, or None if the user said none, or no count.
        num_micro_batches: M, or None if what the user said is no count.
        schedule: Name of the schedule, or the schedule itself.
        replica: The devices of a replica, if a strategy names them, or None.

    Attributes:
        names: The names that the user gave, or of what the user gave; or None.
        devices: Full names of the devices.
        num_partitions: K.
        is_only: Whether there is one device, and nobody asked for just one.
        problems: What is wrong.
    """

    def __init__(
        self,
        names: list[Any] | None,
        num_partitions: int | None,
        num_micro_batches: int | None,
        schedule: str | Schedule,
        replica: Sequence[str] | None = None,
    ):
        self.names = None if names is None else [*map(name_of, names)]
        self._replica = replica
        self.devices, self.problems = self._found()
        found = len(self.devices if names is None or replica else names)
        if isinstance(schedule, Schedule):
            self.num_partitions = schedule.num_cells
            self._check_written(
                schedule, num_partitions, num_micro_batches, found
            )
        elif num_partitions is None:
            self.num_partitions = found * (CHUNKS.get(schedule, 1) or 1)
        else:
            self.num_partitions = num_partitions
            self._check_count(schedule, CHUNKS.get(schedule, 1), found)
        self.is_only = (
            len(self.devices) == 1
            and names is None
            and replica is None
            and num_partitions != 1
            and not isinstance(schedule, Schedule)
        )

    def _found(self) -> tuple[list[str], list[str]]:
        """The devices, and what is wrong with how they are named."""
        if self._replica is None:
            if self.names is None:
                return accelerators(), []
            return resolved(self.names)
        if self.names is None:
            return list(self._replica), []
        return list(self._replica), [
            "`devices` must be those of the strategy. Received: "
            f"devices={self.names} in the scope of a strategy with the "
            f"devices {list(self._replica)} in its first replica. Leave them "
            "out, or pass them to `PipelineStrategy`."
        ]

    def _check_count(
        self, schedule: str, chunks: int | None, found: int
    ) -> None:
        """Compares K with the number of devices.

        Args:
            schedule: Its name.
            chunks: Cells of a device, None for any number.
            found: Number of devices.
        """
        k = self.num_partitions
        if chunks is None:
            if k % found:
                self.problems.append(
                    "`num_partitions` must be a multiple of the number of "
                    f'devices under schedule="{schedule}". Received: '
                    f"num_partitions={k} and {found} devices. Change it, or "
                    "name other `devices`."
                )
        elif self._replica is not None:
            if k != chunks * found:
                self.problems.append(
                    "`num_partitions` must be that of the strategy, "
                    f"{found}{_each(chunks)}. Received: num_partitions={k}. "
                    "Leave it out, or make a `PipelineStrategy` of as many "
                    "devices a replica."
                )
        elif k % chunks:
            self.problems.append(
                f"`num_partitions` must be {chunks} a device under "
                f'schedule="{schedule}". Received: num_partitions={k}. Pass '
                f"{k + chunks - k % chunks}, or take another schedule."
            )
        elif self.names is None:
            if k > chunks * found:
                self.problems.append(
                    "`num_partitions` must be at most the number of devices"
                    f"{_each(chunks)}. Received: num_partitions={k} and the "
                    f"devices {self.devices}. {why_no_more()} Ask for fewer "
                    "cells, of a file by `tfgpipe.load_model(path, "
                    f"num_partitions={chunks * found})`, or for "
                    'schedule="interleaved" with a multiple of the devices; '
                    f"{SPLIT_CPU}."
                )
            self.devices = self.devices[: k // chunks]
        elif k != chunks * found:
            count = "one device a cell"
            if chunks > 1:
                count = f"one device for {chunks} cells"
            self.problems.append(
                f"`devices` must name {count}. Received: devices={self.names} "
                f"and num_partitions={k}. Pass num_partitions="
                f"{chunks * found} for these, or name {k // chunks}."
            )

    def _check_written(
        self,
        schedule: Schedule,
        num_partitions: Any,
        num_micro_batches: int | None,
        found: int,
    ) -> None:
        """Compares a schedule that the user wrote with the other arguments."""
        for name, expected, received in (
            ("num_partitions", schedule.num_cells, num_partitions),
            (
                "num_micro_batches",
                schedule.num_micro_batches,
                num_micro_batches,
            ),
        ):
            if received not in (None, expected):
                self.problems.append(
                    f"`{name}` must be that of `schedule`, {expected}. "
                    f"Received: {name}={received!r}. Write the schedule for "
                    "as many."
                )
        wanted = schedule.num_devices
        is_named = self.names is not None or self._replica is not None
        if wanted > found or (is_named and wanted != found):
            self.problems.append(
                f"`schedule` has tasks for {wanted} devices. Received: the "
                f"devices {self.names or self.devices}. Write it for as many, "
                "or name others."
            )


def _each(chunks: int) -> str:
    """What follows the number of devices where each has several cells."""
    return "" if chunks == 1 else f", times the {chunks} cells of each"


class Replicas:
    """How the micro-batches of one mini-batch are shared among replicas.

    Args:
        grid: Names of devices, grid[r][k] that of cell k in replica r.
        num_micro_batches: Micro-batches of the mini-batch.

    Attributes:
        counts: How many micro-batches each replica has.
        busy: The replicas that have micro-batches.
    """

    def __init__(self, grid: Sequence[Sequence[str]], num_micro_batches: int):
        self._grid = grid
        count = len(grid)
        self._bounds = [
            num_micro_batches * r // count for r in range(count + 1)
        ]
        self.counts = [len(self.micro_batches(r)) for r in range(count)]
        self.busy = [r for r in range(count) if self.counts[r]]

    def of(self, m: int) -> int:
        """The replica that computes micro-batch m."""
        return bisect.bisect_right(self._bounds, m) - 1

    def device(self, k: int, m: int) -> str:
        """Where cell k computes micro-batch m."""
        return self.device_in(self.of(m), k)

    def device_in(self, r: int, k: int) -> str:
        """Where replica r has cell k."""
        return self._grid[r][k]

    def micro_batches(self, r: int) -> range:
        """The micro-batches of replica r."""
        return range(self._bounds[r], self._bounds[r + 1])

    def normalized_at_once(self, together: bool) -> list[list[int]]:
        """The micro-batches whose moments are taken at once.

        Args:
            together: Whether over replicas: the i-th of all of them. If not,
                each micro-batch has its own.
        """
        every = [self.micro_batches(r) for r in self.busy]
        if not together:
            return [[m] for own in every for m in own]
        partners = itertools.zip_longest(*every)
        return [[m for m in row if m is not None] for row in partners]
