"""What the cells made of a mini-batch: outputs, losses and their counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells import Arguments, Boundary, MicroBatches, Output
from tfgpipe.cells import state_rules as state
from tfgpipe.run.order import Replicas


class Results:
    """What the cells made of a mini-batch, or will make.

    Args:
        tasks: What runs the tasks of each cell.
        devices: Each cell's device, the first if there are replicas.
        replicas: Where cells compute micro-batches.
        micro_batches: How the rows fall into micro-batches.
    """

    def __init__(
        self,
        tasks: Sequence[Any],
        devices: Sequence[str],
        replicas: Replicas,
        micro_batches: MicroBatches,
    ):
        self._tasks = tasks
        self._devices = devices
        self._replicas = replicas
        self._micro_batches = micro_batches
        self._outputs: dict[tuple[int, int], Output] = {}

    def add(self, k: int, m: int, output: Output) -> None:
        """Takes what cell k made of micro-batch m."""
        self._outputs[k, m] = output
        if k == len(self._tasks) - 1 and self._micro_batches.count > 1:
            for tensor in output.tensors:
                if tensor is not None:
                    self._micro_batches.check_output(tensor, m)

    @property
    def are_complete(self) -> bool:
        """Whether the last cell has run all its forward tasks."""
        return all(
            (len(self._tasks) - 1, m) in self._outputs
            for m in range(self._micro_batches.count)
        )

    def _of(self, k: int) -> list[Output]:
        """What cell k made of each micro-batch."""
        return [self._outputs[k, m] for m in range(self._micro_batches.count)]

    # ----------------------------------------------------- losses and counts
    def head_sums(self) -> list[list[tf.Tensor]]:
        """The head's losses of each micro-batch, to be added up."""
        num = self._tasks[-1].num_head_losses
        return [o.losses[:num] for o in self._of(len(self._tasks) - 1)]

    def head_counts(
        self, arguments: Callable[[int, int], Arguments]
    ) -> list[list[tf.Tensor]]:
        """What each micro-batch's losses count; maybe ahead of them.

        Numbers of rows, masks and weights rarely depend on what the layers
        compute, so they can be known before the first backward task. Where
        they do, this computes what they depend on twice.

        Args:
            arguments: Of cell k for micro-batch m; of inputs, those of the
                first cell are enough.
        """
        if self.are_complete:
            return [o.counts for o in self._of(len(self._tasks) - 1)]
        parts = self._counting_parts()
        counts = []
        for m in range(self._micro_batches.count):
            flat = tf.nest.flatten(arguments(0, m).inputs)
            found = [flat[i] for i in parts[0][1]]
            for k, (part, places) in enumerate(parts):
                inputs = self._tasks[k].traced.inputs.inputs
                flat = [None] * len(tf.nest.flatten(inputs))
                for i, value in zip(places, found):
                    flat[i] = value
                values = arguments(k, m)._replace(
                    inputs=tf.nest.pack_sequence_as(inputs, flat)
                )
                with tf.device(self._replicas.device(k, m)):
                    found = part(self._tasks[k].traced.values(values))
            counts.append(found)
        return counts

    def _counting_parts(self) -> list[tuple[Any, list[int]]]:
        """Of each cell what the counts need, and which flat inputs it takes."""
        parts: list[tuple[Any, list[int]]] = []
        wanted = list(self._tasks[-1].outputs.counts)
        for k in reversed(range(len(self._tasks))):
            part = self._tasks[k].slice(wanted)
            taken = {t.ref() for t in part.inputs if tf.is_tensor(t)}
            inputs = tf.nest.flatten(self._tasks[k].traced.inputs.inputs)
            places = [
                i
                for i, t in enumerate(inputs)
                if t is not None and t.ref() in taken
            ]
            parts.insert(0, (part, places))
            if k > 0:
                outputs = self._tasks[k - 1].outputs
                flat = [*outputs.tensors, *outputs.masks]
                wanted = [flat[i] for i in places]
        return parts

    def extra_losses(self) -> list[list[tf.Tensor]]:
        """For each cell, its layers' own losses for the mini-batch."""
        losses = []
        for k, cell in enumerate(self._tasks):
            own = [o.losses[cell.num_head_losses :] for o in self._of(k)]
            with tf.device(self._devices[k]):
                losses.append(
                    [
                        state.weighted_mean(list(values), self._micro_batches)
                        for values in zip(*own)
                    ]
                )
        return losses

    def extra_specs(self) -> list[list[tf.TensorSpec]]:
        """Shapes and dtypes of the cells' own losses."""
        specs = []
        for k, cell in enumerate(self._tasks):
            output = self._outputs.get((k, 0)) or cell.outputs
            specs.append(
                [
                    tf.TensorSpec(loss.shape, loss.dtype)
                    for loss in output.losses[cell.num_head_losses :]
                ]
            )
        return specs

    # ---------------------------------------------------------------- outputs
    def output_specs(self) -> Boundary:
        """Shapes and dtypes of the whole mini-batch's outputs."""

        def spec(tensor: Any) -> Any:
            if tensor is None:
                return None
            num_rows = self._micro_batches.num_rows
            known = num_rows if isinstance(num_rows, int) else None
            shape = tf.TensorShape([known]).concatenate(tensor.shape[1:])
            return tf.TensorSpec(shape, tensor.dtype)

        outputs = self._tasks[-1].outputs
        return tf.nest.map_structure(
            spec, Boundary(outputs.tensors, outputs.masks)
        )

    def joined_outputs(self) -> Any:
        """The mini-batch's outputs, with their masks, on the last device."""
        outputs = self._of(len(self._tasks) - 1)
        with tf.device(self._devices[-1]):
            tensors = self._micro_batches.join([o.tensors for o in outputs])
            masks = self._micro_batches.join([o.masks for o in outputs])
        return Boundary(tensors, masks).nest(self._tasks[-1].output_structure)
