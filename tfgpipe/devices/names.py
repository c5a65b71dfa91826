"""Names of devices, and which devices there are."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import tensorflow as tf


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
        full = resolve_device(name)
        if full is None:
            problems.append(
                "`devices` must be devices that TensorFlow lists: "
                f"{all_devices()}. Received: {name!r}."
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


# Types of devices without kernels of their own. Those of the last two exist if
# TensorFlow is asked for them, see docs/tpu.md.
_ONLY_COMPILE = {"TPU", "XLA_CPU", "XLA_GPU"}

# What names leave out.
_LOCAL = tf.DeviceSpec(job="localhost", replica=0, task=0)


def accelerators() -> list[str]:
    """Names of the devices cells go to: TPUs, or GPUs, or else CPUs."""
    for kind in ("TPU", "GPU", "CPU"):
        devices = tf.config.list_logical_devices(kind)
        if devices:
            return [device.name for device in devices]
    return []


def why_no_more() -> str:
    """How many devices TensorFlow sees, and why it may not see a GPU.

    Returns:
        Sentences; about GPUs where it sees one at most, and no TPU.
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
    if listed > seen["GPU"]:
        return (
            f"{text} There are {listed} GPUs, of which "
            "`tf.config.set_visible_devices` hides some."
        )
    if not tf.test.is_built_with_gpu_support():
        return (
            f"{text} This build of TensorFlow knows no GPUs: `pip install "
            "'tensorflow[and-cuda]'` installs one that does."
        )
    if limit is not None:
        return f"{text} CUDA_VISIBLE_DEVICES={limit!r} may hide others from it."
    if seen["GPU"]:
        return text
    return (
        f"{text} If there are GPUs, it has not found their driver, which "
        "`nvidia-smi` shows, or CUDA, which `pip install "
        "'tensorflow[and-cuda]'` installs."
    )


SPLIT_CPU = (
    "to try a pipeline without accelerators, split the CPU with "
    "`tf.config.set_logical_device_configuration` first"
)


def all_devices() -> list[str]:
    """Names of all devices that TensorFlow lists."""
    return [device.name for device in tf.config.list_logical_devices()]


def resolve_device(name: Any) -> str | None:
    """The name by which TensorFlow lists a device, or None."""
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
    """The types of devices, such as "GPU", each once."""
    types = (tf.DeviceSpec.from_string(name).device_type for name in names)
    return list(dict.fromkeys(types))


def only_compiles(names: Iterable[str]) -> bool:
    """Whether one of these devices runs nothing but what XLA compiles.

    It has no kernels besides, and holds no variants, such as Optionals.
    """
    return not _ONLY_COMPILE.isdisjoint(device_types(names))


def same_device(one: str, other: str) -> bool:
    """Whether two names, full or short, mean one device."""
    a, b = tf.DeviceSpec.from_string(one), tf.DeviceSpec.from_string(other)
    keys = ("device_type", "device_index")
    if any(getattr(a, key) != getattr(b, key) for key in keys):
        return False
    return None in (a.task, b.task) or (a.job, a.task) == (b.job, b.task)


def host_of(device: str) -> str:
    """The CPU of the host that a device is of."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()
