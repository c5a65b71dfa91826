"""Makes the tasks of all cells: traced functions, which equal cells share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals, placement
from tfgpipe.added_losses import check_added_losses
from tfgpipe.cell_function import CellFunction
from tfgpipe.cell_tasks import CellTasks
from tfgpipe.cell_values import Arguments, Boundary, Output, structure_of
from tfgpipe.eager_cell import EagerCell
from tfgpipe.likeness import likeness
from tfgpipe.micro_batch import MicroBatches
from tfgpipe.stateful_ops import check_operations
from tfgpipe.traced_cell import TracedCell


class Tracer:
    """Makes what runs the tasks of each cell.

    Args:
        eagerly: Whether Python runs the tasks, for debugging.
        jit_compile: Whether XLA compiles each function. It draws other random
            numbers from a seed than TensorFlow does, so it is all or none.
        gradient_dtype: In which the gradients of weights are summed; None for
            that of each weight.
    """

    def __init__(
        self,
        eagerly: bool,
        jit_compile: bool,
        gradient_dtype: str | None = None,
    ):
        self._eagerly = eagerly
        self._jit_compile = jit_compile
        self._gradient_dtype = gradient_dtype
        self._known: dict[Any, TracedCell] = {}

    def led(self, x: Any) -> Any:
        """The mini-batch, after what shortens TensorFlow's first step."""
        if self._eagerly or self._jit_compile:
            return x
        with tf.control_dependencies([internals.analysis_stopper()]):
            return tf.nest.map_structure(
                lambda t: None if t is None else tf.identity(t), x
            )

    def cells(
        self,
        functions: Sequence[CellFunction],
        x: Any,
        arguments: Sequence[Arguments],
        needs_dx: Sequence[bool],
        micro_batches: MicroBatches,
    ) -> list[Any]:
        """Traces cells that follow each other.

        Args:
            functions: The cells' functions.
            x: The inputs of the first.
            arguments: A micro-batch's arguments of each cell; the inputs are
                only looked at for the first.
            needs_dx: Whether the gradients of each cell's inputs are wanted.
            micro_batches: Of whose shapes the traces are.

        Returns:
            `CellTasks` or `EagerCell`s.
        """
        made: list[Any] = []
        structure = structure_of(x)
        if self._eagerly:
            for function, needs in zip(functions, needs_dx):
                made.append(
                    EagerCell(
                        function,
                        made[-1:],
                        structure,
                        needs,
                        self._gradient_dtype,
                    )
                )
            return made
        boundary = arguments[0].inputs
        before = _Before()
        for function, values, needs in zip(functions, arguments, needs_dx):
            function.moved = before.moved_of(function)
            values = values._replace(
                inputs=boundary, assigned=before.assigned_to(function)
            )
            specs = values.specs(micro_batches.spec)
            traced = self._traced(function, specs, structure)
            before.add(function, traced.outputs)
            check_operations(
                function.cell,
                traced.operations,
                traced.starts,
                function.recomputes,
            )
            if function.is_split:
                check_added_losses(
                    function.cell.sequence,
                    traced.operations,
                    traced.starts,
                    traced.outputs.losses[traced.num_head_losses :],
                    traced.inputs.inputs.tensors,
                )
            function.draws = traced.draws
            made.append(CellTasks(traced, needs))
            structure = traced.output_structure
            boundary = Boundary(traced.outputs.tensors, traced.outputs.masks)
        return made

    def _traced(
        self, function: CellFunction, specs: Arguments, structure: Any
    ) -> TracedCell:
        key = (
            likeness(
                function.cell.sequence,
                [*function.flat_weights, *function.state],
            ),
            tuple(tf.nest.flatten(specs)),
            repr((tf.nest.map_structure(lambda _: 0, specs), structure)),
            id(function.head),
            tuple(id(v) in function.moved for v in function.state),
            tuple(map(id, function.cell.all_borrowed)),
            tuple(placement.device_types(function.cell.devices)),
        )
        if key not in self._known:
            self._known[key] = TracedCell(
                function,
                specs,
                structure,
                self._jit_compile,
                self._gradient_dtype,
            )
        traced = self._known[key]
        function.cell.traced_as.add(traced.cell.index)
        return traced

    def differentiate(
        self, tasks: CellTasks, has_gradient: Sequence[bool]
    ) -> list[bool]:
        """Adds the backward pass to a cell.

        Args:
            tasks: Of the cell.
            has_gradient: For each of its output tensors, whether there will
                be a gradient.

        Returns:
            The same for each input tensor.
        """
        traced = tasks.traced
        if not traced.is_differentiated_for(has_gradient):
            key = (traced, tuple(has_gradient))
            if key not in self._known:
                self._known[key] = traced.again()
            tasks.traced = traced = self._known[key]
        return traced.differentiate(has_gradient)


class _Before:
    """What earlier cells have done to variables of a later one."""

    def __init__(self) -> None:
        self._assigned: dict[int, tf.Tensor] = {}
        self._moved: set[int] = set()

    def add(self, function: CellFunction, output: Output) -> None:
        """Takes the outputs of a cell's trace."""
        for variable, value in zip(function.flat_weights, output.weights):
            if value is not None:
                self._assigned[id(variable)] = value
        for layer, moments in zip(function.normalizations, output.moments):
            if moments:
                self._moved |= {id(layer.moving_mean)}
                self._moved |= {id(layer.moving_variance)}

    def assigned_to(self, function: CellFunction) -> list[Any]:
        """See `Arguments.assigned`."""
        found = [self._assigned.get(id(v)) for v in function.flat_weights]
        return found if any(t is not None for t in found) else []

    def moved_of(self, function: CellFunction) -> frozenset[int]:
        """The moving statistics that the cell must not read any more."""
        return frozenset(self._moved & {id(v) for v in function.state})
