"""What cells keep for their backward passes, in the host's memory.

The program says when: it goes there when a forward task has made it, and comes
back one task before it is used. Meanwhile the device holds none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells import KeptValues
from tfgpipe.devices import names
from tfgpipe.run.chain import send
from tfgpipe.run.mini_batch import MiniBatch
from tfgpipe.schedules import Op


class Offloads:
    """Makes operations ready that send what is kept; see `TaskFlow`.

    Args:
        batch: The mini-batch.
        kept: By cell and micro-batch, what is kept. It is replaced by what has
            been sent.
    """

    def __init__(
        self, batch: MiniBatch, kept: dict[tuple[int, int], KeptValues]
    ):
        self._batch = batch
        self._kept = kept

    def ready(self, op: Op) -> tuple[list[Any], Any, Callable]:
        """To the host."""
        values, take = self._values(op)
        host = self._host(op)
        return [], lambda after: send(values, host), take

    def ready_back(self, op: Op) -> tuple[list[Any], Any, Callable]:
        """Back to the device, which has then run what it has before it."""
        values, take = self._values(op)
        device = self._batch.replicas.device(op.cell, op.micro_batch)
        host = self._host(op)

        def work(after: list[Any]) -> list[tf.Tensor]:
            # What is sent does not wait for what takes it: so it waits here.
            with tf.device(host):
                with tf.control_dependencies(after):
                    begin = tf.no_op()
                with tf.control_dependencies([begin]):
                    waiting = [tf.identity(value) for value in values]
            return send(waiting, device)

        return [], work, take

    def _values(self, op: Op) -> tuple[Sequence[tf.Tensor], Callable]:
        """What is kept, and what takes it when it has been sent."""
        key = op.cell, op.micro_batch
        kept = self._kept[key]

        def take(values: list[tf.Tensor]) -> None:
            self._kept[key] = kept._replace(values=values)

        return kept.values or [], take

    def _host(self, op: Op) -> str:
        """Where weights are sent from, if they are elsewhere."""
        cell = self._batch.cells[op.cell]
        device = self._batch.replicas.device(op.cell, op.micro_batch)
        if cell.is_stored_elsewhere:
            return cell.store_of(device)
        return names.host_of(device)
