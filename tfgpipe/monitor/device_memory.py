"""How much memory devices use."""

import contextlib
import math
import os
import pathlib
import sys
from collections.abc import Iterable

import tensorflow as tf

from tfgpipe.monitor.measurements import accelerator_mib, is_remote

_reported: dict[tuple[str | None, int | None], dict[str, float]] = {}


def memory_mib(devices: Iterable[str]) -> dict[str, float]:
    """Memory in use, where it can be told.

    Args:
        devices: Full names, such as "/device:GPU:0".

    Returns:
        MiB by name: "GPU:0_current" and "GPU:0_peak" of each accelerator that
        counts; for logical devices of a CPU, which share their memory,
        "process_current" and "process_peak" of the whole process. Of workers
        "worker_0/process_current" and so on, as they last reported it: what
        their accelerators use cannot be told.
    """
    found: dict[str, float] = {}
    names = [tf.DeviceSpec.from_string(name) for name in devices]
    for spec in dict.fromkeys(names):
        if is_remote(spec):
            if spec.device_type == "CPU":
                reported = _reported.get((spec.job, spec.task), {})
                host = f"{spec.job}_{spec.task}"
                found |= {f"{host}/{key}": reported[key] for key in reported}
            continue
        if spec.device_type == "CPU":
            found |= process_mib()
            continue
        found |= accelerator_mib([spec.to_string()])
    return found


def report(task: str, mib: dict[str, float]) -> None:
    """Remembers what a worker's process uses.

    Args:
        task: Of the worker, such as "/job:worker/replica:0/task:1".
        mib: What `process_mib` returned there.
    """
    spec = tf.DeviceSpec.from_string(task)
    _reported[spec.job, spec.task] = mib


def host_bytes() -> float:
    """Bytes that this computer has for its processes, or infinity."""
    found = [math.inf]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found.append(pages + _swap_bytes())
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        # "max" is no number; nor are there such limits everywhere.
        with contextlib.suppress(OSError, ValueError):
            path = pathlib.Path("/sys/fs/cgroup", name)
            found.append(int(path.read_text("utf-8")))
    return min(found)


def _swap_bytes() -> int:
    with contextlib.suppress(OSError):  # not Linux
        for line in (
            pathlib.Path("/proc/meminfo").read_text("utf-8").split("\n")
        ):
            if line.startswith("SwapTotal:"):
                return 1024 * int(line.split()[1])
    return 0


def process_mib() -> dict[str, float]:
    """MiB that are resident of this process, files included."""
    try:
        text = pathlib.Path("/proc/self/status").read_text("utf-8")
    except OSError:  # not Linux
        return _peak_mib()
    lines = dict(line.split(":", 1) for line in text.splitlines())
    keys = {"process_current": "VmRSS", "process_peak": "VmHWM"}
    return {
        name: int(lines[key].split()[0]) / 1024
        for name, key in keys.items()
        if key in lines
    }


def _peak_mib() -> dict[str, float]:
    try:
        import resource  # not on Windows
    except ImportError:
        return {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return {"process_peak": peak * unit / 2**20}
