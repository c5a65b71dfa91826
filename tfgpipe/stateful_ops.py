"""Finds operations with side effects in a cell, and the layer they are from.

TensorFlow runs the stateful operations of a function one after the other, so
a single `tf.print` in a cell would make the whole pipeline run serially.
`pipeline.py` takes the cells out of that order; what is left to do is to tell
the user that effects happen once a micro-batch, in any order between devices.
A random operation is worse: re-materialisation would draw other numbers than
the forward pass, and the gradient would be wrong. That is an error.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tfgpipe import internals

# Reading a variable has no effect; cuDNN's recurrent kernels are stateful for
# the sake of their dropout, which Keras does not use.
_HARMLESS = {
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
    "StatefulRandomBinomial",
    "StatefulStandardNormal",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "StatefulUniformFullInt",
    "StatefulUniformInt",
    "TruncatedNormal",
}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}


def check_operations(
    cell: Any,
    operations: list[tf.Operation],
    starts: list[int],
    recomputes: bool,
) -> None:
    """Warns of a cell's stateful operations and refuses random ones.

    Args:
        cell: The cell.
        operations: Those that its layers made.
        starts: For each layer, how many operations the graph had before it.
        recomputes: Whether the cell is computed again in the backward pass.

    Raises:
        ValueError: If the recomputation would draw other random numbers.
    """
    for layer, start, end in zip(cell.sequence, starts, starts[1:]):
        kinds = _stateful_kinds(operations[start:end])
        random = sorted(kinds & _RANDOM)
        if random and recomputes:
            raise ValueError(
                "With `remat` a cell must draw its random numbers from Keras "
                "seeds, or the recomputation draws others and the gradient is "
                f"wrong. Received: layer '{layer.name}' of cell {cell.index}, "
                f"which runs {', '.join(random)}. Draw with `keras.random` "
                "and a `keras.random.SeedGenerator` attribute of the layer, or "
                'pass `remat="never"`.'
            )
        if kinds:
            warnings.warn(
                f"Layer '{layer.name}' of cell {cell.index} runs "
                f"{', '.join(sorted(kinds))}, which has side effects. They "
                "happen once for every micro-batch, and in no order between "
                "devices.",
                stacklevel=2,
            )


def _stateful_kinds(operations: list[tf.Operation]) -> set[str]:
    """The types of the stateful operations, those in called functions too."""
    kinds: set[str] = set()
    for operation in operations:
        if operation.type in _CALLS:
            kinds |= _kinds_in_function(operation)
        elif operation.op_def is not None and operation.op_def.is_stateful:
            kinds.add(operation.type)
    return kinds - _HARMLESS


def _kinds_in_function(call: tf.Operation) -> set[str]:
    name = call.get_attr("f").name
    library = {
        f.signature.name: f for f in call.graph.as_graph_def().library.function
    }
    stateful, waiting = set(), [name]
    while waiting:
        for node in library[waiting.pop()].node_def:
            if node.op in _CALLS:
                waiting.append(node.attr["f"].func.name)
            elif internals.is_stateful(node.op):
                stateful.add(node.op)
    return stateful
