"""Tells operations that have side effects, or draw random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs.cut import functions_of

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
    called = {name for op in calls for name in functions_of(op.node_def)}
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
            waiting |= {*functions_of(node)} - known
    return kinds
