"""Splits the CPU into several devices, for pipelines without accelerators."""

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


def has_accelerator() -> bool:
    """Whether TensorFlow sees a GPU or a TPU. Starts no device."""
    return any(tf.config.list_physical_devices(kind) for kind in ("GPU", "TPU"))
