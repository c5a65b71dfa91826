"""Names of devices, existing devices, and the device of each cell.

Replicas share the micro-batches. Of `count` micro-batches, replica r has those
from `count * r // R` to `count * (r + 1) // R`: R M micro-batches are M each. A
mini-batch of few rows, which has fewer micro-batches, may leave some replicas
idle.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.schedules import CHUNKS, Schedule

# Types of devices without kernels. TensorFlow makes the last two if it is asked
# for them, see docs/tpu.md.
_ONLY_COMPILE = {"TPU", "XLA_CPU", "XLA_GPU"}

# The parts that names leave out.
_LOCAL = tf.DeviceSpec(job="localhost", replica=0, task=0)

SPLIT_CPU = (
    "to try a pipeline without accelerators, split the CPU with "
    "`tf.config.set_logical_device_configuration` first"
)


def name_of(device: Any) -> Any:
    """Returns the name of a `tf.config.LogicalDevice`; all else as it is."""
    return (
        device.name if isinstance(device, tf.config.LogicalDevice) else device
    )


def resolved(devices: Iterable[Any]) -> tuple[list[str], list[str]]:
    """Returns the full names of devices, and errors."""
    full_names: list[str] = []
    problems: list[str] = []
    for name in map(name_of, devices):
        full = resolve_device(name)
        if full is None:
            problems.append(
                "`devices` must be devices that TensorFlow lists: "
                f"{all_devices()}. Received: {name!r}."
            )
        elif full in full_names:
            problems.append(
                "`devices` must be different from each other. "
                f"Received: {name!r} more than once. Cells that share a "
                "device do not run at the same time: use fewer cells."
            )
        full_names += [full] if full is not None else []
    return full_names, problems


def accelerators() -> list[str]:
    """Returns the names of devices for cells: TPUs, or GPUs, or else CPUs."""
    listed = map(tf.config.list_logical_devices, ("TPU", "GPU", "CPU"))
    return [device.name for device in next(filter(None, listed), [])]


def why_no_more() -> str:
    """Says how many devices TensorFlow sees, and why it may not see a GPU.

    It speaks of GPUs where TensorFlow sees one at most, and no TPU.
    """
    seen = {
        kind: len(tf.config.list_logical_devices(kind))
        for kind in ("TPU", "GPU", "CPU")
    }
    counts = ", ".join(
        f"{n} {kind}{'s' * (n != 1)}" for kind, n in seen.items()
    )
    text = f"TensorFlow sees {counts}."
    if seen["TPU"] or seen["GPU"] > 1:
        return text
    listed = len(tf.config.list_physical_devices("GPU"))
    limit = os.environ.get("CUDA_VISIBLE_DEVICES")
    install = "`pip install 'tensorflow[and-cuda]'` installs"
    if listed > seen["GPU"]:
        text += (
            f" There are {listed} GPUs, of which "
            "`tf.config.set_visible_devices` hides some."
        )
    elif not tf.test.is_built_with_gpu_support():
        text += (
            f" This build of TensorFlow knows no GPUs: {install} one that does."
        )
    elif limit is not None:
        text += f" CUDA_VISIBLE_DEVICES={limit!r} may hide others from it."
    elif not seen["GPU"]:
        text += (
            " If there are GPUs, it has not found their driver, which "
            f"`nvidia-smi` shows, or CUDA, which {install}."
        )
    return text


def all_devices() -> list[str]:
    """Returns the names of all devices that TensorFlow lists."""
    return [device.name for device in tf.config.list_logical_devices()]


def resolve_device(name: Any) -> str | None:
    """Returns the name by which TensorFlow lists a device, or None."""
    if not isinstance(name, str):
        return None
    try:
        wanted = tf.DeviceSpec.from_string(
            name if name.startswith("/") else f"/device:{name}"
        )
    except ValueError:
        return None
    if wanted.device_type is None or wanted.device_index is None:
        return None
    for listed in all_devices():
        # Of CPUs TensorFlow lists short names, and other strategies use full.
        spec = _LOCAL.make_merged_spec(tf.DeviceSpec.from_string(listed))
        if spec.make_merged_spec(wanted) == spec:
            return listed
    return None


def device_types(names: Iterable[str]) -> list[str]:
    """Returns the types of devices, such as "GPU", each once."""
    types = (tf.DeviceSpec.from_string(name).device_type for name in names)
    return list(dict.fromkeys(types))


def only_compiles(names: Iterable[str]) -> bool:
    """Returns whether one of these devices runs only what XLA compiles.

    It has no kernels, and holds no variants, such as Optionals.
    """
    return not _ONLY_COMPILE.isdisjoint(device_types(names))


def has_accelerator(names: Iterable[str]) -> bool:
    """Returns whether one of these devices is no CPU."""
    return any(kind != "CPU" for kind in device_types(names))


def same_device(one: str, other: str) -> bool:
    """Returns whether two names, full or short, mean one device."""
    a, b = tf.DeviceSpec.from_string(one), tf.DeviceSpec.from_string(other)
    keys = ("device_type", "device_index")
    if any(getattr(a, key) != getattr(b, key) for key in keys):
        return False
    return None in (a.task, b.task) or (a.job, a.task) == (b.job, b.task)


def host_of(device: str) -> str:
    """Returns the CPU of a device's host."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()


