"""What the graph of a cell shows of the rows of a batch."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfgpipe.cells.bundle import tensors
from tfgpipe.cells.function import CellFunction
from tfgpipe.cells.row_flow import follow
from tfgpipe.cells.sparse import RowDependence
from tfgpipe.cells.trace import Traced


class RowsSeen:
    """The graph of a cell, for what looks at it and warns of its layers.

    Args:
        function: The cell's function.
        traced: Its graph, or that of an equal cell.

    Attributes:
        state_of: Tells what a tensor has to do with rows, see `row_states.py`.
        depends: Tells whether it follows from rows, or their number, at all.
    """

    def __init__(self, function: CellFunction, traced: Traced):
        self.function = function
        self.traced = traced
        rows = tensors(traced.inputs.inputs)
        moments = {t.ref() for t in tensors(traced.outputs.moments)}
        self.state_of = follow(traced.operations, rows, moments)
        self.depends = RowDependence([(t, True) for t in rows])

    def warn(self, op: tf.Operation, what: str) -> None:
        """Warns of the layer that made an operation."""
        findings = self.traced.findings
        place = self._places.get(op.name, len(self._places))
        layer = self.function.cell.sequence[findings.layer_of(place)]
        self.function.cell.warn_of(layer, what)

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.traced.operations)}
