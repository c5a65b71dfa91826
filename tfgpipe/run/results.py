"""The results of the cells for a mini-batch: losses, and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.graphs import TracedModel, Values
from tfgpipe.inputs import MicroBatches
from tfgpipe.state import weighted_mean


class Results:
    """The results of the cells for a mini-batch, also before they are there.

    Args:
        traced: The model.
        device: The last cell's device, the first if there are replicas.
        micro_batches: How the rows fall into micro-batches.
        values: Of each micro-batch.
        hands_out: Whether the outputs are asked for.

    Attributes:
        device: The last cell's device, where the loss is computed.
        micro_batches: How the rows fall into micro-batches.
        values: Of each micro-batch.
        hands_out: Whether the outputs are asked for.
    """

    def __init__(
        self,
        traced: TracedModel,
        device: str,
        micro_batches: MicroBatches,
        values: list[Values],
        hands_out: bool = True,
    ):
        self._traced = traced
        self.device = device
        self.micro_batches = micro_batches
        self.values = values
        self.hands_out = hands_out
        self._missing = {t.ref() for t in traced.results}
        if not hands_out:
            self._missing -= {
                t.ref() for t in traced.handed_out if t is not None
            }
        self._outputs = {t.ref() for t in traced.outputs if t is not None}

    def add(self, m: int, outputs: Values) -> None:
        """Takes what a cell made of a micro-batch."""
        self.values[m].update(outputs)
        if self.micro_batches.count > 1:
            for ref, tensor in outputs.items():
                if ref in self._outputs:
                    self.micro_batches.check_output(tensor, m)

    @property
    def are_complete(self) -> bool:
        """Is true if all forward tasks have run."""
        return all(self._missing <= known.keys() for known in self.values)

    def _of(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """The values of some tensors, of each micro-batch."""
        return [
            [None if t is None else known[t.ref()] for t in tensors]
            for known in self.values
        ]

    # ----------------------------------------------------------------- losses
    @property
    def num_head_losses(self) -> int:
        """How many losses the head computes."""
        return self._traced.num_head_losses

    def head_sums(self) -> list[list[tf.Tensor]]:
        """The head's losses of each micro-batch, scalars, to be added up."""
        return self._of(self._traced.losses[: self.num_head_losses])

    def counts(self) -> list[list[tf.Tensor]]:
        """Returns what the losses of each micro-batch count, scalars."""
        return self._of(self._traced.counts)

    def extra_losses(self) -> list[tf.Tensor]:
        """The layers' own losses for the mini-batch."""
        by_micro_batch = self._of(self._traced.losses[self.num_head_losses :])
        losses = []
        for values in zip(*by_micro_batch):
            with tf.device(values[0].device):
                losses.append(weighted_mean([*values], self.micro_batches))
        return losses

    def extra_specs(self) -> list[tf.TensorSpec]:
        """Shapes and dtypes of the layers' own losses."""
        extra = self._traced.losses[self.num_head_losses :]
        return [tf.TensorSpec(loss.shape, loss.dtype) for loss in extra]

    # ---------------------------------------------------------------- outputs
    @property
    def num_handed_out(self) -> int:
        """How many outputs there are, with what hangs on them, flat."""
        return len(self._traced.handed_out)

    def specs(self) -> list[Any]:
        """Shapes and dtypes of what is handed out, of the mini-batch."""

        def spec(tensor: Any) -> Any:
            if tensor is None:
                return None
            if self.micro_batches.count == 1:
                return tf.TensorSpec(tensor.shape, tensor.dtype)
            num_rows = self.micro_batches.num_rows
            known = num_rows if isinstance(num_rows, int) else None
            shape = tf.TensorShape([known]).concatenate(tensor.shape[1:])
            return tf.TensorSpec(shape, tensor.dtype)

        return [spec(t) for t in self._traced.handed_out]

    def joined(self) -> list[Any]:
        """Joins what is handed out, flat, on one device."""
        with tf.device(self.device):
            joined: list[Any] = self.micro_batches.join(
                self._of(self._traced.handed_out)
            )
            return joined

    def nest(self, handed_out: Sequence[Any]) -> Any:
        """The outputs, with what hangs on them, as the model returns them.

        What was one tensor is one again.
        """
        traced, left = self._traced, list(handed_out)
        made = [None if t is None else tf.identity(t) for t in left]
        attached = iter(made[len(traced.outputs) :])
        outputs = []
        for tensor, output, names in zip(made, traced.outputs, traced.attached):
            hung = internals.constants_on(output)
            hung.update({name: next(attached) for name in names})
            outputs.append(internals.attach(tensor, hung))
        return tree.map_structure(lambda i: outputs[i], traced.structure)

    def joined_outputs(self) -> Any:
        """The mini-batch's outputs, on one device."""
        with tf.device(self.device):
            return self.nest(self.joined())
