"""Cells: layers become functions, forward and backward.

The way of a cell: its layers are one `CellFunction`; `Tracer` makes of it a
graph, then its backward pass, then the functions of its tasks, `CellTasks`.
"""

from tfgpipe.cells.cell import Cell, GraphStep, Live, Made, Step
from tfgpipe.cells.function import CellFunction, as_number, until_known
from tfgpipe.cells.tasks import CellTasks, Work
from tfgpipe.cells.tracer import Tracer

__all__ = [
    "Cell",
    "CellFunction",
    "CellTasks",
    "GraphStep",
    "Live",
    "Made",
    "Step",
    "Tracer",
    "Work",
    "as_number",
    "until_known",
]
