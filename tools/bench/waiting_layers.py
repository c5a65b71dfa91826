"""Layers that wait instead of computing: accelerators without accelerators.

What a pipeline of them takes is the waiting, in the order of its schedule, and
whatever the runtime adds. So schedules can be measured with more devices than
there are cores.

A layer waits in its forward pass, in the gradient of its input and in that of
its weight. Both gradients need the layer's output, so that re-materialisation
has to wait for it again, and neither needs the other, so that a schedule can
run them apart.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe.schedules import Task

_MOST_LATE = 1e-3


class Device:
    """Does one thing at a time, and takes its time for it.

    Costs no processor time. The operating system wakes a thread too late: by
    how much is learned, and slept less, so that a wait takes what it should on
    average.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = 0.0  # when it is done with everything so far
        self._late = 0.0  # how late a thread wakes up

    def work(self, seconds: float) -> None:
        """Returns when the device has worked so long, after other work."""
        with self._lock:
            end = max(time.perf_counter(), self._free) + seconds
            self._free = end
        sleep = end - time.perf_counter() - self._late
        if sleep > 0:
            time.sleep(sleep)
            late = self._late + 0.1 * (time.perf_counter() - end)
            self._late = min(max(late, 0.0), _MOST_LATE)


class Timed(keras.layers.Layer):
    """Returns its inputs, after a while.

    Args:
        device: What does the work. A list: that of each replica; the inputs
            are the number of the replica then.
        seconds: For the forward pass, and for each of the two gradients.
        is_first: Whether no layer before it has a weight. Its input would
            need no gradient, and its backward pass be shorter than that of
            others: it gets a second weight, which needs that gradient.
        **kwargs: See `keras.layers.Layer`.
    """

    def __init__(
        self,
        device: Device | Sequence[Device],
        seconds: float,
        is_first: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        # TensorFlow does not keep a function alive while a graph calls it.
        self._work = Work(device, seconds)
        self._is_first = is_first

    def build(self, input_shape: Any) -> None:
        """Creates the weights."""
        self._scale = self.add_weight((), "ones", name="scale")
        if self._is_first:
            self._offset = self.add_weight((), "zeros", name="offset")

    def call(self, inputs: Any) -> Any:
        """Waits; returns the inputs."""
        if self._is_first:
            inputs = inputs + self._offset
        return _timed(self._work, inputs, self._scale)


class Work:
    """A function for graphs that takes some time on a device.

    Args:
        device: What does the work. A list: its index is the first value of
            the last tensor.
        seconds: For a call.
    """

    def __init__(
        self, device: Device | Sequence[Device], seconds: float
    ) -> None:
        self._devices = [device] if isinstance(device, Device) else device
        self._seconds = seconds

    def __call__(self, *tensors: tf.Tensor) -> tf.Tensor:
        """Adds an operation that returns the first of the tensors."""
        first = tensors[0]
        # Without state: automatic control dependencies leave it alone.
        result = tf.numpy_function(self._run, tensors, first.dtype, False)
        result.set_shape(first.shape)
        return result

    def _run(self, *tensors: np.ndarray) -> np.ndarray:
        index = int(tensors[-1].flat[0]) if len(self._devices) > 1 else 0
        self._devices[index].work(self._seconds)
        return tensors[0]


def _timed(work: Work, inputs: Any, weight: Any) -> Any:
    @tf.custom_gradient
    def timed(inputs: Any, weight: Any) -> Any:
        outputs = work(inputs)

        def gradient(dy: Any) -> tuple[Any, Any]:
            dw = tf.reduce_sum(work(dy, outputs))
            return work(dy, outputs), tf.reshape(dw, tf.shape(weight))

        return outputs, gradient

    return timed(inputs, tf.convert_to_tensor(weight))


def durations(
    seconds: Sequence[float], call_cost: float = 0
) -> Callable[[Task], float]:
    """How long the tasks of cells with one `Timed` layer each take.

    Example:

    >>> backward = Task("backward", cell=1, micro_batch=0)
    >>> durations([3, 5])(backward)
    10
    """
    calls = {"backward": 2}

    def duration(task: Task) -> float:
        num_calls = calls.get(task.kind, 1)
        if task.cell == 0:  # nothing takes the gradient of the model's inputs
            special = {"input_gradient": 0, "weight_gradient": 2}
            num_calls = special.get(task.kind, num_calls)
        if not num_calls:
            return 0
        # Two calls of a task wait for the same device, at the same time.
        return num_calls * seconds[task.cell] + call_cost

    return duration


def call_cost(seconds: float, num_calls: int = 20) -> float:
    """What a call takes beside the waiting, in seconds.

    The median of several chains of calls in a graph, with nothing else to do.
    """
    work = Work(Device(), seconds)

    @tf.function
    def chain(x: tf.Tensor) -> tf.Tensor:
        for _ in range(num_calls):
            x = work(x)
        return x

    x = tf.zeros((1, 1))
    chain(x)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        chain(x)
        times.append((time.perf_counter() - start) / num_calls - seconds)
    return sorted(times)[1]
