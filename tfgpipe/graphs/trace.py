"""A cell's forward pass as one TensorFlow graph.

Three values are made of a cell, each complete from the one before, and none is
changed afterwards:

    trace          Python runs the layers once, in a graph         `Traced`
    differentiate  operations that compute gradients join it       `Backward`
    cut            what crosses from function to function          `CellGraph`

`cells/tasks.py` has functions cut out of the last, one for each kind of task.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.boundary import CellArguments, Output
from tfgpipe.failures import note_source
from tfgpipe.graphs.gradient_sums import is_replaced


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a cell is traced from.

    Attributes:
        specs: `CellArguments` of `tf.TensorSpec`s.
        input_structure: A nest like the inputs.
        moved: ids of the moving statistics that earlier cells have moved.
        jit_compile: Whether XLA compiles what is cut out of the graph.
        gradient_dtype: In which gradients of weights are summed; None for that
            of each weight.
        op_seed: What random operations without a seed of their own go on from,
            see `_next_op_seed`.
    """

    function: Any
    specs: CellArguments
    input_structure: Any
    moved: frozenset[int]
    jit_compile: bool
    gradient_dtype: str | None
    op_seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `tf.function` that the graph is made with."""
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
    """The graph of a cell.

    Attributes:
        inputs: The arguments, tensors of the graph.
        outputs: The outputs, tensors of the graph.
        findings: What the layers were seen to do.
        operations: The operations of the graph, in order.
        effects: Those that run for their side effects.
        op_seed: What random operations of the next cell go on from.
    """

    origin: Origin
    graph: Any
    inputs: CellArguments
    outputs: Output
    findings: TraceFindings
    operations: Sequence[tf.Operation]
    effects: Sequence[tf.Operation]
    op_seed: int

    @property
    def ends(self) -> Any:
        """What is known of the graph, a nest: see `graph_key`."""
        function = self.origin.function
        replaced = [is_replaced(v) for v in function.flat_weights]
        tensors = self.inputs, self.outputs
        return (
            *(len(self.operations), function.repeated, replaced),
            *(tensors, self.findings, list(self.effects)),
        )


def trace(origin: Origin) -> Traced:
    """Runs the layers of a cell once, in a graph."""
    seen: list[Any] = []

    def run(*arguments: Any) -> Any:
        # The numbers that operations of earlier cells have taken.
        for _ in range(origin.op_seed):
            _next_op_seed()
        inputs = CellArguments(*arguments)
        outputs, findings = origin.function(
            inputs, origin.input_structure, moved=origin.moved
        )
        seen[:] = inputs, outputs, findings, _next_op_seed()
        return outputs

    traced = tf.function(run, **origin.options)
    graph = traced.get_concrete_function(*origin.specs).graph
    note_source(graph)
    origin.function.cell.check_by_itself(graph)
    inputs, outputs, findings, op_seed = seen
    return Traced(
        origin,
        graph,
        inputs,
        outputs,
        findings,
        tuple(graph.get_operations()),
        tuple(graph.control_outputs),
        op_seed,
    )


def _next_op_seed() -> int:
    """Takes the seed that comes next in the current graph.

    Where a global seed is set, TensorFlow numbers those of a graph's random
    operations that have no seed of their own: 0, 1, 2, and so on. The numbers
    run on through all cells, as in the one graph that Keras makes, so that no
    two cells draw the same.
    """
    if tf.compat.v1.get_default_graph().seed is None:
        return 0
    _, seed = tf.compat.v1.get_seed(None)
    return seed % (2**31 - 1)  # TensorFlow says that number for 0, at times


class TraceFindings(NamedTuple):
    """What the layers of a cell were seen to do when they ran.

    Attributes:
        draws: How often each of `CellFunction.seeds` was drawn; None for one
            that got another value than the next one.
        starts: For each layer, how many operations the graph had before it,
            and at last, how many after all layers.
        output_structure: A nest like the outputs.
        num_head_losses: How many of the losses are the head's.
        moving_rules: For each of `CellFunction.normalizations` those of
            `MovingStatistics`.
    """

    draws: list[int | None]
    starts: list[int]
    output_structure: Any
    num_head_losses: int
    moving_rules: Sequence[list[Any]] = ()

    def layer_of(self, place: int) -> int:
        """Which layer made an operation: of those after all, the last."""
        return max(0, bisect.bisect_right(self.starts[:-1], place) - 1)


# Reading a variable or a table has no effect; cuDNN's recurrent kernels are
# stateful for the sake of their dropout, which Keras does not use. What nobody
# needs any more, Python destroys when it comes to it.
READS = {
    "DestroyResourceOp",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "ReadVariableOp",
    "ResourceGather",
    "VarHandleOp",
    "VarIsInitializedOp",
    "CudnnRNN",
    "CudnnRNNV2",
    "CudnnRNNV3",
    "CudnnRNNBackprop",
    "CudnnRNNBackpropV2",
    "CudnnRNNBackpropV3",
}

# What they do is what the functions do that they call.
CALLS = {
    "Case",
    "If",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "StatelessCase",
    "StatelessIf",
    "StatelessWhile",
    "While",
}


def stateful_kinds(operations: Sequence[tf.Operation]) -> set[str]:
    """The types of the stateful operations, those in called functions too.

    A branch of a condition and the body of a loop are such functions.
    """
    kinds = {op.type for op in operations}
    calls = [op for op in operations if internals.takes_functions(op.type)]
    called = {name for op in calls for name in _functions(op.node_def)}
    if called:
        library = {
            function.signature.name: function.node_def
            for function in operations[0].graph.as_graph_def().library.function
        }
        kinds |= _kinds_in(called, library)
    return stateful(kinds)


def stateful(kinds: Iterable[str]) -> set[str]:
    """Those of some types of operations that have side effects, or draw."""
    return {
        kind for kind in {*kinds} - CALLS - READS if internals.is_stateful(kind)
    }


def _kinds_in(
    names: Iterable[str], library: Mapping[str, Iterable[Any]]
) -> set[str]:
    """The types of the operations of functions, and of those they call."""
    kinds: set[str] = set()
    known: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        known.add(name)
        for node in library[name]:
            kinds.add(node.op)
            waiting |= {*_functions(node)} - known
    return kinds


def _functions(node: Any) -> list[str]:
    """The names of the functions that an operation may call."""
    found = []
    for attribute in node.attr.values():
        found += [attribute.func, *attribute.list.func]
    return [function.name for function in found if function.name]
