"""Cells: layers become functions, forward and backward.

The way of a cell: its layers are one `CellFunction`; `Tracer` makes of it a
graph, then its backward pass, then the functions of its tasks, `CellTasks`.
"""

from tfgpipe.cells import gradients
from tfgpipe.cells.bundle import by_reference, tensors
from tfgpipe.cells.cell import Cell
from tfgpipe.cells.cut import only_cast
from tfgpipe.cells.function import CellFunction, as_number, until_known
from tfgpipe.cells.gradients import Gradient, as_tensor, lookups
from tfgpipe.cells.micro_batch import MicroBatches, as_specs, check_rows, shapes
from tfgpipe.cells.moments import is_synchronized
from tfgpipe.cells.scope import InnerScope, StateScope, advance_seed
from tfgpipe.cells.side_effects import stateful_kinds
from tfgpipe.cells.single_values import SingleValues
from tfgpipe.cells.stages import Stages
from tfgpipe.cells.step import GraphStep, Live, Made, Step
from tfgpipe.cells.subgraph import CHEAP
from tfgpipe.cells.tasks import CellTasks
from tfgpipe.cells.tracer import Tracer
from tfgpipe.cells.values import (
    Boundary,
    CellArguments,
    Output,
    is_continuous,
    structure_of,
)
from tfgpipe.cells.work import Work

__all__ = [
    "CHEAP",
    "Boundary",
    "Cell",
    "CellArguments",
    "CellFunction",
    "CellTasks",
    "Gradient",
    "GraphStep",
    "InnerScope",
    "Live",
    "Made",
    "MicroBatches",
    "Output",
    "SingleValues",
    "Stages",
    "StateScope",
    "Step",
    "Tracer",
    "Work",
    "advance_seed",
    "as_number",
    "as_specs",
    "as_tensor",
    "by_reference",
    "check_rows",
    "gradients",
    "is_continuous",
    "is_synchronized",
    "lookups",
    "only_cast",
    "shapes",
    "stateful_kinds",
    "structure_of",
    "tensors",
    "until_known",
]
