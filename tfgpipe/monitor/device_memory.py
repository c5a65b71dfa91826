"""Tells how much memory devices and processes use."""

import contextlib
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

_MIB = 2**20

_reported: dict[tuple[str | None, int | None], dict[str, float]] = {}


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


def memory_mib(devices: Iterable[str]) -> dict[str, float]:
    """Returns the memory in use, where it can be told.

    Args:
        devices: Full names, such as "/device:GPU:0".

    Returns:
        MiB by name: "GPU:0_current" and "GPU:0_peak" of each accelerator that
        counts; for logical devices of a CPU, which share their memory,
        "process_current" and "process_peak" of the whole process. Of workers
        "worker_0/process_current" and so on, as they last reported it: what
        their accelerators use cannot be told.
    """
    devices = list(devices)
    used = accelerator_mib(devices)
    for spec in dict.fromkeys(map(tf.DeviceSpec.from_string, devices)):
        if spec.device_type != "CPU":
            continue
        if is_remote(spec):
            reported = _reported.get((spec.job, spec.task), {})
            host = f"{spec.job}_{spec.task}"
            used |= {f"{host}/{key}": mib for key, mib in reported.items()}
        else:
            used |= process_mib()
    return used


def report(task: str, mib: dict[str, float]) -> None:
    """Remembers what a worker's process uses.

    Args:
        task: Of the worker, such as "/job:worker/replica:0/task:1".
        mib: What `process_mib` returned there.
    """
    spec = tf.DeviceSpec.from_string(task)
    _reported[spec.job, spec.task] = mib


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


def process_mib() -> dict[str, float]:
    """Returns the MiB that are resident of this process, files included."""
    sizes = _numbers_of("/proc/self/status")
    if sizes:
        names = {"process_current": "VmRSS", "process_peak": "VmHWM"}
        return {k: sizes[v] / 1024 for k, v in names.items() if v in sizes}
    try:
        import resource  # not on Windows
    except ImportError:
        return {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return {"process_peak": peak * unit / _MIB}


def _numbers_of(path: str) -> dict[str, int]:
    """Returns the numbers of a file of Linux, by name; none elsewhere."""
    try:
        lines = pathlib.Path(path).read_text("utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    words = {name: text.split()[:1] for name, _, text in pairs}
    return {k: int(w[0]) for k, w in words.items() if w and w[0].isdigit()}
