"""What the cells made of a mini-batch: outputs and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from tfgpipe.cells import Boundary, MicroBatches, Output
from tfgpipe.run.state_rules import weighted_mean


class Results:
    """What the cells made of a mini-batch, or will make.

    Args:
        cells: Each traced cell.
        devices: Each cell's device, the first if there are replicas.
        micro_batches: How the rows fall into micro-batches.

    Attributes:
        device: The last cell's device, where the loss is computed.
        micro_batches: How the rows fall into micro-batches.
    """

    def __init__(
        self,
        cells: Sequence[Any],
        devices: Sequence[str],
        micro_batches: MicroBatches,
    ):
        self._cells = cells
        self._devices = devices
        self.device = devices[-1]
        self.micro_batches = micro_batches
        self._outputs: dict[tuple[int, int], Output] = {}

    def add(self, k: int, m: int, output: Output) -> None:
        """Takes what cell k made of micro-batch m."""
        self._outputs[k, m] = output
        if k == len(self._cells) - 1 and self.micro_batches.count > 1:
            for tensor in output.tensors:
                if tensor is not None:
                    self.micro_batches.check_output(tensor, m)

    @property
    def are_complete(self) -> bool:
        """Whether all cells have run all their forward tasks."""
        num_tasks = len(self._cells) * self.micro_batches.count
        return len(self._outputs) == num_tasks

    def of(self, k: int) -> list[Output]:
        """What cell k made of each micro-batch."""
        return [self._outputs[k, m] for m in range(self.micro_batches.count)]

    # ----------------------------------------------------------------- losses
    @property
    def num_head_losses(self) -> int:
        """How many losses the head computes."""
        return self._cells[-1].findings.num_head_losses

    def head_sums(self) -> list[list[tf.Tensor]]:
        """The head's losses of each micro-batch, scalars, to be added up."""
        last = self.of(len(self._cells) - 1)
        return [o.losses[: self.num_head_losses] for o in last]

    def extra_losses(self) -> list[list[tf.Tensor]]:
        """For each cell, its layers' own losses for the mini-batch."""
        losses = []
        for k, cell in enumerate(self._cells):
            num_head = cell.findings.num_head_losses
            own = [o.losses[num_head:] for o in self.of(k)]
            with tf.device(self._devices[k]):
                losses.append(
                    [
                        weighted_mean(list(values), self.micro_batches)
                        for values in zip(*own)
                    ]
                )
        return losses

    def extra_specs(self) -> list[list[tf.TensorSpec]]:
        """Shapes and dtypes of the cells' own losses."""
        return [
            [
                tf.TensorSpec(loss.shape, loss.dtype)
                for loss in self._output(k).losses[
                    cell.findings.num_head_losses :
                ]
            ]
            for k, cell in enumerate(self._cells)
        ]

    def _output(self, k: int) -> Output:
        """An output of cell k, or what it was traced to be."""
        known = self._outputs.get((k, 0))
        return self._cells[k].outputs if known is None else known

    def assigned_weights(self, k: int) -> list[Any]:
        """For each flat weight of cell k, what a layer assigns to it, or None.

        Values, or what they were traced to be.
        """
        return self._output(k).weights

    # ---------------------------------------------------------------- outputs
    @property
    def output_structure(self) -> Any:
        """A nest like the outputs."""
        return self._cells[-1].findings.output_structure

    @property
    def num_outputs(self) -> int:
        """How many flat outputs there are, None among them."""
        return len(tree.flatten(self.output_structure))

    def output_specs(self) -> Boundary:
        """Shapes and dtypes of the whole mini-batch's outputs."""

        def spec(tensor: Any) -> Any:
            if tensor is None:
                return None
            num_rows = self.micro_batches.num_rows
            known = num_rows if isinstance(num_rows, int) else None
            shape = tf.TensorShape([known]).concatenate(tensor.shape[1:])
            return tf.TensorSpec(shape, tensor.dtype)

        outputs = self._output(len(self._cells) - 1)
        return tf.nest.map_structure(
            spec, Boundary(outputs.tensors, outputs.masks)
        )

    def joined_outputs(self) -> Any:
        """The mini-batch's outputs, with their masks, on the last device."""
        outputs = self.of(len(self._cells) - 1)
        with tf.device(self.device):
            tensors = self.micro_batches.join([o.tensors for o in outputs])
            masks = self.micro_batches.join([o.masks for o in outputs])
        return Boundary(tensors, masks).nest(self.output_structure)
