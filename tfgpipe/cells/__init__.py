"""Cells: layers become functions, forward and backward.

The way of a cell: its layers are one `CellFunction`; `Tracer` makes of it a
graph, then its backward pass, then the functions of its tasks, `CellTasks`.
"""

from tfgpipe.cells.cell import CallOutput, Cell, LayerCall, LiveCall, LiveInput
from tfgpipe.cells.function import CellFunction, until_known
from tfgpipe.cells.model_trace import ModelCall, as_number
from tfgpipe.cells.outline import Outline, outline
from tfgpipe.cells.tasks import CellTasks, KeptValues, TaskCall
from tfgpipe.cells.tracer import Tracer

__all__ = [
    "CallOutput",
    "Cell",
    "CellFunction",
    "CellTasks",
    "KeptValues",
    "LayerCall",
    "LiveCall",
    "LiveInput",
    "ModelCall",
    "Outline",
    "TaskCall",
    "Tracer",
    "as_number",
    "outline",
    "until_known",
]
