"""Runs a mini-batch through the cells: tasks to tensors.

The tasks of a schedule become operations of one TensorFlow graph, in an order
in which nothing comes too early. A control dependency from each task to the
next one on its device keeps the schedule's order there; between devices only
data does, and TensorFlow runs the devices at the same time.

A task is one function call: for K cells and M micro-batches the graph has 2 K M
of them, and K (M - 1) more with re-materialisation. A device holds the inputs
of its cells for the micro-batches between their forward and backward task, one
micro-batch's activations, and one sum of gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from keras import tree

from tfgpipe import gradients, internals, placement, state
from tfgpipe.cell import Boundary, Cell, Output
from tfgpipe.cell_function import Arguments, CellFunction
from tfgpipe.micro_batch import MicroBatches
from tfgpipe.schedule import Schedule
from tfgpipe.state_flow import StateFlow
from tfgpipe.tasks import KINDS, Task
from tfgpipe.trace import Tracer

REMAT = ("except_last", "always", "never")


class Seeds(NamedTuple):
    """Where the backward pass starts: gradients of the loss.

    Attributes:
        outputs: For each micro-batch, by the last cell's flat outputs.
        head: By the head's losses, the same for every micro-batch.
        extra: For each cell, by each of its layers' own losses.
    """

    outputs: list[list[Any]]
    head: list[tf.Tensor]
    extra: list[list[tf.Tensor]]


class Pipeline:
    """One mini-batch on its way through the cells.

    Args:
        cells: The cells, in order.
        x: The mini-batch, a nest of tensors of shape (batch, ...).
        labels: A nest of the same rows that the head takes, or None.
        num_micro_batches: M.
        training: The `training` argument of the layers.
        head: Loss and metrics of a micro-batch, or None.
        remat: For each cell, which micro-batches its backward pass computes
            again.
        tracer: Makes the cells' functions.
        clock: Notes when each task runs, see `timeline.Clock`, or None.
    """

    def __init__(
        self,
        cells: list[Cell],
        x: Any,
        labels: Any,
        num_micro_batches: int,
        training: bool,
        head: Any,
        remat: list[str],
        tracer: Tracer,
        clock: Any = None,
    ):
        self.cells = cells
        x = tracer.led(x)
        with tf.device(cells[0].device):
            self.micro_batches = MicroBatches(x, num_micro_batches)
            inputs = self.micro_batches.split(x)
        with tf.device(cells[-1].device):
            self._labels = self.micro_batches.split(labels)
        self._remat = remat
        self.functions = [
            CellFunction(
                cell,
                training,
                head if cell is cells[-1] else None,
                recomputes=training and remat[k] != "never",
            )
            for k, cell in enumerate(cells)
        ]
        self._boundaries = {
            (0, m): Boundary.of(nest) for m, nest in enumerate(inputs)
        }
        has_weights = [any(f.weights) for f in self.functions]
        self._differentiates = [
            training and any(has_weights[: k + 1]) for k in range(len(cells))
        ]
        self.state = StateFlow(self.functions, self.micro_batches)
        self._weights = self._read_weights()
        self._tracer = tracer
        self._clock = clock
        self.is_training = False
        self.tasks = tracer.cells(
            self.functions,
            x,
            [self._first_arguments(k) for k in range(len(cells))],
            [k > 0 and self._differentiates[k - 1] for k in range(len(cells))],
            self.micro_batches,
        )
        self.outputs: dict[tuple[int, int], Output] = {}
        self.last_op: dict[str, Any] = {}
        self._kept: dict[tuple[int, int], Any] = {}
        self._dy: dict[tuple[int, int], list[Any]] = {}
        self._sums: list[list[Any]] = [[] for _ in cells]

    def _read_weights(self) -> list[list[list[tf.Tensor]]]:
        """Reads all trainable variables, once for the mini-batch."""
        weights = []
        for function in self.functions:
            with tf.device(function.device):
                weights.append(
                    tree.map_structure(
                        placement.read_variable, function.weights
                    )
                )
        return weights

    def _labels_of(self, k: int, m: int) -> Any:
        return self._labels[m] if k == len(self.cells) - 1 else None

    def _first_arguments(self, k: int) -> Arguments:
        return Arguments(
            inputs=self._boundaries[0, 0],
            weights=self._weights[k],
            state=self.state.initial[k],
            labels=self._labels_of(k, 0),
        )

    # ------------------------------------------------------------- the tasks
    def run(self, schedule: Schedule, objective: Any = None) -> None:
        """Runs all tasks of a schedule.

        Args:
            schedule: The schedule, for as many micro-batches as there are.
            objective: Says where the backward pass starts, see
                `objective.Objective`; None for the forward pass alone.
        """
        self.is_training = objective is not None and any(self._differentiates)
        if self.is_training:
            objective.check(schedule)
            self._differentiate(objective)
            schedule = schedule.with_recompute(
                lambda k, m: self._keeps(k, m, schedule)
            )
        self._cast_weights()
        tasks = schedule.order()
        if not self.is_training:
            tasks = [task for task in tasks if task.kind == "forward"]
        if tf.executing_eagerly():
            tasks = _fill_drain(tasks)
        seeds: Seeds | None = None
        for kind, k, m in tasks:
            if kind == "forward":
                keeps = self._differentiates[k] and self._keeps(k, m, schedule)
                self._run_forward(k, m, self.is_training and keeps)
            elif self._differentiates[k]:
                if seeds is None:
                    seeds = objective.start(self)
                if kind == "recompute":
                    self._run_recompute(k, m)
                else:
                    self._run_backward(kind, k, m, seeds)

    def _differentiate(self, objective: Any) -> None:
        """Adds the backward pass to the cells, from the last to the first."""
        if tf.executing_eagerly():
            return
        has_gradient = objective.has_gradient(self)
        for k in reversed(range(len(self.cells))):
            if self._differentiates[k]:
                has_gradient = self._tracer.differentiate(
                    self.tasks[k], has_gradient
                )

    def _cast_weights(self) -> None:
        """Casts weights where a cell would do so for every micro-batch."""
        for k, cell in enumerate(self.tasks):
            weights = self._weights[k]
            with tf.device(self.cells[k].device):
                self._weights[k] = tf.nest.pack_sequence_as(
                    weights, cell.cast_weights(tf.nest.flatten(weights))
                )

    def _keeps(self, k: int, m: int, schedule: Schedule) -> bool:
        """Whether a forward task keeps what the backward pass needs."""
        if self._remat[k] == "except_last":
            return m == schedule.first_backward(k)
        return self._remat[k] == "never"

    @contextlib.contextmanager
    def _on_device(self, k: int, awaited: list[Any]) -> Iterator[None]:
        """Inside, operations run on the cell's device, after its last task.

        Args:
            k: Index of the cell.
            awaited: What the task gets from other devices.
        """
        device = self.cells[k].device
        before = self.last_op.get(device)
        ready = [] if before is None else [before]
        if self._clock is not None:
            ready = [self._clock.start(device, ready, awaited)]
        with tf.device(device), tf.control_dependencies(ready):
            yield

    def _finish(self, task: Task, results: Any) -> None:
        """Remembers a task's operation for the device's next task."""
        if tf.executing_eagerly():
            return
        found = tf.nest.flatten(results, expand_composites=True)
        tensors = [t for t in found if t is not None]
        if not tensors:
            return
        op = tensors[0].op
        if op.type == "StatefulPartitionedCall":
            internals.run_independently(op)
        device = self.cells[task.cell].device
        if self._clock is not None:
            op = self._clock.stop(task, device, op)
        self.last_op[device] = op

    def _arguments(self, k: int, m: int) -> Arguments:
        return Arguments(
            inputs=self._boundaries[k, m],
            weights=self._weights[k],
            state=self.state.before(k, m),
            labels=self._labels_of(k, m),
        )

    def _run_forward(self, k: int, m: int, keeps: bool) -> None:
        with self._on_device(k, self._boundaries[k, m].tensors):
            output, kept = self.tasks[k].forward(self._arguments(k, m), keeps)
            self._finish(Task("forward", k, m), output)
            self.state.after(k, m, output)
        self.outputs[k, m] = output
        if keeps:
            self._kept[k, m] = kept
        if k + 1 < len(self.cells):
            self._boundaries[k + 1, m] = Boundary(output.tensors, output.masks)

    def _run_recompute(self, k: int, m: int) -> None:
        with self._on_device(k, []):
            kept = self.tasks[k].recompute(self._arguments(k, m))
            self._finish(Task("recompute", k, m), kept)
        self._kept[k, m] = kept

    def _gradients_of_outputs(
        self, k: int, m: int, seeds: Seeds
    ) -> tuple[list[Any], list[Any]]:
        """The gradients of a cell's output tensors, and of its losses."""
        if k == len(self.cells) - 1:
            dy, head = seeds.outputs[m], seeds.head
        else:
            dy, head = self._dy[k + 1, m], []
        select, fraction = (
            self.micro_batches.select,
            self.micro_batches.fraction,
        )
        with tf.device(self.cells[k].device):
            dlosses = [select(m, d, tf.zeros_like(d)) for d in head]
            dlosses += [d * fraction(m, d.dtype) for d in seeds.extra[k]]
        return dy, dlosses

    def _run_backward(self, kind: str, k: int, m: int, seeds: Seeds) -> None:
        """Runs a backward task, or one of its halves."""
        cell = self.tasks[k]
        is_last = kind != "input_gradient"
        if kind != "backward" and not cell.is_split:
            if is_last:  # the first half did it all
                return
            kind, is_last = "backward", True
        dx, sums = self._dy.get((k, m), []), self._sums[k]
        dy, dlosses = self._gradients_of_outputs(k, m, seeds)
        with self._on_device(k, [*dy, *dlosses]):
            values = self._arguments(k, m), self._kept[k, m], dy, dlosses
            if kind == "backward":
                dx, sums = cell.backward(*values, sums, m)
            elif kind == "input_gradient":
                dx, more = cell.input_gradient(*values)
                self._kept[k, m] += more
            else:
                sums = cell.weight_gradient(*values, sums, m)
            results = sums if kind == "weight_gradient" else [dx, sums]
            self._finish(Task(kind, k, m), results)
        self._dy[k, m], self._sums[k] = dx, sums
        if is_last:
            del self._kept[k, m], self._boundaries[k, m]

    # ------------------------------------------------------------ the results
    def gradients(self) -> dict[int, Any]:
        """The gradient of every trainable variable, by its id.

        A variable that several layers share gets the sum of its uses', on its
        own device, in the order of the layers.
        """
        uses: dict[int, tuple[Any, list[Any]]] = {}
        for k, function in enumerate(self.functions):
            if not self._differentiates[k]:
                continue
            with tf.device(function.device):
                sums = [gradients.joined(s) for s in self._sums[k]]
            variables = [v for layer in function.weights for v in layer]
            for variable, total in zip(variables, sums):
                entry = uses.setdefault(id(variable), (variable, []))
                if total is not None:
                    entry[1].append(total)
        found = {}
        for key, (variable, totals) in uses.items():
            with tf.device(variable.value.device):
                found[key] = gradients.add_uses(totals)
        return found

    def extra_losses(self) -> list[list[tf.Tensor]]:
        """For each cell, its layers' own losses for the mini-batch."""
        losses = []
        for k, function in enumerate(self.functions):
            start = self.tasks[k].num_head_losses
            per_micro_batch = [
                self.outputs[k, m].losses[start:]
                for m in range(self.micro_batches.count)
            ]
            with tf.device(function.device):
                losses.append(
                    [
                        state.weighted_mean(list(values), self.micro_batches)
                        for values in zip(*per_micro_batch)
                    ]
                )
        return losses

    @property
    def is_forward_done(self) -> bool:
        """Whether the last cell has run all its forward tasks."""
        last = len(self.cells) - 1
        return all(
            (last, m) in self.outputs for m in range(self.micro_batches.count)
        )

    def head_sums(self) -> list[list[Any]]:
        """The head's losses of each micro-batch, to be added up."""
        last = len(self.cells) - 1
        num = self.tasks[last].num_head_losses
        return [
            self.outputs[last, m].losses[:num]
            for m in range(self.micro_batches.count)
        ]

    def head_counts(self) -> list[list[Any]]:
        """What each micro-batch's losses count; maybe ahead of them.

        Numbers of rows, masks and weights rarely depend on what the layers
        compute, so they can be known before the first backward task. Where
        they do, this computes what they depend on twice.
        """
        if not self.is_forward_done:
            return self._counts_ahead()
        last = len(self.cells) - 1
        return [
            self.outputs[last, m].counts
            for m in range(self.micro_batches.count)
        ]

    def _counts_ahead(self) -> list[list[Any]]:
        """Computes the counts, and of the cells only what they need."""
        parts: list[Any] = []
        wanted = list(self.tasks[-1].outputs.counts)
        for k in reversed(range(len(self.cells))):
            part = self.tasks[k].slice(wanted)
            taken = {t.ref() for t in part.inputs}
            inputs = tf.nest.flatten(self.tasks[k].traced.inputs.inputs)
            places = [
                i
                for i, t in enumerate(inputs)
                if t is not None and t.ref() in taken
            ]
            parts.insert(0, (part, places))
            if k > 0:
                outputs = self.tasks[k - 1].outputs
                flat = [*outputs.tensors, *outputs.masks]
                wanted = [flat[i] for i in places]
        counts = []
        for m in range(self.micro_batches.count):
            found = tf.nest.flatten(self._boundaries[0, m])
            found = [found[i] for i in parts[0][1]]
            for k, (part, places) in enumerate(parts):
                inputs = self.tasks[k].traced.inputs.inputs
                flat = [None] * len(tf.nest.flatten(inputs))
                for i, value in zip(places, found):
                    flat[i] = value
                arguments = Arguments(
                    tf.nest.pack_sequence_as(inputs, flat),
                    self._weights[k],
                    self.state.values(k, m),
                    self._labels_of(k, m),
                )
                with tf.device(self.cells[k].device):
                    found = part(self.tasks[k].traced.values(arguments))
            counts.append(found)
        return counts

    def extra_specs(self) -> list[list[tf.TensorSpec]]:
        """Shapes and dtypes of the cells' own losses."""
        specs = []
        for k, cell in enumerate(self.tasks):
            output = self.outputs.get((k, 0)) or cell.outputs
            specs.append(
                [
                    tf.TensorSpec(loss.shape, loss.dtype)
                    for loss in output.losses[cell.num_head_losses :]
                ]
            )
        return specs

    def output_specs(self) -> Boundary:
        """Shapes and dtypes of the whole mini-batch's outputs."""

        def spec(tensor: Any) -> Any:
            if tensor is None:
                return None
            num_rows = self.micro_batches.num_rows
            known = num_rows if isinstance(num_rows, int) else None
            shape = tf.TensorShape([known]).concatenate(tensor.shape[1:])
            return tf.TensorSpec(shape, tensor.dtype)

        outputs = self.tasks[-1].outputs
        return tf.nest.map_structure(
            spec, Boundary(outputs.tensors, outputs.masks)
        )

    def joined_outputs(self) -> Any:
        """The mini-batch's outputs, with their masks, on the last device."""
        last = len(self.cells) - 1
        outputs = [
            self.outputs[last, m] for m in range(self.micro_batches.count)
        ]
        with tf.device(self.cells[last].device):
            tensors = self.micro_batches.join([o.tensors for o in outputs])
            masks = self.micro_batches.join([o.masks for o in outputs])
        return Boundary(tensors, masks).nest(self.tasks[last].output_structure)


def _fill_drain(tasks: list[Task]) -> list[Task]:
    """An order in which cells, run one after the other, know each other."""

    def place(task: Task) -> tuple[Any, ...]:
        kind, k, m = task
        if kind == "forward":
            return 0, m, k
        return 1, -m, -k, KINDS.index(kind)

    return sorted(tasks, key=place)