# --------------------------------------------------------------------- of cells
class CellDevices:
    """The number of cells, and the devices for them, of the user's arguments.

    They are None where they are missing or wrong; `replica` are the devices of
    a replica, if a strategy names them.

    Attributes:
        names: Names of the user's devices, or None.
        devices: Full names of the devices.
        num_partitions: K.
        is_only: Whether there is one device, and nobody asked for just one.
        problems: Errors.
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
        self.devices, self.problems = self._resolved()
        count = len(self.devices if names is None or replica else names)
        if isinstance(schedule, Schedule):
            self.num_partitions = schedule.num_cells
            self._check_written(
                schedule, num_partitions, num_micro_batches, count
            )
        elif num_partitions is None:
            self.num_partitions = count * (CHUNKS.get(schedule, 1) or 1)
        else:
            self.num_partitions = num_partitions
            self._check_count(schedule, CHUNKS.get(schedule, 1), count)
        self.is_only = (
            len(self.devices) == 1
            and names is None
            and replica is None
            and num_partitions != 1
            and not isinstance(schedule, Schedule)
        )

    def _resolved(self) -> tuple[list[str], list[str]]:
        """Returns the devices, and errors of their names."""
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
        self, schedule: str, chunks: int | None, count: int
    ) -> None:
        """Compares K with the number of devices.

        A device has `chunks` cells under a schedule, None for any number.
        """
        k = self.num_partitions
        if chunks is None:
            if k % count:
                self.problems.append(
                    "`num_partitions` must be a multiple of the number of "
                    f'devices under schedule="{schedule}". Received: '
                    f"num_partitions={k} and {count} devices. Change it, or "
                    "name other `devices`."
                )
        elif self._replica is not None:
            if k != chunks * count:
                self.problems.append(
                    "`num_partitions` must be that of the strategy, "
                    f"{count}{_each(chunks)}. Received: num_partitions={k}. "
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
            if k > chunks * count:
                self.problems.append(
                    "`num_partitions` must be at most the number of devices"
                    f"{_each(chunks)}. Received: num_partitions={k} and the "
                    f"devices {self.devices}. {why_no_more()} Ask for fewer "
                    "cells, of a file by `tfgpipe.load_model(path, "
                    f"num_partitions={chunks * count})`, or for "
                    'schedule="interleaved" with a multiple of the devices; '
                    f"{SPLIT_CPU}."
                )
            self.devices = self.devices[: k // chunks]
        elif k != chunks * count:
            wanted = "one device a cell"
            if chunks > 1:
                wanted = f"one device for {chunks} cells"
            self.problems.append(
                f"`devices` must name {wanted}. Received: devices={self.names} "
                f"and num_partitions={k}. Pass num_partitions="
                f"{chunks * count} for these, or name {k // chunks}."
            )

    def _check_written(
        self,
        schedule: Schedule,
        num_partitions: int | None,
        num_micro_batches: int | None,
        count: int,
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
        if wanted > count or (is_named and wanted != count):
            self.problems.append(
                f"`schedule` has tasks for {wanted} devices. Received: the "
                f"devices {self.names or self.devices}. Write it for as many, "
                "or name others."
            )


def _each(chunks: int) -> str:
    """Says behind a number of devices that each has several cells."""
    return "" if chunks == 1 else f", times the {chunks} cells of each"


class Replicas:
    """The replicas and their micro-batches, of one mini-batch.

    Args:
        grid: Names of devices, grid[r][k] of cell k in replica r.
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

    def replica_of(self, m: int) -> int:
        """Returns the replica of micro-batch m."""
        return bisect.bisect_right(self._bounds, m) - 1

    def device(self, k: int, m: int) -> str:
        """Returns the device on which cell k computes micro-batch m."""
        return self.device_in(self.replica_of(m), k)

    def device_in(self, r: int, k: int) -> str:
        """Returns the device of cell k in replica r."""
        return self._grid[r][k]

    def micro_batches(self, r: int) -> range:
        """Returns the micro-batches of replica r."""
        return range(self._bounds[r], self._bounds[r + 1])

    def normalized_at_once(self, together: bool) -> list[list[int]]:
        """Returns groups of micro-batches, each normalised at once.

        Each micro-batch by itself, or, `together`, the i-th of all replicas.
        """
        every = [self.micro_batches(r) for r in self.busy]
        if not together:
            return [[m] for micro_batches in every for m in micro_batches]
        partners = itertools.zip_longest(*every)
        return [[m for m in row if m is not None] for row in partners]
