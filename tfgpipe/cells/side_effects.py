"""Refuses, or warns of, what a trace of a cell shows of its layers.

TensorFlow runs the stateful operations of a function one after the other, so
a single `tf.print` in a cell would make the whole pipeline run serially.
`run/chain.py` takes the cells out of that order; what is left to do is to tell
the user that effects happen once a micro-batch, in any order between devices.
A random operation is worse: re-materialisation would draw other numbers than
the forward pass, and the gradient would be wrong. That is an error.

The storage of a model's variables is for nobody to use beside their values.
What a cell reads of a variable, it gets as an argument, and what it assigns, it
returns. Storage that it uses by itself would be that of the last mini-batch,
would be changed once a micro-batch, and would have no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells.cell import name_in_words
from tfgpipe.graphs import stateful_kinds

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


def check_operations(
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


def check_captured(cell: Any, traced: Any) -> None:
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
