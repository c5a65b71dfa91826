"""The devices of this process, before TensorFlow starts them."""

from __future__ import annotations

import tensorflow as tf


def split_cpu(num_devices: int) -> None:
    """Makes the CPU appear as `num_devices` devices.

    Each operation gets one thread, and there are as many threads as devices:
    work that is not pipelined cannot occupy another device's core.

    Args:
        num_devices: Devices to make. Positive.

    Raises:
        RuntimeError: If TensorFlow has started its devices already.
    """
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
    )
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(num_devices)
    # On a CPU, rewriting the graph takes longer than it saves.
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )


def split_gpu(num_devices: int, mib: int) -> None:
    """Makes the first GPU appear as `num_devices` devices of `mib` each.

    They have memory of their own, and share the processor.

    Raises:
        RuntimeError: If TensorFlow has started its devices already.
    """
    first, *_ = tf.config.list_physical_devices("GPU")
    tf.config.set_logical_device_configuration(
        first, [tf.config.LogicalDeviceConfiguration(mib)] * num_devices
    )


def hide_accelerators() -> None:
    """Leaves this host's to other processes.

    Raises:
        RuntimeError: If TensorFlow has started its devices already.
    """
    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)


def has_accelerator() -> bool:
    """Returns whether TensorFlow sees a GPU or a TPU. Starts no device."""
    return num_accelerators() > 0


def num_accelerators() -> int:
    """Returns how many GPUs or TPUs TensorFlow sees. Starts no device."""
    return max(
        len(tf.config.get_visible_devices(kind)) for kind in ("GPU", "TPU")
    )
