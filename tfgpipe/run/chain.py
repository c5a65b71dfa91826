"""Runs tasks: one after the other on a device, those of partners together.

The partners of a task are the same task of the i-th micro-batches of other
replicas. Where the cell adds up over replicas, see `moments.py`, each of them
runs up to there; then the sums are added up, in the order of the replicas, and
all go on. In the step's graph, everything follows only from what was there
before it: no device can wait for ever, whatever the schedule.

A micro-batch without rows computes a row that counts for nothing: it adds
nothing to the others' sums, and keeps to its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import Exchange, MicroBatches, sum_of, tensors
from tfgpipe.run.order import Replicas
from tfgpipe.schedules import Task


class Turns:
    """Whose turn it is on each device.

    Args:
        replicas: Where cells compute micro-batches.
        micro_batches: How the rows fall into micro-batches.
        clock: Notes when each task runs, see `timeline.Clock`, or None.

    Attributes:
        last_op: By device, the operation that the next task follows.
    """

    def __init__(
        self, replicas: Replicas, micro_batches: MicroBatches, clock: Any
    ):
        self._replicas = replicas
        self._micro_batches = micro_batches
        self._clock = clock
        self.last_op: dict[str, Any] = {}

    def together(self, running: dict[int, Exchange]) -> None:
        """Runs the tasks of partners.

        Args:
            running: By the indices of their micro-batches.
        """
        totals: dict[int, Any] = dict.fromkeys(running)
        while totals:
            sent = {}
            for m, total in totals.items():
                with contextlib.suppress(StopIteration):
                    sent[m] = running[m].send(total)
            totals = self._totals(sent) if len(sent) > 1 else sent

    def _totals(
        self, sent: dict[int, list[tf.Tensor]]
    ) -> dict[int, list[tf.Tensor]]:
        """What micro-batches get for what they sent."""
        select = self._micro_batches.select
        totals = []
        for values in zip(*sent.values()):
            with tf.device(values[0].device):
                counted = [
                    select(m, value, tf.zeros_like(value))
                    for m, value in zip(sent, values)
                ]
                totals.append(sum_of(counted))
        found = {}
        for m, own in sent.items():
            with tf.device(own[0].device):
                found[m] = [
                    select(m, total, value) for total, value in zip(totals, own)
                ]
        return found

    def run(
        self, task: Task, awaited: list[Any], call: Callable[[], Exchange]
    ) -> Exchange:
        """Runs a task on its device, after the device's last one.

        Args:
            task: The task.
            awaited: What the task gets from other devices.
            call: Starts it.
        """
        device = self._replicas.device(task.cell, task.micro_batch)
        running: Any = None
        total: Any = None
        while True:
            with (
                self._on_device(device, awaited)
                if running is None
                else tf.device(device)
            ):
                running = running or call()
                try:
                    sent = running.send(total)
                except StopIteration as end:
                    self._finish(task, device, end.value)
                    return end.value
                _run_independently(sent)
            total = yield sent

    @contextlib.contextmanager
    def _on_device(self, device: str, awaited: list[Any]) -> Iterator[None]:
        """Inside, operations run on a device, after its last task."""
        before = self.last_op.get(device)
        ready = [] if before is None else [before]
        if self._clock is not None:
            ready = [self._clock.start(device, ready, awaited)]
        with tf.device(device), tf.control_dependencies(ready):
            yield

    def _finish(self, task: Task, device: str, results: Any) -> None:
        """Remembers a task's operation for the device's next task."""
        op = _run_independently(results)
        if op is None:
            return
        if self._clock is not None:
            op = self._clock.stop(task, device, op)
        self.last_op[device] = op


def _run_independently(results: Any) -> tf.Operation | None:
    """The operation that made some results; side effects do not order it."""
    found = tensors(results)
    if tf.executing_eagerly() or not found:
        return None
    op = found[0].op
    if op.type == "StatefulPartitionedCall":
        internals.run_independently(op)
    return op
