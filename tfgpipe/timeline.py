"""When each task of a training step runs, and on which device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import placement
from tfgpipe.schedules import Schedule, Task


class Event(NamedTuple):
    """One task and when it ran.

    Attributes:
        task: What ran. An update of weights is `Task("update", device, -1)`:
            it belongs to no cell and no micro-batch.
        device: Index of the device, from 0.
        start: Seconds from the start of the step.
        end: Seconds from the start of the step.
    """

    task: Task
    device: int
    start: float
    end: float


def simulated(
    schedule: Schedule, duration: Callable[[Task], float]
) -> list[Event]:
    """What a step would be if tasks took only their own time.

    Args:
        schedule: The tasks of each device.
        duration: Seconds that a task takes.

    Returns:
        An event a task, device by device.
    """
    times = schedule.simulate(duration)
    return [
        Event(task, device, *times[task])
        for device, tasks in enumerate(schedule.tasks)
        for task in tasks
    ]


def measure(
    model: Any,
    x: Any,
    y: Any,
    sample_weight: Any = None,
    num_steps: int = 3,
) -> list[Event]:
    """Trains a few steps, and tells when each task of the last one ran.

    A clock is read before and after each task, on the host. A task starts when
    its device is free and what it takes from other devices has arrived. On a
    GPU the host is ahead of the device: use TensorFlow's profiler there.

    Args:
        model: A compiled `GPipe`. It is trained.
        x: The inputs of one mini-batch.
        y: The labels.
        sample_weight: Weights of the rows, or None.
        num_steps: How many steps to train; the first is slower than others.

    Returns:
        An event a task, and one a device for its update, by their start.
    """
    data = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
    if sample_weight is not None:
        data = (*data, tf.convert_to_tensor(sample_weight))
    model.build_for(data)
    clock = Clock()

    @tf.function(autograph=False)
    def step(data: Any) -> tf.Tensor:
        with model.timed_by(clock):
            model.train_step(data)
        return tf.stack(clock.times)

    for _ in range(num_steps):
        times = step(data)
    seconds = (times - tf.reduce_min(times)).numpy()
    replicas = zip(*(cell.devices for cell in model.cells()))
    devices = list(dict.fromkeys(d for own in replicas for d in own))
    events = [
        Event(
            task._replace(cell=devices.index(device))
            if task.kind == "update"
            else task,
            devices.index(device),
            float(start),
            float(end),
        )
        for (task, device), start, end in zip(
            clock.tasks, seconds[::2], seconds[1::2]
        )
    ]
    return sorted(events, key=lambda event: event.start)


class Clock:
    """Notes when each task of a step runs; see `measure`.

    Attributes:
        tasks: The tasks, each with its device.
        times: Two for each task, its start and its end: seconds.
    """

    def __init__(self) -> None:
        self.tasks: list[tuple[Task, str]] = []
        self.times: list[tf.Tensor] = []
        self._started: dict[str, tf.Tensor] = {}

    def _read(self, device: str, after: list[Any]) -> tf.Tensor:
        host = tf.DeviceSpec.from_string(device)
        if host.device_type != "CPU":
            host = host.replace(device_type="CPU", device_index=0)
        with tf.device(host.to_string()), tf.control_dependencies(after):
            time = tf.timestamp()
        internals.run_independently(time.op)
        return time

    def start(self, device: str, ready: list[Any], awaited: list[Any]) -> Any:
        """Reads the clock when a task can run.

        Args:
            device: Where it runs.
            ready: Operations that it follows.
            awaited: Tensors that it takes, or None.

        Returns:
            The operation that the task has to follow.
        """
        tensors = [t for t in awaited if t is not None]
        self._started[device] = self._read(device, [*ready, *tensors])
        return self._started[device].op

    def stop(self, task: Task, device: str, op: Any) -> Any:
        """Reads the clock after a task.

        Args:
            task: The task.
            device: Where it runs; `start` was called for it there last.
            op: Its operation.

        Returns:
            The operation that the device's next task has to follow.
        """
        stopped = self._read(device, [op])
        self.tasks.append((task, device))
        self.times += [self._started[device], stopped]
        return stopped.op

    @contextlib.contextmanager
    def update(self, last_op: dict[str, Any]) -> Iterator[None]:
        """Inside, weights are updated.

        Args:
            last_op: By device, the operation that its update follows.
        """
        graph = tf.compat.v1.get_default_graph()
        num_before = len(graph.get_operations())
        yield
        operations = graph.get_operations()[num_before:]
        for device, before in last_op.items():
            own = [
                op
                for op in operations
                if op.device and placement.same_device(op.device, device)
            ]
            self.start(device, [before], [])
            done = self._read(device, [before, *own]).op
            self.stop(Task("update", -1, -1), device, done)
