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
from tfgpipe.failures import check_interruption
from tfgpipe.graphs import StagedFunction, by_reference, tensors
from tfgpipe.inputs import MicroBatches
from tfgpipe.schedules import Task
from tfgpipe.state import sum_of


class Beside(NamedTuple):
    """The place of a task that runs beside its device's others: a shard's.

    Attributes:
        caller: The device of its cell: it follows that one's last task.
        layer: It follows the last task of this layer on its device.
    """

    caller: str
    layer: int


_LAST_OPS = "_tfgpipe_last_ops"  # an attribute of graphs


class Chain:
    """The tasks of every device.

    A step may run several mini-batches, or one twice: their activations would
    be there at the same time if the second did not follow the first.

    Args:
        clock: Notes when each task runs, see `clock.py`, or None.

    Attributes:
        last_op: By device, the operation that the next task follows.
    """

    def __init__(self, clock: Any):
        self._clock = clock
        graph = internals.current_graph()
        self.last_op: dict[str, tf.Operation] = getattr(graph, _LAST_OPS, {})
        if graph is not None:
            setattr(graph, _LAST_OPS, self.last_op)
        self._last_beside: dict[tuple[str, int], tf.Operation] = {}

    def run(
        self,
        task: Task,
        device: str,
        awaited: Sequence[tf.Tensor | None],
        work: Callable[[], Any],
        beside: Beside | None = None,
        before: Sequence[tf.Operation] = (),
    ) -> Any:
        """Runs a task on its device, after the device's last one.

        Or beside its device's tasks, see `Beside`; and after those `before`.
        """
        check_interruption()
        with self.on_device(device, awaited, beside, before):
            results = work()
            self.finish(task, device, results, beside)
        return results

    def run_beside(
        self, device: str, work: Callable[[list[tf.Operation]], Any]
    ) -> Any:
        """Runs what a device does beside its tasks.

        `work` gets what it must follow: the device's last task.
        """
        before = self.last_op.get(device)
        return work([] if before is None else [before])

    @contextlib.contextmanager
    def on_device(
        self,
        device: str,
        awaited: Sequence[tf.Tensor | None],
        beside: Beside | None = None,
        before: Sequence[tf.Operation] = (),
    ) -> Iterator[None]:
        """Inside, operations run on a device, after its last task."""
        last = [self.last_op.get(device)]
        if beside is not None:
            last = [
                self.last_op.get(beside.caller),
                self._last_beside.get((device, beside.layer)),
            ]
        ready = [op for op in (*last, *before) if op is not None]
        if self._clock is not None:
            ready = [self._clock.start(device, ready, awaited)]
        with tf.device(device), tf.control_dependencies(ready):
            yield

    def finish(
        self,
        task: Task,
        device: str,
        results: Any,
        beside: Beside | None = None,
    ) -> None:
        """Remembers a task's operation for the next one that follows it."""
        op = run_independently(results)
        if op is None:
            return
        if self._clock is not None:
            op = self._clock.stop(task, device, op)
        if beside is None:
            self.last_op[device] = op
        else:
            self._last_beside[device, beside.layer] = op


def send(values: Sequence[tf.Tensor], device: str) -> list[tf.Tensor]:
    """Copies of tensors, on another device."""
    with tf.device(device):
        return [tf.identity(value) for value in values]


def run_independently(results: Any) -> tf.Operation | None:
    """The operation that made some results; side effects do not order it."""
    flat = tensors(results)
    if not flat:
        return None
    op = flat[0].op  # a task is one call: all its results are of one operation
    if op.type == "StatefulPartitionedCall":
        internals.run_independently(op)
    return op


class ReadyTask(NamedTuple):
    """A task that is ready to run.

    Attributes:
        task: The task.
        device: Where it runs.
        awaited: What it gets from other devices.
        work: Runs it.
        beside: If it runs beside the tasks of its device, with which.
        before: Operations that it follows besides.
    """

    task: Task
    device: str
    awaited: Sequence[tf.Tensor | None]
    work: Any
    beside: Beside | None = None
    before: Sequence[tf.Operation] = ()


def run_together(
    chain: Chain, started: Sequence[ReadyTask], micro_batches: MicroBatches
) -> list[Any]:
    """Runs the tasks of partners, and returns what each returns.

    Args:
        chain: Of all devices.
        started: The tasks. Of replicas with unequal numbers of micro-batches,
            one may be the first to sum gradients, and another one not.
        micro_batches: How the rows fall into micro-batches.
    """
    functions: list[StagedFunction] = [one.work.function for one in started]
    values = [dict(one.work.values) for one in started]
    is_first = True
    for stages in zip(*(f.before_last for f in functions), strict=True):
        sent = []
        for one, known, stage in zip(started, values, stages):
            with _on_device(chain, one, is_first):
                *sums, known[stage.carried] = stage.function(known)
                run_independently(sums)
                sent.append(sums)
        is_first = False
        totals = _totals(started, sent, micro_batches)
        for known, stage, received in zip(values, stages, totals):
            known.update(by_reference(stage.received, received))
    results = []
    for one, known, function in zip(started, values, functions):
        with _on_device(chain, one, is_first):
            last = function.last(known, one.work.sums)
            results.append(one.work.finish(last))
            chain.finish(one.task, one.device, results[-1])
    return results


def _on_device(chain: Chain, one: ReadyTask, is_first: bool) -> Any:
    if is_first:
        return chain.on_device(one.device, one.awaited)
    return tf.device(one.device)


def _totals(
    started: Sequence[ReadyTask],
    sent: list[list[tf.Tensor]],
    micro_batches: MicroBatches,
) -> list[list[tf.Tensor]]:
    """Adds up what partners sent; returns what each of them receives."""
    if len(sent) == 1:
        return sent
    select = micro_batches.select
    places = [one.task.micro_batch for one in started]
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
