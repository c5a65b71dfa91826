"""Makes the tasks of all cells: traced functions, which equal cells share.

Python runs the layers of each cell. What follows is made once for all cells of
equal graphs, see `graphs/alike.py`:

    cell 0 --trace--> graph --+
    cell 1 --trace--> graph --+--differentiate--> cut --> functions
    cell 2 --trace--> graph ------differentiate--> cut --> functions
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.boundary import Boundary, CellArguments, structure_of
from tfgpipe.cells.cell import Cell
from tfgpipe.cells.function import CellFunction
from tfgpipe.cells.side_effects import check_captured, check_operations
from tfgpipe.cells.tasks import CellTasks
from tfgpipe.devices import names
from tfgpipe.graphs import (
    Backward,
    CellGraph,
    Origin,
    Traced,
    add_backward,
    graph_key,
    trace,
    without_backward,
)


class Tracer:
    """Traces, differentiates and cuts cells; equal ones once.

    XLA (`jit_compile`) draws other random numbers from a seed than TensorFlow
    does, so it compiles all functions or none. `gradient_dtype` is that in
    which the gradients of weights are summed; None for that of each weight.

    Attributes:
        can_recompute: Whether cells are recomputed by tasks of their own.
    """

    def __init__(self, jit_compile: bool, gradient_dtype: str | None = None):
        self._jit_compile = jit_compile
        self.can_recompute = not jit_compile
        self._gradient_dtype = gradient_dtype
        self._known: dict[Any, Any] = {}
        self._used: set[Traced] = set()  # those with a backward pass

    def led(self, x: Any) -> Any:
        """The mini-batch, after what shortens TensorFlow's first step."""
        if self._jit_compile:
            return x
        with tf.control_dependencies([internals.analysis_stopper()]):
            return tf.nest.map_structure(
                lambda t: None if t is None else tf.identity(t), x
            )

    def trace(
        self,
        functions: Sequence[CellFunction],
        x: Any,
        specs: Sequence[CellArguments],
        of_rows: Callable[[Any], tf.TensorSpec],
    ) -> list[Traced]:
        """Traces cells that follow each other.

        `x` are the inputs of the first; `specs` what each cell takes, but the
        inputs of the first alone. `of_rows` makes the spec of what has a row
        for each of the batch's.
        """
        made: list[Traced] = []
        structure = structure_of(x)
        inputs = specs[0].inputs
        before = _EarlierCells()
        for function, own in zip(functions, specs):
            own = own._replace(
                inputs=inputs, assigned=before.assigned_to(function)
            )
            origin = Origin(
                function,
                own,
                structure,
                before.moved_of(function),
                self._jit_compile,
                self._gradient_dtype,
                made[-1].op_seed if made else 0,
            )
            traced = trace(origin)
            _check(function, traced)
            before.add(function, traced)
            made.append(traced)
            structure = traced.findings.output_structure
            outputs = Boundary(traced.outputs.tensors, traced.outputs.masks)
            # What this cell returns is what the next one is traced for.
            inputs = tf.nest.map_structure(
                lambda t: None if t is None else of_rows(t), outputs
            )
        return made

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returned when it was called with the key first."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def differentiate(
        self,
        traced: Sequence[Traced],
        differentiates: Sequence[bool],
        has_gradient: Sequence[bool],
        has_losses: Sequence[Sequence[bool]] | None = None,
    ) -> list[Backward]:
        """Adds the backward pass, from the last cell to the first.

        Only to cells that have one, of which `differentiates` tells.
        `has_gradient` says for each output tensor of the last cell whether
        there will be a gradient; `has_losses` for each cell whether there will
        be one of each of its layers' own losses, None for of all.
        """
        made: list[Backward] = []
        # Of what cell k returns, that has a gradient which has one in k + 1.
        for k, cell in reversed(list(enumerate(traced))):
            if differentiates[k]:
                losses = [True] * len(cell.outputs.losses)
                if has_losses is not None:
                    # Those of the head come first, and all have one.
                    losses[cell.findings.num_head_losses :] = has_losses[k]
                one = self._differentiated(cell, has_gradient, losses)
                made.insert(0, one)
                has_gradient = made[0].has_dx
            else:
                made.insert(0, without_backward(cell))
        return made

    def _differentiated(
        self,
        traced: Traced,
        has_gradient: Sequence[bool],
        has_losses: Sequence[bool],
    ) -> Backward:
        """The backward pass of a cell for some gradients of what it returns.

        A graph holds one backward pass: another one begins with a new trace.
        """
        # Its key is that of the forward pass, also if it is asked for again.
        own = self._once(traced, lambda: _key(traced, traced.ends, False))
        key = own, tuple(has_gradient), tuple(has_losses)
        if key not in self._known:
            new = trace(traced.origin) if traced in self._used else traced
            self._used.add(new)
            self._known[key] = add_backward(new, has_gradient, has_losses)
        made: Backward = self._known[key]
        _name_as(traced, made.traced)
        return made

    def tasks(
        self, cells: Sequence[Backward], needs_dx: Sequence[bool]
    ) -> list[CellTasks]:
        """Cuts the tasks of each cell out of its graph."""
        cuts = [self._once(c, functools.partial(self._cut, c)) for c in cells]
        return [CellTasks(cut, needs) for cut, needs in zip(cuts, needs_dx)]

    def _cut(self, cell: Backward) -> CellGraph:
        cut: CellGraph = self._once(
            _key(cell.traced, cell.ends, True),
            functools.partial(CellGraph, cell),
        )
        _name_as(cell.traced, cut.traced)
        return cut


def _key(traced: Traced, ends: Any, has_gradients: bool) -> Any:
    """Equal for cells of which one can stand for the other."""
    return (
        graph_key(traced.graph, ends, has_gradients),
        tuple(names.device_types(traced.origin.function.cell.devices)),
    )


def _name_as(own: Traced, first: Traced) -> None:
    """Notes in whose name the operations of a cell run."""
    cell: Cell = own.origin.function.cell
    cell.traced_as.add(first.origin.function.cell.index)


def _check(function: CellFunction, traced: Traced) -> None:
    """Refuses, or warns of, what the trace shows of a cell's layers."""
    check_captured(function.cell, traced)
    check_operations(
        function.cell,
        traced.operations,
        traced.findings.starts,
        function.recomputes,
    )


class _EarlierCells:
    """What earlier cells have done to variables of a later one."""

    def __init__(self) -> None:
        self._assigned: dict[int, tf.TensorSpec] = {}
        self._moved: set[int] = set()

    def add(self, function: CellFunction, traced: Traced) -> None:
        """Takes in what a traced cell leaves to those behind it."""
        output = traced.outputs
        for variable, value in zip(function.flat_weights, output.weights):
            if value is not None:
                spec = tf.TensorSpec(value.shape, value.dtype)
                self._assigned[id(variable)] = spec
        for layer, moments in zip(function.normalizations, output.moments):
            if moments:
                self._moved |= {id(layer.moving_mean)}
                self._moved |= {id(layer.moving_variance)}

    def assigned_to(self, function: CellFunction) -> list[Any]:
        """Specs of what earlier cells have assigned to a cell's weights."""
        found = [self._assigned.get(id(v)) for v in function.flat_weights]
        return found if any(t is not None for t in found) else []

    def moved_of(self, function: CellFunction) -> frozenset[int]:
        """The moving statistics that the cell must not read any more."""
        return frozenset(self._moved & {id(v) for v in function.state})
