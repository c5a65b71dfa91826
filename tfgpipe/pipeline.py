"""Runs a mini-batch through the cells: tasks to tensors.

The tasks of a schedule become operations of one TensorFlow graph, in an order
in which nothing comes too early. A control dependency from each task to the
next one on its device keeps the schedule's order there; between devices only
data does, and TensorFlow runs the devices at the same time.

For K cells and M micro-batches the graph has 2 K M function calls. A device
holds the inputs of its cell for the micro-batches between their forward and
backward task, one micro-batch's activations, and one sum of its gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from keras import tree

from tfgpipe import gradients, internals, placement, state
from tfgpipe.cell import Boundary, Cell, Output, structure_of
from tfgpipe.cell_function import CellFunctions
from tfgpipe.micro_batch import MicroBatches
from tfgpipe.schedule import Task, in_order
from tfgpipe.state_flow import StateFlow

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
        remat: Which micro-batches the backward pass computes again.
        trace: See `trace.Tracer`.
    """

    def __init__(
        self,
        cells: list[Cell],
        x: Any,
        labels: Any,
        num_micro_batches: int,
        training: bool,
        head: Any,
        remat: str,
        trace: Callable,
    ):
        self.cells = cells
        with tf.device(cells[0].device):
            self.micro_batches = MicroBatches(x, num_micro_batches)
            inputs = self.micro_batches.split(x)
        with tf.device(cells[-1].device):
            self._labels = self.micro_batches.split(labels)
        self._remat = remat
        self.functions = [
            CellFunctions(
                cell,
                training,
                self.micro_batches,
                head if cell is cells[-1] else None,
                trace,
                recomputes=training and remat != "never",
            )
            for cell in cells
        ]
        self.functions[0].input_structure = structure_of(x)
        self._boundaries = {
            (0, m): Boundary.of(nest) for m, nest in enumerate(inputs)
        }
        has_weights = [any(f.weights) for f in self.functions]
        self._differentiates = [
            training and any(has_weights[: k + 1]) for k in range(len(cells))
        ]
        self._last_op: list[Any] = [None] * len(cells)
        self._read()
        self.outputs: dict[tuple[int, int], Output] = {}
        self._tapes: dict[tuple[int, int], Any] = {}
        self._dy: dict[tuple[int, int], list[Any]] = {}
        self._sums: list[list[Any]] = [[] for _ in cells]

    def _read(self) -> None:
        """Reads all variables, once for the mini-batch."""
        self._weights = []
        for function in self.functions:
            with tf.device(function.device):
                self._weights.append(
                    tree.map_structure(
                        placement.read_variable, function.weights
                    )
                )
        self.state = StateFlow(self.functions, self.micro_batches)

    # ------------------------------------------------------------- the tasks
    def run(
        self,
        tasks: list[list[Task]],
        seeds: Callable[[Pipeline], Seeds] | None = None,
    ) -> None:
        """Runs all tasks of a schedule.

        Args:
            tasks: The ordered tasks of each device.
            seeds: Computes the loss. Called before the first backward task,
                when the forward tasks of the last cell are done.
        """
        started: Seeds | None = None
        for task in in_order(tasks):
            kind, k, m = task
            if kind == "forward":
                self._run_forward(k, m)
            elif self._differentiates[k]:
                if started is None and seeds is not None:
                    started = seeds(self)
                if started is not None:
                    self._run_backward(k, m, started)

    @contextlib.contextmanager
    def _on_device(self, k: int) -> Iterator[None]:
        """Inside, operations run on the cell's device, after its last task.

        Cells are not optimised as graphs: the optimiser regroups sums, which
        rounds differently where another layer follows in the same cell.
        """
        before = self._last_op[k]
        with (
            tf.device(self.cells[k].device),
            tf.control_dependencies([] if before is None else [before]),
            internals.unoptimized_calls(),
        ):
            yield

    def _finish(self, k: int, results: Any) -> None:
        """Remembers a task's operation for the device's next task."""
        if tf.executing_eagerly():
            return
        op = next(t for t in tf.nest.flatten(results) if t is not None).op
        if op.type == "StatefulPartitionedCall":
            internals.run_independently(op)
        self._last_op[k] = op

    def _run_forward(self, k: int, m: int) -> None:
        function = self.functions[k]
        with self._on_device(k):
            arguments = self._arguments(k, m)
            if self._keeps_activations(k, m):
                inputs, weights, _, _ = arguments
                with function.tape(inputs, weights, self._needs_dx(k)) as tape:
                    output = function.forward(*arguments)
                self._tapes[k, m] = tape, output
            else:
                output = function.forward(*arguments)
            self._finish(k, output)
            self.state.after(k, m, output)
        self.outputs[k, m] = output
        if k + 1 < len(self.cells):
            self.functions[k + 1].input_structure = function.output_structure
            self._boundaries[k + 1, m] = Boundary(output.tensors, output.masks)

    def _arguments(self, k: int, m: int) -> tuple[Any, ...]:
        labels = self._labels[m] if k == len(self.cells) - 1 else None
        return (
            self._boundaries[k, m],
            self._weights[k],
            self.state.before(k, m),
            labels,
        )

    def _keeps_activations(self, k: int, m: int) -> bool:
        if not self._differentiates[k]:
            return False
        is_last = m == self.micro_batches.count - 1
        return self._remat == "never" or (
            self._remat == "except_last" and is_last
        )

    def _needs_dx(self, k: int) -> bool:
        return k > 0 and self._differentiates[k - 1]

    def _run_backward(self, k: int, m: int, seeds: Seeds) -> None:
        function = self.functions[k]
        if k == len(self.cells) - 1:
            dy, head = seeds.outputs[m], seeds.head
        else:
            dy, head = self._dy.pop((k + 1, m)), []
        with self._on_device(k):
            arguments = self._arguments(k, m)
            dlosses = [
                self.micro_batches.select(m, d, tf.zeros_like(d)) for d in head
            ] + [
                d * self.micro_batches.fraction(m, d.dtype)
                for d in seeds.extra[k]
            ]
            if all(d is None for d in dy) and not dlosses:
                dx = [None] * len(arguments[0].tensors)
                dw = [None] * len(tree.flatten(arguments[1]))
            elif (k, m) in self._tapes:
                tape, output = self._tapes.pop((k, m))
                inputs, weights, _, _ = arguments
                dx, dw = function.gradients(
                    tape,
                    inputs,
                    weights,
                    output,
                    dy,
                    dlosses,
                    self._needs_dx(k),
                )
                is_streamed = k == len(self.cells) - 1 and len(head) > 0
                if not is_streamed and _lacks_some(output.tensors, dy):
                    dx, dw = function.only_connected(
                        (dx, dw), *arguments, dy, dlosses, self._needs_dx(k)
                    )
            else:
                dx, dw = function.backward(
                    *arguments, dy, dlosses, self._needs_dx(k)
                )
        self._dy[k, m] = dx
        if any(d is not None for d in [*dx, *dw]):
            self._finish(k, [*dx, *dw])
        with self._on_device(k):
            # The control dependency keeps TensorFlow from turning the chain
            # of sums into one, which would hold all micro-batches' gradients.
            self._sums[k] = gradients.add(self._sums[k], dw, m)
        del self._boundaries[k, m]

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
            start = function.num_head_losses
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

    def head_results(self) -> tuple[list[Any], list[Any]]:
        """The head's sums and counts of each micro-batch."""
        last = len(self.cells) - 1
        num = self.functions[last].num_head_losses
        outputs = [
            self.outputs[last, m] for m in range(self.micro_batches.count)
        ]
        return [o.losses[:num] for o in outputs], [o.counts for o in outputs]

    def joined_outputs(self) -> Any:
        """The mini-batch's outputs, with their masks, on the last device."""
        last = len(self.cells) - 1
        outputs = [
            self.outputs[last, m] for m in range(self.micro_batches.count)
        ]
        with tf.device(self.cells[last].device):
            tensors = self.micro_batches.join([o.tensors for o in outputs])
            masks = self.micro_batches.join([o.masks for o in outputs])
        return Boundary(tensors, masks).nest(
            self.functions[last].output_structure
        )


def _lacks_some(tensors: list[Any], found: list[Any]) -> bool:
    """Whether any float tensor has no gradient."""
    return any(
        t is not None and t.dtype.is_floating and d is None
        for t, d in zip(tensors, found)
    )
