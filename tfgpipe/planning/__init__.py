"""Costs of layers, and the cut into cells."""

from tfgpipe.planning import cost
from tfgpipe.planning.cell_record import CellRecord, print_cells
from tfgpipe.planning.partition import partition

__all__ = ["CellRecord", "cost", "partition", "print_cells"]
