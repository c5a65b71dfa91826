"""Sends weights to the devices that need them.

A variable has one owner among the devices of its cell's column: one a replica.
It is read once, there, and sent to the others; what a cell only casts is cast
before that. If weights are on the host, they are read and sent again where a
device comes back to a cell:

    host       w0 -------> w2 ----------> w0 ...      w2 is sent after the first
    device     F0 of cell 0, F1, F2 | F0 of cell 2    F2 has begun

Shards of a layer get their columns once, when the step begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells import CellTasks
from tfgpipe.devices import names, placement
from tfgpipe.run.chain import Chain, send
from tfgpipe.run.mini_batch import MiniBatch
from tfgpipe.state import Use


class Weights:
    """The values of all cells' weights, on every device that needs them.

    What a cell only casts, for every micro-batch, is cast once here. A device
    that has weights of elsewhere holds two cells' weights, and its shards.
    """

    def __init__(
        self, batch: MiniBatch, tasks: Sequence[CellTasks], chain: Chain
    ):
        self._tasks = tasks
        self._cells = batch.cells
        self._chain = chain
        # What layers assign has its old value to the end.
        self._assigned = {id(v) for v, _ in batch.traced.new_state}
        self._read: dict[tuple[int, Any, Any], tf.Tensor] = {}
        self._held: dict[str, dict[int, Any]] = {}  # by device and cell
        self._of_shards: dict[tuple[int, str], Any] = {}  # by cell and device
        # By device, what ran there before the last task.
        self._before_last: dict[str, tf.Operation] = {}

    def packed(self, k: int, device: str) -> Any:
        """The weights of cell k on a device, as its next task takes them."""
        cell = self._cells[k]
        if cell.shards is not None:
            if (k, device) not in self._of_shards:
                self._of_shards[k, device] = self._packed(k, device)
            return self._of_shards[k, device]
        held = self._held.setdefault(device, {})
        before_last = self._before_last.get(device)
        self._before_last[device] = self._chain.last_op.get(device)
        if k in held:
            held[k] = held.pop(k)  # the last one used
            return held[k]
        ready = []
        if cell.is_stored_elsewhere:
            if len(held) > 1:
                del held[next(iter(held))]
            ready = [] if before_last is None else [before_last]
            self._read = {
                key: value
                for key, value in self._read.items()
                if key[0] in self._assigned
            }
        # Otherwise sent when the step begins, not when they are used first.
        held[k] = self._packed(k, device, ready)
        return held[k]

    def _packed(
        self, k: int, device: str, ready: Sequence[tf.Operation] = ()
    ) -> Any:
        """Packs the weights of cell k, sent after some operations."""
        cell = self._tasks[k]
        packed = cell.functions.weights
        pairs = zip(cell.part.uses, packed.tensors)
        with tf.control_dependencies(None), tf.control_dependencies(ready):
            values = [self._sent(use, t.dtype, device) for use, t in pairs]
        with tf.control_dependencies(None), tf.device(device):
            return packed.pack(values)

    def _sent(self, use: Use, dtype: tf.DType, device: str) -> tf.Tensor:
        """Returns what a cell reads of a variable, in a dtype on a device."""
        home = use.variable.value.device
        key = id(use.variable), use.piece, dtype
        if key not in self._read:
            with tf.device(home):
                value = use.columns_of(placement.read_variable(use.variable))
                self._read[key] = tf.cast(value, dtype)
        if names.same_device(home, device):
            return self._read[key]
        (value,) = send([self._read[key]], device)
        return value
