"""How much memory accelerators use."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

_MIB = 2**20


def accelerator_mib(devices: Iterable[str]) -> dict[str, float]:
    """Memory in use, where TensorFlow counts it.

    Args:
        devices: Full names, such as "/device:GPU:0".

    Returns:
        MiB by name: "GPU:0_current" and "GPU:0_peak". Nothing of CPUs, of
        accelerators that do not count, and of those of other processes.
    """
    found: dict[str, float] = {}
    for spec in dict.fromkeys(map(tf.DeviceSpec.from_string, devices)):
        if spec.device_type == "CPU" or is_remote(spec):
            continue
        short = f"{spec.device_type}:{spec.device_index}"
        try:
            info = tf.config.experimental.get_memory_info(short)
        except ValueError:  # this kind of device does not count
            continue
        found |= {f"{short}_{key}": info[key] / _MIB for key in info}
    return found


def is_remote(spec: tf.DeviceSpec) -> bool:
    """Whether a device belongs to another process."""
    if spec.job in (None, "localhost"):
        return False
    own = tf.DeviceSpec.from_string(_own_device())
    return (spec.job, spec.task) != (own.job, own.task)


def _own_device() -> str:
    """The full name of a device of this process."""
    with tf.device("CPU:0"):
        return tf.constant(0).device
