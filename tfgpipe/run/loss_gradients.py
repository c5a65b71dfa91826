"""Where the backward pass starts: gradients of the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.cells import MicroBatches


class LossGradients(NamedTuple):
    """Where the backward pass starts: gradients of the loss.

    Attributes:
        outputs: For each micro-batch, with respect to the last cell's flat
            outputs: of the shape of an output each, or None.
        head: With respect to the head's losses, scalars, the same for every
            micro-batch.
        extra: For each cell, with respect to each of its layers' own losses,
            scalars, or None.
    """

    outputs: list[list[Any]]
    head: list[tf.Tensor]
    extra: list[list[Any]]

    def of_losses(
        self, k: int, m: int, micro_batches: MicroBatches
    ) -> list[Any]:
        """Gradients with respect to cell k's losses, for micro-batch m."""
        is_last = k == len(self.extra) - 1
        head = [
            micro_batches.select(m, d, tf.zeros_like(d))
            for d in (self.head if is_last else [])
        ]
        return head + [
            None if d is None else d * micro_batches.fraction(m, d.dtype)
            for d in self.extra[k]
        ]
