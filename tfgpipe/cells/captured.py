"""Refuses what uses the storage of a model's variables beside their values.

What a cell reads of a variable, it gets as an argument, and what it assigns, it
returns. Storage that it uses by itself would be that of the last mini-batch,
would be changed once a micro-batch, and would have no gradient.
"""

from __future__ import annotations

from typing import Any

from tfgpipe import internals
from tfgpipe.cells.step import named


def check_captured(cell: Any, traced: Any) -> None:
    """Refuses storage that the graph of a cell captures.

    Args:
        cell: The cell.
        traced: Its `Traced`; branches, loops and functions capture through it.
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
                f"`keras.Variable`. Received: {named(layer)} of cell "
                f"{cell.number} uses the `tf.Variable` of '{variable.path}' by "
                f"itself, by {', '.join(kinds)}, from which a pipeline gets no "
                "gradient, and no new value at the end of the mini-batch. Keep "
                "the variable, as in `self.k = layer.kernel` instead of "
                "`layer.kernel.value`, and call its `assign`, or functions of "
                "`keras.ops`."
            )
