"""A mini-batch: the model traced for it, its tasks, program and results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import (
    Cell,
    CellTasks,
    Head,
    HeadTasks,
    ModelCall,
    cell_of_call,
    counts_of_shards,
    shards_of,
    tasks_of,
    trace_cells,
    unanalysed,
)
from tfgpipe.devices import Replicas, names
from tfgpipe.graphs import (
    Indices,
    TracedModel,
    TraceOptions,
    Values,
    are_distinct,
    by_reference,
    differentiate,
)
from tfgpipe.inputs import MicroBatches
from tfgpipe.internals import Nest
from tfgpipe.schedules import Program, Remat, Schedule, lower
from tfgpipe.state import warn_of_single_values, weighted_mean

# The type of devices that compute what others have no kernel for.
_HOST = "CPU"


class MiniBatch:
    """A mini-batch whose rows are split, and for which the model is traced.

    `source` is the model, and how it is called; `labels` are what the head
    takes, `num_micro_batches` those of each replica. `trial` tries the model if
    there are several micro-batches.

    Attributes:
        cells: The cells.
        remat: Which micro-batches are computed again.
        call: What of the model was run.
        micro_batches: How the rows fall into micro-batches.
        values: By micro-batch, values of tensors of the model's graph: inputs
            and labels before anything runs.
        replicas: Which replica computes which micro-batches.
        device: The last cell's, the first if there are replicas: it computes
            the loss.
    """

    def __init__(
        self,
        cells: list[Cell],
        source: Any,
        x: Nest,
        labels: Nest,
        num_micro_batches: int,
        training: bool,
        head: Head | None,
        remat: Remat,
        options: TraceOptions,
        trial: Any = None,
    ):
        self.cells = cells
        self.device = cells[-1].device
        self.remat = remat
        if not options.jit_compile:
            x = unanalysed(x)
        inputs, label_rows = self._split(x, labels, num_micro_batches)
        is_split = self.micro_batches.count > 1
        self.call = ModelCall(
            source.call,
            source.layers,
            training,
            is_split,
            head,
            cell_of_call(cell.steps for cell in cells),
            lambda layer, k: cells[k].naming(layer),
            len(cells),
            shards=counts_of_shards(cells),
            sent=set().union(*(cell.sent for cell in cells)),
        )
        trace = functools.partial(
            trace_cells,
            cells=cells,
            x=self._specs(inputs[0]),
            labels=self._specs(label_rows[0]),
            recomputes=[
                training and remat.recomputes(k) for k in range(len(cells))
            ],
            options=options,
        )
        is_tried = trial and is_split and (head is not None or not training)
        whole = dataclasses.replace(self.call, shards={})
        tried = trace(whole) if is_tried and self.call.shards else None
        traced = trace(self.call)
        if is_tried:
            count = self.micro_batches.count
            trial.run(whole, tried or traced, cells, x, count, source)
            trial.tell()
        self._lookups_of_rows = trial.lookups_of_rows if trial else set()
        self.traced = traced = self.with_cells(traced)
        if traced.of_rows:
            warn_of_single_values(traced.of_rows, self.micro_batches)
        self.values: list[Values] = [
            by_reference(traced.x, tree.flatten(rows))
            | by_reference(traced.labels, tree.flatten(label))
            for rows, label in zip(inputs, label_rows)
        ]
        # A compiled function shares no memory of what it returns.
        may_drop_outputs = self.has_parts or (
            options.jit_compile
            and training
            and traced.num_head_losses > 0
            and not is_split
        )
        adds_up = head is not None and head.metrics_add_up
        self._hands_out = not (may_drop_outputs and adds_up)

    def _split(
        self, x: Nest, labels: Nest, num_micro_batches: int
    ) -> tuple[list[Any], list[Any]]:
        """The rows of micro-batches, and of their labels."""
        cells = self.cells
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
            label_rows = self.micro_batches.split(labels)
        self.replicas = Replicas(grid, self.micro_batches.count)
        return inputs, label_rows

    def _specs(self, nest: Nest) -> Any:
        return tree.map_structure(
            lambda t: None if t is None else self.spec(t), nest
        )

    def spec(self, tensor: tf.Tensor) -> tf.TensorSpec:
        """Returns what the model's graph takes for a micro-batch."""
        spec = self.micro_batches.spec(tensor)
        if self.cells[-1].head_parts > 1 and spec.shape.rank:
            shape = [None, *spec.shape[1:]]  # parts have fewer rows
            spec = tf.TensorSpec(shape, tensor.dtype)
        return spec

    @property
    def has_parts(self) -> bool:
        """Is true if rows go through the head in parts."""
        return self.cells[-1].head_parts > 1 and self.traced.num_head_losses > 0

    def with_cells(self, traced: TracedModel) -> TracedModel:
        """The model as it was traced; a subclass gives it other cells."""
        return traced

    @property
    def is_training(self) -> bool:
        """Is true if there is a backward pass."""
        return self.call.training and bool(self.traced.trained_uses)

    def tasks(
        self,
        has_gradient: Sequence[bool] | None = None,
        has_losses: Sequence[bool] = (),
    ) -> list[CellTasks]:
        """Cuts the tasks of each cell out of the graph.

        Args:
            has_gradient: For each output tensor, whether there will be a
                gradient. None: there is no backward pass.
            has_losses: For each of the layers' own losses, whether there will
                be one.
        """
        made = self.traced
        if has_gradient is not None:
            of_head = [True] * self.traced.num_head_losses
            made = differentiate(made, has_gradient, [*of_head, *has_losses])
        ways = [
            (self.remat.share(k), self.remat.offloads(k))
            for k in range(len(self.cells))
        ]
        indices = self._indices(made)
        tasks = tasks_of(made, self.cells, indices, ways)
        if self.has_parts:
            tasks[-1] = HeadTasks(
                tasks[-1].part,
                tasks[-1].functions,
                self.cells[-1].head_parts,
                {id(v) for v in self.call.metric_state},
            )
        # Metrics that may be computed on another device are a function apart.
        elif (
            self.call.head
            and not self.traced.options.jit_compile
            and _HOST not in names.device_types(self.cells[-1].devices)
        ):
            tasks[-1] = CellTasks(
                tasks[-1].part,
                tasks[-1].functions,
                {id(v) for v in self.call.head.metric_state},
            )
        if not self._hands_out:
            tasks[-1].hide(self.traced.handed_out)
        return tasks

    def _indices(self, made: TracedModel) -> list[list[Indices]]:
        """Returns how indices differ, for each use of a weight, and lookup."""
        varies = self.traced.varying()
        places = {
            op.inputs[1].ref(): place
            for place, _, op in self.traced.all_lookups()
        }

        def kind_of(indices: tf.Tensor) -> Indices:
            if varies(indices):
                is_distinct = are_distinct(indices)
                return Indices.DISTINCT if is_distinct else Indices.OF_ROWS
            while indices.ref() not in places and indices.op.inputs:
                indices = indices.op.inputs[0]  # they may be in another shape
            is_of_rows = places.get(indices.ref()) in self._lookups_of_rows
            return Indices.OF_ROWS if is_of_rows else Indices.REPEATED

        return [
            [kind_of(part.indices) for part in d.slices.values()]
            for d in made.dw
        ]

    def program(
        self,
        tasks: Sequence[CellTasks],
        schedule_of: Callable[[int], Schedule],
    ) -> Program:
        """Says what runs, on which device and in which order.

        Args:
            tasks: What runs the tasks of each cell.
            schedule_of: Returns the schedule for a number of micro-batches:
                of a replica.
        """
        trained = self.trained(tasks)
        facts = [
            cell_tasks.facts(k in trained, cell.before in trained)
            for k, (cell_tasks, cell) in enumerate(
                zip(tasks, self.cells, strict=True)
            )
        ]
        # Whatever the loss is that no head computes, it keeps the outputs.
        if self.call.head is None:
            # A compiled backward function computes again what it needs.
            recomputes = not self.traced.options.jit_compile
            facts[-1] = facts[-1]._replace(recomputes=recomputes)
        counts = self.replicas.counts
        for k, shard in shards_of(self.cells, schedule_of(max(counts))).items():
            facts[k] = facts[k]._replace(shard=shard)
        program = lower(schedule_of, facts, self.remat, counts)
        for k in {op.cell for op in program.ops if op.keeps}:
            tasks[k].functions.check_kept()
        return program

    def trained(self, tasks: Sequence[CellTasks]) -> list[int]:
        """The cells that have trained weights, and those behind them."""
        if not any(one.part.backward for one in tasks):
            return []
        first = next(
            k
            for k, one in enumerate(tasks)
            if any(use.is_trained for use in one.part.uses)
        )
        return [*range(first, len(tasks))]

    # ---------------------------------------------------------------- results
    def add(self, m: int, made: Values) -> None:
        """Takes what a cell made of a micro-batch."""
        self.values[m].update(made)
        if self.micro_batches.count > 1:
            for output in self.traced.outputs:
                if output is not None and output.ref() in made:
                    self.micro_batches.check_output(made[output.ref()], m)

    @property
    def is_complete(self) -> bool:
        """Is true if all forward tasks have run."""
        wanted = {t.ref() for t in self.traced.results}
        if not self._hands_out:
            wanted -= {t.ref() for t in self.traced.handed_out if t is not None}
        return all(wanted <= known.keys() for known in self.values)

    def values_of(
        self, tensors: Sequence[tf.Tensor | None]
    ) -> list[list[tf.Tensor | None]]:
        """Returns the values of some tensors, of each micro-batch."""
        return [
            [None if t is None else known[t.ref()] for t in tensors]
            for known in self.values
        ]

    @property
    def _added_losses(self) -> Sequence[tf.Tensor]:
        return self.traced.losses[self.traced.num_head_losses :]

    def extra_losses(self) -> list[tf.Tensor]:
        """Returns the layers' own losses for the mini-batch."""
        losses = []
        for values in zip(*self.values_of(self._added_losses)):
            with tf.device(values[0].device):
                losses.append(weighted_mean([*values], self.micro_batches))
        return losses

    def extra_specs(self) -> list[tf.TensorSpec]:
        """Returns shapes and dtypes of the layers' own losses."""
        return [tf.TensorSpec(t.shape, t.dtype) for t in self._added_losses]

    def specs(self) -> list[tf.TensorSpec | None]:
        """Returns shapes and dtypes of what is handed out."""
        rows = self.micro_batches.num_rows
        known = [rows if isinstance(rows, int) else None]

        def spec(tensor: tf.Tensor | None) -> tf.TensorSpec | None:
            if tensor is None:
                return None
            shape = tensor.shape
            if self.micro_batches.count > 1:
                shape = tf.TensorShape(known).concatenate(shape[1:])
            return tf.TensorSpec(shape, tensor.dtype)

        return [spec(t) for t in self.traced.handed_out]

    def joined(self) -> list[tf.Tensor | None]:
        """Joins what is handed out, flat, on one device."""
        with tf.device(self.device):
            parts = self.values_of(self.traced.handed_out)
            joined: list[tf.Tensor | None] = self.micro_batches.join(parts)
            return joined

    def nest(self, handed_out: Sequence[tf.Tensor | None]) -> Nest:
        """Returns outputs, with what hangs on them, as the model does.

        What was one tensor is one again.
        """
        traced = self.traced
        made = [None if t is None else tf.identity(t) for t in handed_out]
        attached = iter(made[len(traced.outputs) :])
        outputs = []
        for tensor, hung_by in zip(made, traced.attached):
            hung = {name: next(attached) for name in hung_by}
            outputs.append(internals.attach(tensor, hung))
        return tree.map_structure(lambda i: outputs[i], traced.structure)

    def joined_outputs(self) -> Nest:
        """Returns the mini-batch's outputs, on one device."""
        with tf.device(self.device):
            return self.nest(self.joined())
