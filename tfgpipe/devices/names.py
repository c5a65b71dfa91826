"""Finds out how many cells there are, and the devices for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.devices import placement
from tfgpipe.schedules import CHUNKS, Schedule


class DeviceList:
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

    def _found(self) -> tuple[list[str], list[str]]:
        """The devices, and what is wrong with how they are named."""
        if self._replica is None:
            if self.names is None:
                return placement.accelerators(), []
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
                    f"devices {self.devices}. Ask for fewer cells, or for "
                    'schedule="interleaved" with a multiple of the devices; '
                    "to try a pipeline without accelerators, split the CPU "
                    "with `tf.config.set_logical_device_configuration` first."
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


def name_of(device: Any) -> Any:
    """The name of a `tf.config.LogicalDevice`; all else as it is."""
    return (
        device.name if isinstance(device, tf.config.LogicalDevice) else device
    )


def resolved(devices: list[Any]) -> tuple[list[str], list[str]]:
    """The full names of devices, and what is wrong with them."""
    found: list[str] = []
    problems: list[str] = []
    for name in map(name_of, devices):
        full = placement.resolve_device(name)
        if full is None:
            problems.append(
                "`devices` must be devices that TensorFlow lists: "
                f"{placement.all_devices()}. Received: {name!r}."
            )
            continue
        if full in found:
            problems.append(
                "`devices` must be different from each other. "
                f"Received: {name!r} more than once. Cells that share a "
                "device do not run at the same time: use fewer cells."
            )
        found.append(full)
    return found, problems
