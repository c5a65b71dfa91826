"""Warns of layers that mix the rows of a batch.

A micro-batch has other rows than its mini-batch: a layer that subtracts the
mean over rows, or pads them to the longest, gives other outputs then. The
operations of a cell's graph mostly show it. Moments of Keras's batch
normalisation are left out: that they are those of micro-batches is the paper's
rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells.bundle import tensors
from tfgpipe.cells.function import Findings
from tfgpipe.cells.row_flow import follow
from tfgpipe.cells.row_rules import Mixed
from tfgpipe.cells.values import Boundary, Output


def check_rows_apart(
    layers: Sequence[Any],
    operations: Sequence[tf.Operation],
    findings: Findings,
    inputs: Boundary,
    outputs: Output,
) -> None:
    """Warns if what a cell returns for a row follows from others, too.

    Args:
        layers: The layers of the cell.
        operations: All of the cell's graph, in order.
        findings: Which layer made which operations.
        inputs: What the cell takes, tensors of the graph.
        outputs: What it returns, tensors of the graph.
    """
    moments = {t.ref() for t in tensors(outputs.moments)}
    state_of = follow(operations, tensors(inputs), moments)
    states = map(state_of, tensors([outputs.tensors, outputs.masks]))
    mixing = {state.op.name for state in states if isinstance(state, Mixed)}
    for place, op in enumerate(operations):
        if op.name in mixing:
            layer = layers[findings.layer_of(place)]
            warnings.warn(
                f"Layer '{layer.name}' mixes the rows of a batch, by {op.type}:"
                " it sees only those of a micro-batch, and its outputs are "
                "others than for the whole mini-batch. Mix rows in the dataset "
                "or in the loss, or pass num_micro_batches=1.",
                stacklevel=2,
            )
