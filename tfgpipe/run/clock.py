"""Notes when each task of a step runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import names
from tfgpipe.schedules import Task

# What is inside may be on any device.
_BRANCHES = {"If", "StatelessIf"}


class Event(NamedTuple):
    """One task and when it ran.

    Attributes:
        task: What ran. An update of weights is `Task("update", device, -1)`:
            it belongs to no cell and no micro-batch.
        device: Index of the device, from 0.
        start: Seconds from the start of the step.
        end: Seconds from the start of the step.

    Example:

    >>> event = Event(Task("forward", cell=0, micro_batch=2), 0, 0.5, 0.75)
    >>> event.end - event.start
    0.25
    """

    task: Task
    device: int
    start: float
    end: float


class Clock:
    """Notes when each task of a step runs; see `timeline.measure`.

    Attributes:
        tasks: The tasks, each with its device.
        times: Two for each task, its start and its end: seconds.
    """

    def __init__(self) -> None:
        self.tasks: list[tuple[Task, str]] = []
        self.times: list[tf.Tensor] = []
        # By device, of its last task: when it began, and what it awaited.
        self._begun: dict[str, tuple[tf.Tensor, list[tf.Tensor]]] = {}
        # By tensor and device: what several tasks take is sent once.
        self._sent: dict[tuple[int, str], tf.Tensor] = {}

    def _read(self, device: str, after: list[Any]) -> tf.Tensor:
        """The time when operations have ended, and tensors are there."""
        host = device
        if names.has_accelerator([device]):
            host = names.host_of(device)
            after = after + _seen(device, host, after)
        with tf.device(host), tf.control_dependencies(after):
            time = tf.timestamp()
        internals.run_independently(time.op)
        return time

    def start(
        self,
        device: str,
        ready: list[tf.Operation],
        awaited: Sequence[tf.Tensor | None],
    ) -> Any:
        """Reads the clock when a task can run; returns what it has to follow.

        It follows `ready`, and takes what is `awaited`.
        """
        tensors = [t for t in awaited if t is not None]
        started = self._read(device, [*ready, *tensors])
        self._begun[device] = started, tensors
        return started.op

    def stop(self, task: Task, device: str, op: tf.Operation) -> tf.Operation:
        """Reads the clock after a task, for which `start` was called last.

        Returns what the device's next task has to follow.
        """
        stopped = self._read(device, [op])
        started, awaited = self._begun[device]
        self.tasks.append((task, device))
        self.times += [started, stopped]
        is_fed = task.kind == "forward" and task.cell == 0  # by the host
        self._sent |= {
            (id(tensor), device): tensor
            for tensor in awaited
            if not is_fed and not names.same_device(tensor.device, device)
        }
        return stopped.op

    def sent_bytes(self) -> tf.Tensor:
        """Counts what tasks took from other devices in a step, a scalar.

        Outputs of the cells before, with their masks, and their gradients. A
        mini-batch and its labels, which come from the host, are not counted.
        """
        sizes = [tf.constant(0, tf.int64)]
        for tensor in self._sent.values():
            with tf.device(tensor.device):
                sizes.append(tf.size(tensor, tf.int64) * tensor.dtype.size)
        with tf.device("CPU:0"):
            return tf.add_n(sizes)

    def events(
        self, times: Sequence[float], devices: Sequence[str]
    ) -> list[Event]:
        """Returns what ran in a step: an event a task, by their start.

        `times` are its values in the step, `devices` are as events number them.
        """
        first = min(times)
        events = []
        for (task, device), start, end in zip(
            self.tasks, times[::2], times[1::2]
        ):
            i = devices.index(device)
            own = task._replace(cell=i) if task.kind == "update" else task
            events.append(
                Event(own, i, float(start - first), float(end - first))
            )
        return sorted(events, key=lambda event: event.start)

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
            updates = [
                op
                for op in operations
                if op.type in _BRANCHES
                or (op.device and names.same_device(op.device, device))
            ]
            self.start(device, [before], [])
            done = self._read(device, [before, *updates]).op
            self.stop(Task("update", -1, -1), device, done)


def _seen(device: str, host: str, after: list[Any]) -> list[tf.Tensor]:
    """A number from an accelerator that is there when some results are.

    For the host, an operation ends when it is in the device's queue. What is
    copied to the host waits for all that is in the queue before. Nothing if
    nothing on the device is waited for.
    """
    operations = [getattr(one, "op", one) for one in after]
    on_device = [
        op
        for op in operations
        if op.type != "Const" and not names.same_device(op.device, host)
    ]
    if not on_device:
        return []
    results = [t for op in on_device for t in op.outputs]
    # The host may have integers; and there are bundles.
    floats = [t for t in results if t.dtype.is_floating]
    with tf.device(device), tf.control_dependencies(after):
        if floats:
            number = tf.reshape(floats[0], [-1])[:1]
        else:
            number = tf.identity([0.0])
    with tf.device(host):
        return [tf.identity(number)]
