"""A mini-batch: the cells traced for it, and what they made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from tfgpipe.boundary import Boundary, CellArguments, Output, structure_of
from tfgpipe.cells import Cell, CellFunction
from tfgpipe.devices import Replicas, names
from tfgpipe.micro_batches import MicroBatches
from tfgpipe.schedules import Program, Remat, Schedule, lower
from tfgpipe.state import weighted_mean


class MiniBatch:
    """A mini-batch whose rows are split, and for which the cells are traced.

    Args:
        cells: The cells, in order.
        x: The mini-batch, a nest of tensors of shape (batch, ...).
        labels: A nest of the same rows that the head takes, or None.
        num_micro_batches: M, those of a replica.
        training: The `training` argument of the layers.
        head: Loss and metrics of a micro-batch, or None.
        remat: Which micro-batches are computed again.
        tracer: Makes the cells' functions.
        trial: Tries layers before they are traced, if there are several
            micro-batches; None for nothing.

    Attributes:
        functions: The function of each cell.
        micro_batches: How the rows fall into micro-batches.
        inputs: What crosses into the first cell, by micro-batch.
        replicas: Which replica computes which micro-batches.
        results: What the cells make of the mini-batch.
        trained: The cells that have a backward pass.
    """

    def __init__(
        self,
        cells: list[Cell],
        x: Any,
        labels: Any,
        num_micro_batches: int,
        training: bool,
        head: Any,
        remat: Remat,
        tracer: Any,
        trial: Any = None,
    ):
        self._tracer = tracer
        self._remat = remat
        x = self._split(cells, tracer.led(x), labels, num_micro_batches)
        self.functions = [
            CellFunction(
                cell,
                training,
                head if cell is cells[-1] else None,
                recomputes=training and remat.recomputes(k),
                is_split=self.micro_batches.count > 1,
            )
            for k, cell in enumerate(cells)
        ]
        is_real = head is not None or not training
        is_tried = trial and is_real and self.micro_batches.count > 1
        if is_tried:
            trial.run(self.functions, x, self.micro_batches.count)
        has_weights = [any(f.weights) for f in self.functions]
        self.trained = [
            k
            for k in range(len(cells))
            if training and any(has_weights[: k + 1])
        ]
        self._traced = tracer.trace(
            self.functions,
            structure_of(x),
            [self._specs(k) for k in range(len(cells))],
            self.micro_batches.spec,
        )
        if is_tried:
            trial.tell()
        self.results = Results(
            self._traced, [cell.device for cell in cells], self.micro_batches
        )

    def _split(
        self, cells: list[Cell], x: Any, labels: Any, num_micro_batches: int
    ) -> Any:
        """Takes the rows of micro-batches; returns the mini-batch."""
        grid = list(zip(*(cell.devices for cell in cells)))
        # Rows for several devices are taken apart where they come from, and
        # those for a TPU where that need not be compiled.
        first = cells[0].devices
        from_host = len(first) > 1 or names.only_compiles(first)
        host = "CPU:0" if from_host else None
        with tf.device(host or cells[0].device):
            count = len(grid) * num_micro_batches
            self.micro_batches = MicroBatches(x, count)
            inputs = self.micro_batches.split(x)
        with tf.device(host or cells[-1].device):
            self._labels = self.micro_batches.split(labels)
        self.inputs = [Boundary.of(nest) for nest in inputs]
        self.replicas = Replicas(grid, self.micro_batches.count)
        return x

    def _specs(self, k: int) -> CellArguments:
        """What cell k is traced for; of inputs, those of the first cell."""

        def exact(variable: Any) -> tf.TensorSpec:
            return tf.TensorSpec(variable.shape, variable.value.dtype)

        function = self.functions[k]
        return CellArguments(
            inputs=self.inputs[0],
            weights=[[exact(v) for v in own] for own in function.weights],
            state=[exact(v) for v in function.state],
            labels=self.labels_of(k, 0),
        ).specs(self.micro_batches.spec)

    def labels_of(self, k: int, m: int) -> Any:
        """What cell k takes of the labels: all, if it has the head."""
        has_head = self.functions[k].head is not None
        return self._labels[m] if has_head else None

    @property
    def is_training(self) -> bool:
        """Whether there is a backward pass."""
        return bool(self.trained)

    def tasks(
        self,
        has_gradient: Sequence[bool] | None = None,
        has_losses: Sequence[Sequence[bool]] = (),
    ) -> list[Any]:
        """What runs the tasks of each cell.

        Args:
            has_gradient: For each output tensor, whether there will be a
                gradient. None: there is no backward pass.
            has_losses: For each cell, whether there will be one of each of
                its layers' own losses.
        """
        cells = range(len(self.functions))
        trained = [
            has_gradient is not None and k in self.trained for k in cells
        ]
        backward = self._tracer.differentiate(
            self._traced, trained, has_gradient or [], has_losses
        )
        needs_dx = [k - 1 in self.trained for k in cells]
        return self._tracer.tasks(backward, needs_dx)

    def program(
        self, tasks: Sequence[Any], schedule_of: Callable[[int], Schedule]
    ) -> Program:
        """What runs, on which device and in which order.

        Args:
            tasks: What runs the tasks of each cell.
            schedule_of: Returns the schedule for a number of micro-batches:
                those of a replica.
        """
        facts = [
            own.facts(k in self.trained, self.functions[k].synchronizes)
            for k, own in enumerate(tasks)
        ]
        # Whatever the loss is that no head computes, it keeps the outputs.
        if self.functions[-1].head is None:
            can_recompute = self._tracer.can_recompute
            facts[-1] = facts[-1]._replace(recomputes=can_recompute)
        return lower(
            schedule_of,
            facts,
            self._remat,
            self.replicas.counts,
        )


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
