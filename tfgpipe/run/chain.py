r"""Runs tasks on a device, one after the other, and partners together.

A control dependency from each task to the next one on its device keeps the
schedule's order there. Between devices only data does:

    device 0   F0 -> F1 -> F2 ------------> B2 -> ...     ->  control
                 \    \    \                /                \  data
    device 1      F0 -> F1 -> F2 -> B2 -> B1 -> ...

Side effects, such as a `tf.print` in a layer, would make TensorFlow run all
calls in the order in which they were traced: they are taken out of it.

Batch normalisation over replicas has tasks wait for each other. The partners of
a task are the same task of the i-th micro-batches of other replicas. Where
their cell takes moments over replicas, see `state/batch_normalization.py`, each
of them runs up to there; then the sums are added up, in the order of the
replicas, and all go on:

    replica 0   stage 1 --sums--+   +--> stage 2 --sums--+   +--> results
                                +-->|                    +-->|
    replica 1   stage 1 --sums--+   +--> stage 2 --sums--+   +--> results

In the step's graph everything follows only from what was there before it: no
device can wait for ever, whatever the schedule.

A micro-batch without rows computes a row that counts for nothing: it adds
nothing to the others' sums, and takes none of theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import TaskCall
from tfgpipe.graphs import by_reference, tensors
from tfgpipe.inputs import MicroBatches
from tfgpipe.run.clock import Clock
from tfgpipe.schedules import Task
from tfgpipe.state import sum_of


class ReadyTask(NamedTuple):
    """A task that is ready to run.

    Attributes:
        task: The task.
        device: Where it runs.
        awaited: What it gets from other devices.
        work: Runs it, and returns its results: a `TaskCall` where it may run
            together with partners.
        beside: Of a shard on another device than the cell of its layer: the
            device of that cell, and the number of the layer. It follows the
            cell's last task, and the last one of the layer on its device,
            beside all others.
        before: Operations that it follows, too.
    """

    task: Task
    device: str
    awaited: Sequence[tf.Tensor | None]
    work: Any
    beside: tuple[str, int] | None = None
    before: Sequence[tf.Operation] = ()


_LAST_OPS = "_tfgpipe_last_ops"  # an attribute of graphs


class Chain:
    """The tasks of every device.

    A step may run several mini-batches, or one twice: their activations would
    be there at the same time if the second did not follow the first.

    Args:
        clock: Notes when each task runs, or None.

    Attributes:
        last_op: By device, the operation that the next task follows.
    """

    def __init__(self, clock: Clock | None):
        self._clock = clock
        graph = internals.current_graph()
        self.last_op: dict[str, tf.Operation] = getattr(graph, _LAST_OPS, {})
        if graph is not None:
            setattr(graph, _LAST_OPS, self.last_op)
        self._last_beside: dict[tuple[str, int], tf.Operation] = {}

    def run(self, ready: ReadyTask) -> Any:
        """Runs a task on its device, after the device's last one."""
        with self._on_device(ready):
            return self._finished(ready, ready.work())

    @contextlib.contextmanager
    def _on_device(self, ready: ReadyTask) -> Iterator[None]:
        """Inside, operations run on a device, after its last task."""
        last = [self.last_op.get(ready.device)]
        if ready.beside is not None:
            caller, layer = ready.beside
            last = [
                self.last_op.get(caller),
                self._last_beside.get((ready.device, layer)),
            ]
        before = [op for op in (*last, *ready.before) if op is not None]
        if self._clock is not None:
            before = [self._clock.start(ready.device, before, ready.awaited)]
        with tf.device(ready.device), tf.control_dependencies(before):
            yield

    def _finished(self, ready: ReadyTask, results: Any) -> Any:
        """Remembers a task's operation for the next; returns its results."""
        op = run_independently(results)
        if op is None:
            return results
        if self._clock is not None:
            op = self._clock.stop(ready.task, ready.device, op)
        if ready.beside is None:
            self.last_op[ready.device] = op
        else:
            self._last_beside[ready.device, ready.beside[1]] = op
        return results

    def run_together(
        self, ready: Sequence[ReadyTask], micro_batches: MicroBatches
    ) -> list[Any]:
        """Runs the tasks of partners, and returns what each returns.

        Of replicas with unequal numbers of micro-batches, one may be the first
        to sum gradients, and another one not.
        """
        calls: list[TaskCall] = [one.work for one in ready]
        values = [dict(call.values) for call in calls]
        places: Callable = self._on_device
        for stages in zip(
            *(call.function.stages for call in calls), strict=True
        ):
            sent = []
            for one, known, stage in zip(ready, values, stages):
                with places(one):
                    *sums, known[stage.carried] = stage.function(known)
                    run_independently(sums)
                    sent.append(sums)
            places = _device_of  # it goes on where it is
            totals = _totals(ready, sent, micro_batches)
            for known, stage, received in zip(values, stages, totals):
                known.update(by_reference(stage.received, received))
        results = []
        for one, known, call in zip(ready, values, calls):
            with places(one):
                last = call.finish(call.function(known, call.sums))
                results.append(self._finished(one, last))
        return results


def _device_of(ready: ReadyTask) -> contextlib.AbstractContextManager[None]:
    return tf.device(ready.device)


def send(values: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
    """Copies of tensors, on another device."""
    with tf.device(device):
        return [tf.identity(value) for value in values]


def run_independently(results: Any) -> tf.Operation | None:
    """The operation that made some results; side effects do not order it."""
    parts = results if isinstance(results, tuple) else (results,)
    # Keys of mappings are of several types, which have no order.
    flat = tensors([[*p.values()] if isinstance(p, dict) else p for p in parts])
    if not flat:
        return None
    op = flat[0].op  # a task is one call: all its results are of one operation
    if op.type == "StatefulPartitionedCall":
        internals.run_independently(op)
    return op


def _totals(
    ready: Sequence[ReadyTask],
    sent: list[list[tf.Tensor]],
    micro_batches: MicroBatches,
) -> list[list[tf.Tensor]]:
    """Adds up what partners sent; returns what each of them receives."""
    if len(sent) == 1:
        return sent
    select = micro_batches.select
    places = [one.task.micro_batch for one in ready]
    totals = []
    for values in zip(*sent):
        with tf.device(values[0].device):
            counted = [
                select(m, value, tf.zeros_like(value))
                for m, value in zip(places, values)
            ]
            totals.append(sum_of(counted))
    received = []
    for m, sums in zip(places, sent):
        with tf.device(sums[0].device):
            received.append(
                [select(m, total, value) for total, value in zip(totals, sums)]
            )
    return received
