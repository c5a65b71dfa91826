"""A cell's forward pass as one TensorFlow graph.

Three values are made of a cell, each complete from the one before, and none is
changed afterwards:

    trace          Python runs the layers once, in a graph         `Traced`
    differentiate  operations that compute gradients join it       `Backward`
    cut            what crosses from function to function          `Cut`

`task.py` has functions cut out of the last, one for each kind of task.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells.function import CellFunction, Findings
from tfgpipe.cells.sparse import RowDependence, variation
from tfgpipe.cells.values import CellArguments, Output
from tfgpipe.failures import note_source


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a cell is traced from.

    Attributes:
        function: The cell's function.
        specs: `CellArguments` of `tf.TensorSpec`s.
        input_structure: A nest like the inputs.
        moved: ids of the moving statistics that earlier cells have moved.
        varying: ids of the state with which each micro-batch may begin
            otherwise, see `CellFunction.varying`.
        jit_compile: Whether XLA compiles what is cut out of the graph.
        gradient_dtype: In which gradients of weights are summed; None for that
            of each weight.
    """

    function: CellFunction
    specs: CellArguments
    input_structure: Any
    moved: frozenset[int]
    varying: frozenset[int]
    jit_compile: bool
    gradient_dtype: str | None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `tf.function`."""
        if self.jit_compile:
            return {"autograph": False, "jit_compile": True}
        # Inlined, the calls would lose their place in the schedule.
        no_inline = {"_noinline": True}
        return {"autograph": False, "experimental_attributes": no_inline}

    def for_xla(self) -> Any:
        """Inside, loops are differentiated as XLA needs it, if it compiles."""
        if self.jit_compile:
            return internals.in_xla()
        return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """The graph of a cell, or of several equal ones.

    Attributes:
        origin: What it was traced from.
        graph: A `tf.Graph`.
        inputs: The arguments, tensors of the graph.
        outputs: The outputs, tensors of the graph.
        findings: What the layers were seen to do.
        operations: The operations of the graph, in order.
        effects: Those that run for their side effects.
    """

    origin: Origin
    graph: Any
    inputs: CellArguments
    outputs: Output
    findings: Findings
    operations: Sequence[tf.Operation]
    effects: Sequence[tf.Operation]

    @functools.cached_property
    def varies(self) -> RowDependence:
        """Tells which tensors may be others for each micro-batch."""
        state = zip(self.origin.function.state, self.inputs.state)
        same = [t for v, t in state if id(v) not in self.origin.varying]
        same += self.inputs.sources(with_inputs=False)
        return variation(self.graph, same)


def trace(origin: Origin) -> Traced:
    """Runs the layers of a cell once, in a graph."""
    seen: list[Any] = []

    def run(*arguments: Any) -> Any:
        inputs = CellArguments(*arguments)
        outputs, findings = origin.function(
            inputs, origin.input_structure, moved=origin.moved
        )
        seen[:] = inputs, outputs, findings
        return outputs

    traced = tf.function(run, **origin.options)
    graph = traced.get_concrete_function(*origin.specs).graph
    note_source(graph)
    origin.function.cell.check_by_itself(graph)
    inputs, outputs, findings = seen
    return Traced(
        origin,
        graph,
        inputs,
        outputs,
        findings,
        tuple(graph.get_operations()),
        tuple(graph.control_outputs),
    )
