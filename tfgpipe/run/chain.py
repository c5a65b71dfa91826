r"""Runs tasks on a device, one after the other, and partners together.

A control dependency from each task to the next one on its device keeps the
schedule's order there. Between devices only data does:

    device 0   F0 -> F1 -> F2 ------------> B2 -> ...     ->  control
                 \    \    \                /                \  data
    device 1      F0 -> F1 -> F2 -> B2 -> B1 -> ...

Side effects, such as a `tf.print` in a layer, would make TensorFlow run all
calls in the order in which they were traced: they are taken out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs import tensors
from tfgpipe.run.clock import Clock
from tfgpipe.schedules import Task

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
        graph = tf.compat.v1.get_default_graph()
        self.last_op: dict[str, tf.Operation] = getattr(graph, _LAST_OPS, {})
        setattr(graph, _LAST_OPS, self.last_op)
        self._last_beside: dict[tuple[str, int], tf.Operation] = {}

    def run(
        self,
        task: Task,
        device: str,
        awaited: Sequence[tf.Tensor | None],
        work: Callable[[], Any],
        beside: tuple[str, int] | None = None,
        before: Sequence[tf.Operation] = (),
    ) -> Any:
        """Runs a task on its device, after the device's last one.

        Args:
            task: The task.
            device: Where it runs.
            awaited: What it gets from other devices.
            work: Runs it, and returns its results.
            beside: Of a shard on another device than the cell of its layer: the
                device of that cell, and the number of the layer. It follows the
                cell's last task, and the last one of the layer on its device,
                beside all others.
            before: Operations that it follows, too.
        """
        last = [self.last_op.get(device)]
        if beside is not None:
            caller, layer = beside
            last = [
                self.last_op.get(caller),
                self._last_beside.get((device, layer)),
            ]
        follows = [op for op in (*last, *before) if op is not None]
        if self._clock is not None:
            follows = [self._clock.start(device, follows, awaited)]
        with tf.device(device), tf.control_dependencies(follows):
            results = work()
            op = run_independently(results)
            if op is None:
                return results
            if self._clock is not None:
                op = self._clock.stop(task, device, op)
        if beside is None:
            self.last_op[device] = op
        else:
            self._last_beside[device, beside[1]] = op
        return results


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
