"""Makes the tasks of all cells: traced functions, which equal cells share.

Python runs the layers of each cell. What follows is made once for all cells of
equal graphs, see `graphs/same_graph.py`:

    cell 0 --trace--> graph --+
    cell 1 --trace--> graph --+--differentiate--> cut --> functions
    cell 2 --trace--> graph ------differentiate--> cut --> functions

What a trace shows of the layers is checked. TensorFlow runs the stateful
operations of a function one after the other, so a single `tf.print` in a cell
would make the whole pipeline run serially: `run/chain.py` takes the cells out
of that order, and the user is told that effects happen once a micro-batch, in
any order between devices. A random operation is an error: re-materialisation
would draw other numbers than the forward pass, and the gradient would be wrong.

The storage of a model's variables is for nobody to use beside their values.
What a cell reads of a variable, it gets as an argument, and what it assigns, it
returns. Storage that it uses by itself would be that of the last mini-batch,
would be changed once a micro-batch, and would have no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.boundary import Boundary, CellArguments
from tfgpipe.cells.cell import Cell, name_in_words
from tfgpipe.cells.function import CellFunction
from tfgpipe.cells.tasks import CellTasks
from tfgpipe.devices import names
from tfgpipe.graphs import (
    Backward,
    CellGraph,
    Origin,
    Traced,
    add_backward,
    graph_key,
    stateful_kinds,
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
        structure: Any,
        specs: Sequence[CellArguments],
        of_rows: Callable[[Any], tf.TensorSpec],
    ) -> list[Traced]:
        """Traces cells that follow each other.

        `structure` is that of the inputs of the first; `specs` what each cell
        takes, but the inputs of the first alone. `of_rows` makes the spec of
        what has a row for each of the batch's.
        """
        made: list[Traced] = []
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
    _check_captured(function.cell, traced)
    _check_operations(
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


_RANDOM = {
    "AllCandidateSampler",
    "FixedUnigramCandidateSampler",
    "LearnedUnigramCandidateSampler",
    "LogUniformCandidateSampler",
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "RngReadAndSkip",
    "RngSkip",
    "SampleDistortedBoundingBox",
    "SampleDistortedBoundingBoxV2",
    "StatefulRandomBinomial",
    "StatefulStandardNormal",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "StatefulUniformFullInt",
    "StatefulUniformInt",
    "ThreadUnsafeUnigramCandidateSampler",
    "TruncatedNormal",
    "UniformCandidateSampler",
}


def _check_operations(
    cell: Any,
    operations: Sequence[tf.Operation],
    starts: list[int],
    recomputes: bool,
) -> None:
    """Warns of a cell's stateful operations and refuses random ones.

    `starts` says for each layer how many of the operations come before it;
    `recomputes` whether the backward pass computes the cell again.

    Raises:
        ValueError: If the recomputation would draw other random numbers, or
            replicas the same ones.
    """
    for layer, start, end in zip(cell.sequence, starts, starts[1:]):
        found = stateful_kinds(operations[start:end])
        random = sorted(found & _RANDOM)
        has_replicas = len(cell.devices) > 1
        if random and (recomputes or has_replicas):
            why, cure = (
                ("With replicas", "train with one replica")
                if has_replicas
                else ("With `remat`", 'pass `remat="never"`')
            )
            raise ValueError(
                f"{why} a cell must draw its random numbers from Keras seeds, "
                "or the recomputation draws others, so that the gradient is "
                "wrong, and replicas may draw the same. Received: "
                f"{name_in_words(layer)} of cell {cell.number}, which runs "
                f"{', '.join(random)}. Draw with `keras.random` and a "
                "`keras.random.SeedGenerator` attribute of the layer, or "
                f"{cure}."
            )
        if found:
            cell.warn_of(
                layer,
                f"of cell {cell.number} runs {', '.join(sorted(found))}, which "
                "has side effects. They happen once for every micro-batch, and "
                "in no order between devices.",
            )


def _check_captured(cell: Any, traced: Any) -> None:
    """Refuses storage that the graph of a cell captures.

    Branches, loops and functions capture through it.
    """
    places = {op.name: i for i, op in enumerate(traced.operations)}
    for outer, own in traced.graph.captures:
        variable = internals.variable_of(outer)
        if variable is not None:
            users = own.consumers()
            place = min((places[op.name] for op in users), default=0)
            layer = cell.sequence[traced.findings.layer_of(place)]
            kinds = sorted({op.type for op in users})
            raise ValueError(
                "A layer must use a weight of the model by its "
                f"`keras.Variable`. Received: {name_in_words(layer)} of cell "
                f"{cell.number} uses the `tf.Variable` of '{variable.path}' by "
                f"itself, by {', '.join(kinds)}, from which a pipeline gets no "
                "gradient, and no new value at the end of the mini-batch. Keep "
                "the variable, as in `self.k = layer.kernel` instead of "
                "`layer.kernel.value`, and call its `assign`, or functions of "
                "`keras.ops`."
            )
