"""Tells how much memory devices use, and how much a computer has."""

import contextlib
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

_MIB = 2**20


def accelerator_mib(devices: Iterable[str]) -> dict[str, float]:
    """Returns the memory in use, where TensorFlow counts it.

    MiB by name, "GPU:0_current" and "GPU:0_peak" for the full name
    "/device:GPU:0". Nothing of CPUs, and of accelerators that do not count or
    are of other processes.
    """
    used: dict[str, float] = {}
    for spec in dict.fromkeys(map(tf.DeviceSpec.from_string, devices)):
        if spec.device_type == "CPU" or is_remote(spec):
            continue
        short = f"{spec.device_type}:{spec.device_index}"
        with contextlib.suppress(ValueError):  # this kind does not count
            info = tf.config.experimental.get_memory_info(short)
            used |= {f"{short}_{key}": info[key] / _MIB for key in info}
    return used


def peak_mib(devices: Sequence[str], run: Callable[[], object]) -> list[float]:
    """Returns the most MiB that devices hold while something runs.

    None of those that do not count, see `accelerator_mib`.
    """
    end = "_peak"
    counted = [key for key in accelerator_mib(devices) if key.endswith(end)]
    for key in counted:
        tf.config.experimental.reset_memory_stats(key.removesuffix(end))
    run()
    used = accelerator_mib(devices)
    return [used[key] for key in counted]


def is_remote(spec: tf.DeviceSpec) -> bool:
    """Returns whether a device belongs to another process."""
    if spec.job in (None, "localhost"):
        return False
    here = tf.DeviceSpec.from_string(_local_device())
    return (spec.job, spec.task) != (here.job, here.task)


def _local_device() -> str:
    """Returns the full name of a device of this process."""
    with tf.device("CPU:0"):
        return tf.constant(0).device


def host_bytes() -> float:
    """Returns the bytes that this computer has for processes, or infinity."""
    limits = [math.inf]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        swap = 1024 * _numbers_of("/proc/meminfo").get("SwapTotal", 0)
        limits.append(pages + swap)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        # "max" is no number; nor are there such limits everywhere.
        with contextlib.suppress(OSError, ValueError):
            path = pathlib.Path("/sys/fs/cgroup", name)
            limits.append(int(path.read_text("utf-8")))
    return min(limits)


def _numbers_of(path: str) -> dict[str, int]:
    """Returns the numbers of a file of Linux, by name; none elsewhere."""
    try:
        lines = pathlib.Path(path).read_text("utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    words = {name: text.split()[:1] for name, _, text in pairs}
    return {k: int(w[0]) for k, w in words.items() if w and w[0].isdigit()}
