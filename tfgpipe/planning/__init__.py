"""Costs of layers, and the cut into cells."""

from tfgpipe.planning import cost
from tfgpipe.planning.cell_record import CellRecord, print_cells
from tfgpipe.planning.graph_cut import cut_graph
from tfgpipe.planning.layer_size import LayerSize, PlacedStep, layer_sizes
from tfgpipe.planning.partition import partition

__all__ = [
    "CellRecord",
    "LayerSize",
    "PlacedStep",
    "cost",
    "cut_graph",
    "layer_sizes",
    "partition",
    "print_cells",
]
