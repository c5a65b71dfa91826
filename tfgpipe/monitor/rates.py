"""How fast a model is trained, and how much memory accelerators use."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import outline
from tfgpipe.costs import operation_flops
from tfgpipe.micro_batches import first_tensor


class Rates:
    """Counts examples and seconds while it runs.

    What the loss tracker counts are the examples. To read it waits for the
    devices, so it is done when counting starts and stops, not in between.

    Attributes:
        seconds: How long it has run, up to the last `stop`.
        examples: How many examples came in that time.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._since: tuple[float, float] | None = None
        self.clear()

    def clear(self) -> None:
        """Forgets the seconds and examples that were counted."""
        self.seconds = self.examples = 0.0
        self._is_known = True
        self._since = None

    def start(self) -> None:
        """Counts from now on, without what came since the last `stop`."""
        examples = self._count()
        self._since = time.perf_counter(), examples

    def stop(self) -> None:
        """Adds what came since `start`; nothing if it has been stopped."""
        if self._since is None:
            return
        (start, before), self._since = self._since, None
        examples = self._count() - before
        self._is_known &= examples >= 0  # or someone has reset the metrics
        self.seconds += time.perf_counter() - start
        self.examples += examples

    @property
    def examples_per_second(self) -> float | None:
        """The mean; None if it cannot be told."""
        if not self._is_known or not self.examples:
            return None
        return self.examples / self.seconds

    def _count(self) -> float:
        return float(internals.loss_tracker(self._model).count)


def tokens_of_example(input_spec: Any) -> int | None:
    """How many tokens an example has; None if examples differ.

    0 if the inputs, which have a `shape` (batch, ...) and a `dtype`, are no
    token ids.
    """
    first = first_tensor(input_spec)
    is_ids = len(first.shape) == 2 and "int" in first.dtype
    return first.shape[1] if is_ids else 0


def flops_of_example(model: Any, input_spec: Any) -> float | None:
    """FLOPs of the forward pass of one example, by `costs.flops`.

    The model is built; `input_spec` is that of the data. None, with a warning,
    if examples differ in size.
    """
    leaves = [x for x in keras.tree.flatten(input_spec) if x is not None]
    if any(None in tuple(leaf.shape[1:]) for leaf in leaves):
        warnings.warn(
            "`PipelineMonitor` leaves out `model_flops_utilisation`, as it "
            "does not know the sizes of all examples. Received: data of "
            f"shapes {[tuple(leaf.shape) for leaf in leaves]}. Pass "
            "`flops_of_example`, the mean FLOPs of a forward pass.",
            stacklevel=2,
        )
        return None

    def call(x: Any, training: bool) -> Any:
        return model(x, training=training)

    return sum(outline(call, [model], input_spec, operation_flops).flops)


_MIB = 2**20


def accelerator_mib(devices: Iterable[str]) -> dict[str, float]:
    """Memory in use, where TensorFlow counts it.

    MiB by name, "GPU:0_current" and "GPU:0_peak" for the full name
    "/device:GPU:0". Nothing of CPUs, of accelerators that do not count, and of
    those of other processes.
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
