r"""Runs tasks on a device, one after the other.

A control dependency from each task to the next one on its device keeps the
schedule's order there. Between devices only data does:

    device 0   F0 -> F1 -> F2 ------------> B2 -> ...     ->  control
                 \    \    \                /                \  data
    device 1      F0 -> F1 -> F2 -> B2 -> B1 -> ...

Side effects, such as a `tf.print` in a layer, would make TensorFlow run all
calls in the order in which they were traced: they are taken out of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import tensors
from tfgpipe.ending import may_end
from tfgpipe.schedules import Task


class Chain:
    """The tasks of every device.

    Args:
        clock: Notes when each task runs, see `clock.py`, or None.

    Attributes:
        last_op: By device, the operation that the next task follows.
    """

    def __init__(self, clock: Any):
        self._clock = clock
        self.last_op: dict[str, Any] = {}

    def run(
        self,
        task: Task,
        device: str,
        awaited: list[Any],
        work: Callable[[], Any],
    ) -> Any:
        """Runs a task on its device, after the device's last one.

        Args:
            task: The task.
            device: Where it runs.
            awaited: What it gets from other devices.
            work: Runs it.
        """
        may_end()
        with self.on_device(device, awaited):
            results = work()
            self.finish(task, device, results)
        return results

    @contextlib.contextmanager
    def on_device(self, device: str, awaited: list[Any]) -> Iterator[None]:
        """Inside, operations run on a device, after its last task."""
        before = self.last_op.get(device)
        ready = [] if before is None else [before]
        if self._clock is not None:
            ready = [self._clock.start(device, ready, awaited)]
        with tf.device(device), tf.control_dependencies(ready):
            yield

    def finish(self, task: Task, device: str, results: Any) -> None:
        """Remembers a task's operation for the device's next task."""
        op = run_independently(results)
        if op is None:
            return
        if self._clock is not None:
            op = self._clock.stop(task, device, op)
        self.last_op[device] = op


def run_independently(results: Any) -> tf.Operation | None:
    """The operation that made some results; side effects do not order it."""
    found = tensors(results)
    if not found:
        return None
    op = found[0].op
    if op.type == "StatefulPartitionedCall":
        internals.run_independently(op)
    return op
