"""Names of devices, existing devices, and the device of each cell.

Replicas share the micro-batches. Of `count` micro-batches, replica r has those
from `count * r // R` to `count * (r + 1) // R`: R M micro-batches are M each. A
mini-batch of few rows, which has fewer micro-batches, may leave some replicas
idle.
"""

from __future__ import annotations

import bisect
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


def resolved(devices: Sequence[Any]) -> list[str]:
    """Returns the full names of devices, which must differ."""
    known = [full for full in map(resolve_device, devices) if full]
    if len({*known}) < len(devices):
        raise ValueError(
            "`devices` must be different devices that TensorFlow lists: "
            f"{all_devices()}. Received: devices={[*map(name_of, devices)]}."
        )
    return known


def accelerators() -> list[str]:
    """Returns the names of devices for cells: TPUs, or GPUs, or else CPUs."""
    listed = map(tf.config.list_logical_devices, ("TPU", "GPU", "CPU"))
    return [device.name for device in next(filter(None, listed), [])]


def why_no_more() -> str:
    """Says what devices TensorFlow sees, and what it needs to see GPUs."""
    counts = [
        f"{len(tf.config.list_logical_devices(kind))} {kind}s"
        for kind in ("TPU", "GPU", "CPU")
    ]
    return (
        f"TensorFlow sees {', '.join(counts)}. For GPUs it needs the build of "
        "`pip install 'tensorflow[and-cuda]'`, a driver, which `nvidia-smi` "
        "shows, and their numbers in CUDA_VISIBLE_DEVICES, if that is set."
    )


def all_devices() -> list[str]:
    """Returns the names of all devices that TensorFlow lists."""
    return [device.name for device in tf.config.list_logical_devices()]


def resolve_device(name: Any) -> str | None:
    """Returns the name by which TensorFlow lists a device, or None."""
    name = name_of(name)
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

    `replica` are the devices of a replica, if a strategy names them.

    Attributes:
        names: Names of the user's devices, or None.
        devices: Full names of the devices.
        num_partitions: K.
        is_only: Whether there is one device, and nobody asked for just one.

    Raises:
        ValueError: If they do not go together.
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
        is_listed = names is None and replica is None
        if replica is not None:
            self.devices = [*replica]
            if names is not None:
                raise ValueError(
                    "`devices` must be left out in the scope of a strategy, "
                    f"which has them. Received: devices={self.names}."
                )
        elif self.names is None:
            self.devices = accelerators()
        else:
            self.devices = resolved(self.names)
        count = len(self.devices)
        if isinstance(schedule, Schedule):
            self.num_partitions = schedule.num_cells
            wanted, rule = schedule.num_devices, "this schedule"
            given = num_partitions or schedule.num_cells, num_micro_batches
            expected = schedule.num_cells, schedule.num_micro_batches
            if given != expected:
                raise ValueError(
                    "`num_partitions` and `num_micro_batches` must be those of "
                    f"`schedule`, {expected}. Received: {given}."
                )
        else:
            # A device has so many cells under a schedule, None for any number.
            chunks = CHUNKS.get(schedule, 1)
            self.num_partitions = num_partitions or count * (chunks or 1)
            wanted, rule = count, f'schedule="{schedule}"'
            if self.num_partitions % (chunks or count):
                raise ValueError(
                    f"`num_partitions` must be a multiple of {chunks or count} "
                    f"under {rule} on {count} devices. Received: "
                    f"num_partitions={num_partitions}."
                )
            if chunks:
                wanted = self.num_partitions // chunks
        if wanted > count or (not is_listed and wanted != count):
            cure = "Leave it out, or name as many devices."
            if is_listed:
                cure = (
                    f"{why_no_more()} Ask for fewer cells, of a file by "
                    "`tfgpipe.load_model(path, num_partitions=...)`, or for "
                    'schedule="interleaved" with a multiple of the devices; '
                    f"{SPLIT_CPU}."
                )
            raise ValueError(
                f"`num_partitions` must go with the devices: under {rule} "
                f"{self.num_partitions} cells take {wanted}. Received: "
                f"num_partitions={num_partitions} and "
                f"devices={self.names or self.devices}. {cure}"
            )
        self.is_only = (
            len(self.devices) == 1
            and is_listed
            and num_partitions != 1
            and not isinstance(schedule, Schedule)
        )
        if is_listed:
            self.devices = self.devices[:wanted]


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
