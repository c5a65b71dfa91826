"""Warns of losses that layers add up over rows.

What layers give `add_loss` is taken as a mean over rows: the loss of a
mini-batch is then the mean of those of its micro-batches, weighted by their
rows. A sum over rows would come out about M times too small. Its value does not
tell; the operations that computed it mostly do.

A loss is followed back from its value through numbers, until there are axes
again. It is a sum if rows are added up there, and nothing is divided.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells.bundle import tensors
from tfgpipe.cells.function import Findings
from tfgpipe.cells.sparse import RowDependence

_SUMS = {"L2Loss", "Sum"}
_DIVISIONS = {"Div", "DivNoNan", "RealDiv", "Reciprocal"}


def check_added_losses(
    layers: Sequence[Any],
    operations: Sequence[tf.Operation],
    findings: Findings,
    losses: Sequence[tf.Tensor],
    inputs: Any,
) -> None:
    """Warns of the losses of a cell that are sums over rows.

    Args:
        layers: The layers of the cell.
        operations: All of the cell's graph, in order.
        findings: Which layer made which operations.
        losses: What the layers have added, scalars of the graph.
        inputs: Nest of the cell's inputs, tensors of the graph.
    """
    if not losses:
        return
    rows = next(t.shape[0] for t in tensors(inputs) if t.shape.rank)
    depends = RowDependence((t, True) for t in tensors(inputs))
    places = {op.name: place for place, op in enumerate(operations)}
    for loss in losses:
        if not _adds_up_rows(loss, rows, depends):
            continue
        place = places.get(loss.op.name, len(operations))
        layer = layers[findings.layer_of(place)]
        warnings.warn(
            f"Layer '{layer.name}' gives `add_loss` a sum over rows. With "
            "several micro-batches it must be a mean, or it comes out that "
            "many times too small. Divide it by the number of rows, or pass "
            "num_micro_batches=1.",
            stacklevel=2,
        )


def _adds_up_rows(
    loss: tf.Tensor, rows: int | None, depends: Callable[[tf.Tensor], bool]
) -> bool:
    """Whether a number is a sum over rows, and not divided."""
    found, waiting, seen = False, [loss], set()
    while waiting:
        op = waiting.pop().op
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.type in _DIVISIONS:
            return False
        if op.type in _SUMS:
            shape = op.inputs[0].shape
            has_rows = bool(shape.rank) and shape[0] in (None, rows)
            found = found or (has_rows and depends(op.inputs[0]))
        waiting.extend(t for t in op.inputs if t.shape.rank == 0)
    return found
