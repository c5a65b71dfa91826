"""Refuses what uses the storage of a model's variables beside their values.

What a cell reads of a variable, it gets as an argument, and what it assigns, it
returns. Storage that it uses by itself would be that of the last mini-batch,
would be changed once a micro-batch, and would have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import keras

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
            kinds = {op.type for op in users}
            _refuse(cell, named(layer), variable, kinds)


def check_used(cell: Any, uses: Iterable[tuple[str, Any]]) -> None:
    """Refuses storage that operations use which run eagerly.

    Args:
        cell: The cell.
        uses: Pairs of the type of an operation and a tensor that it takes.
    """
    for kind, tensor in uses:
        variable = internals.variable_of(tensor)
        if variable is not None:
            layers = [layer.name for layer in cell.sequence]
            _refuse(cell, f"one of the layers {layers}", variable, {kind})


def check_read(cell: Any, read: Iterable[Any]) -> None:
    """Refuses storage that operations read which run eagerly.

    Args:
        cell: The cell.
        read: The `tf.Variable`s that they read.
    """
    check_used(cell, (("ReadVariableOp", one.handle) for one in read))


def _refuse(
    cell: Any, who: str, variable: keras.Variable, kinds: set[str]
) -> NoReturn:
    raise ValueError(
        "A layer must use a weight of the model by its `keras.Variable`. "
        f"Received: {who} of cell {cell.number} uses the `tf.Variable` of "
        f"'{variable.path}' by itself, by {', '.join(sorted(kinds))}, from "
        "which a pipeline gets no gradient, and no new value at the end of "
        "the mini-batch. Keep the variable, as in `self.k = layer.kernel` "
        "instead of `layer.kernel.value`, and call its `assign`, or functions "
        "of `keras.ops`."
    )
