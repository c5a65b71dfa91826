"""Finds operations with side effects in a cell, and the layer they are from.

TensorFlow runs the stateful operations of a function one after the other, so
a single `tf.print` in a cell would make the whole pipeline run serially.
`run/chain.py` takes the cells out of that order; what is left to do is to tell
the user that effects happen once a micro-batch, in any order between devices.
A random operation is worse: re-materialisation would draw other numbers than
the forward pass, and the gradient would be wrong. That is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells.step import named

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


def check_operations(
    cell: Any,
    operations: Sequence[tf.Operation],
    starts: list[int],
    recomputes: bool,
) -> None:
    """Warns of a cell's stateful operations and refuses random ones.

    Args:
        cell: The cell.
        operations: All of its graph, in order.
        starts: For each layer, how many operations there were before it.
        recomputes: Whether the cell is computed again in the backward pass.

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
                f"{named(layer)} of cell {cell.number}, which runs "
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
    """Those of them that have side effects, or draw."""
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
