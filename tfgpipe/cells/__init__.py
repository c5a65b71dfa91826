"""Cells: layers become functions, forward and backward."""

from tfgpipe.cells import gradients, state_rules
from tfgpipe.cells.bundle import tensors
from tfgpipe.cells.cell import Cell
from tfgpipe.cells.function import Borrows, CellFunction
from tfgpipe.cells.gradients import dense
from tfgpipe.cells.micro_batch import MicroBatches, as_specs, check_rows, shapes
from tfgpipe.cells.moments import is_synchronized
from tfgpipe.cells.scope import InnerScope
from tfgpipe.cells.stages import Exchange
from tfgpipe.cells.state_rules import sum_of
from tfgpipe.cells.tracer import Tracer
from tfgpipe.cells.values import Arguments, Boundary, Output, is_continuous

__all__ = [
    "Arguments",
    "Borrows",
    "Boundary",
    "Cell",
    "CellFunction",
    "Exchange",
    "InnerScope",
    "MicroBatches",
    "Output",
    "Tracer",
    "as_specs",
    "check_rows",
    "dense",
    "gradients",
    "is_continuous",
    "is_synchronized",
    "shapes",
    "state_rules",
    "sum_of",
    "tensors",
]
