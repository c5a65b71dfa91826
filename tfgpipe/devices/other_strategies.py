"""What a pipeline takes over from the strategies of TensorFlow itself.

That is their devices: not how they run a step, see `strategy.py`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.checks import checked_counts

_LOCAL = (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)
_TPU = (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy)


def is_of_tpu(strategy: Any) -> bool:
    """Whether it is a strategy for the cores of a TPU."""
    return isinstance(strategy, _TPU)


def devices_of(strategy: Any, num_partitions: int) -> list[str]:
    """The devices of a strategy, for replicas of K of them.

    Args:
        strategy: A `MirroredStrategy` or a `OneDeviceStrategy`.
        num_partitions: K, which divides the number of its devices.

    Raises:
        ValueError: If it is something else, or K does not divide the number.
    """
    (num_partitions,) = checked_counts(num_partitions=num_partitions)
    if not isinstance(strategy, _LOCAL):
        raise ValueError(
            "`strategy` must be a `tf.distribute.MirroredStrategy`, "
            f"`OneDeviceStrategy` or `TPUStrategy`. Received: {strategy!r}. "
            "Name devices instead: `tfgpipe.PipelineStrategy(num_replicas, "
            "num_partitions, devices)`."
        )
    devices = list(strategy.extended.worker_devices)
    if len(devices) % num_partitions:
        raise ValueError(
            "`num_partitions` must divide the number of devices of the "
            f"strategy, {len(devices)}. Received: "
            f"num_partitions={num_partitions} and the devices {devices}. "
            "Change it, or name the devices to use: `tfgpipe.PipelineStrategy("
            "num_replicas, num_partitions, devices)`."
        )
    return devices


def assignment_of(strategy: Any, num_partitions: int) -> Any:
    """The cores of a TPU's strategy, as replicas of K of them.

    Args:
        strategy: A `TPUStrategy` that was made for K cores a replica.
        num_partitions: K.

    Returns:
        Its `tf.tpu.experimental.DeviceAssignment`.

    Raises:
        ValueError: If it is something else, or has no such assignment. Without
            one, it does not know how its cores lie in the TPU.
    """
    (num_partitions,) = checked_counts(num_partitions=num_partitions)
    if not is_of_tpu(strategy):
        raise ValueError(
            "`strategy` must be a `tf.distribute.TPUStrategy`. Received: "
            f"{strategy!r}. For strategies of other devices, use "
            "`tfgpipe.PipelineStrategy.from_strategy`."
        )
    assignment = internals.device_assignment(strategy)
    has = None if assignment is None else assignment.num_cores_per_replica
    if has != num_partitions:
        raise ValueError(
            "`strategy` must be a `TPUStrategy` with a `DeviceAssignment` of "
            f"`num_partitions` cores a replica, {num_partitions}. Received: a "
            "strategy with "
            + (f"one of {has}. " if has else "none. ")
            + "Pass the topology that "
            "`tf.tpu.experimental.initialize_tpu_system` has returned: "
            "`tfgpipe.TPUPipelineStrategy(tfgpipe.tpu_device_assignment("
            f"topology, num_replicas, num_partitions={num_partitions}))`."
        )
    return assignment


def instead_of(strategy: Any) -> str:
    """What to use in the place of a strategy, in a sentence."""
    if isinstance(strategy, (*_LOCAL, *_TPU)):
        return (
            "For replicas of a pipeline of K cells on its devices, make the "
            "model in the `scope()` of `tfgpipe.PipelineStrategy.from_strategy("
            "strategy, num_partitions=K)`."
        )
    return (
        "For replicas of a pipeline, make the model in the `scope()` of a "
        "`tfgpipe.PipelineStrategy(num_replicas, num_partitions)`."
    )
