"""Warns of layers that mix the rows of a batch.

A micro-batch has other rows than its mini-batch, and fewer: a layer that
subtracts the mean over rows, pads them to the longest, or divides by their
number gives other outputs then. The operations of a cell's graph mostly show
it. Moments of Keras's batch normalisation are left out: that they are those of
micro-batches is the paper's rule.
"""

from __future__ import annotations

from tfgpipe.cells.bundle import tensors
from tfgpipe.cells.row_states import Mixed, Total
from tfgpipe.cells.rows_seen import RowsSeen
from tfgpipe.cells.values import is_continuous


def check_rows_apart(seen: RowsSeen) -> None:
    """Warns if what a cell returns for a row follows from others, too."""
    outputs = seen.traced.outputs
    mixing = set()
    for tensor in tensors([outputs.tensors, outputs.masks]):
        state = seen.state_of(tensor)
        if isinstance(state, Mixed) or (
            isinstance(state, Total) and is_continuous(tensor)
        ):
            mixing.add(state.op.name)
    for op in seen.traced.operations:
        if op.name not in mixing:
            continue
        if op.type in ("Shape", "ShapeN", "Size"):
            does = "computes its outputs with the number of rows of a batch: it"
            cure = "Divide by it in the loss"
        else:
            does = f"mixes the rows of a batch, by {op.type}: it"
            cure = "Mix rows in the dataset or in the loss"
        seen.warn(
            op,
            f"{does} sees only those of a micro-batch, and its outputs are "
            f"others than for the whole mini-batch. {cure}, or pass "
            "num_micro_batches=1.",
        )
