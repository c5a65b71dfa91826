"""Warns of losses of layers that are no means over rows.

What layers give `add_loss` is taken as a mean over rows: the loss of a
mini-batch is then the mean of those of its micro-batches, weighted by their
rows. A sum over rows would come out about M times too small, and the square of
a mean as something else. Its value does not tell; the operations that computed
it mostly do.
"""

from __future__ import annotations

from tfgpipe.cells.row_states import Mixed, Rows, Total
from tfgpipe.cells.rows_seen import RowsSeen

_SUMS = {"L2Loss", "Sum"}


def check_added_losses(seen: RowsSeen) -> None:
    """Warns of the losses that the layers of a cell have added."""
    num_head_losses = seen.traced.findings.num_head_losses
    for loss in seen.traced.outputs.losses[num_head_losses:]:
        state = seen.state_of(loss)
        if not isinstance(state, (Mixed, Rows, Total)):
            continue
        if isinstance(state, Total) and state.is_mean:
            continue
        is_sum = not isinstance(state, Rows) and state.op.type in _SUMS
        what = "a sum over rows" if is_sum else "what is no mean over rows"
        wrong = (
            "comes out that many times too small. Divide it by the number of "
            "rows"
            if is_sum
            else "is not that of the whole mini-batch. Add a mean over rows"
        )
        seen.warn(
            loss.op,
            f"gives `add_loss` {what}. With several micro-batches it must be a "
            f"mean, or it {wrong}, or pass num_micro_batches=1.",
        )
