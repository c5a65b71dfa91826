"""How much memory devices use."""

import pathlib
import sys
from collections.abc import Iterable

import tensorflow as tf

_MIB = 2**20


def memory_mib(devices: Iterable[str]) -> dict[str, float]:
    """Memory in use, where it can be told.

    Args:
        devices: Full names, such as "/device:GPU:0".

    Returns:
        MiB by name: "GPU:0_current" and "GPU:0_peak" of each accelerator that
        counts; for logical devices of a CPU, which share their memory,
        "process_current" and "process_peak" of the whole process.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(devices):
        spec = tf.DeviceSpec.from_string(name)
        if spec.device_type == "CPU":
            found |= _process_mib()
            continue
        short = f"{spec.device_type}:{spec.device_index}"
        try:
            info = tf.config.experimental.get_memory_info(short)
        except ValueError:  # this kind of device does not count
            continue
        found |= {f"{short}_{key}": info[key] / _MIB for key in info}
    return found


def _process_mib() -> dict[str, float]:
    """What is resident of this process, files included."""
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
    return {"process_peak": peak * unit / _MIB}
