"""Costs of layers, and the cut into cells."""

from tfgpipe.planning import cost
from tfgpipe.planning.cell_record import CellRecord, print_cells
from tfgpipe.planning.fit import Problem, fitted
from tfgpipe.planning.graph_cut import cut_graph
from tfgpipe.planning.layer_size import LayerSize, PlacedStep, layer_sizes
from tfgpipe.planning.machine import MACHINES, Machine, machine_of
from tfgpipe.planning.partition import partition
from tfgpipe.planning.plan_record import Plan
from tfgpipe.planning.prediction import Prediction, predict
from tfgpipe.planning.search import search, smallest
from tfgpipe.planning.setting import Setting
from tfgpipe.planning.slots import slot_bytes_of
from tfgpipe.planning.workload import (
    KINDS,
    LayerSeconds,
    Workload,
    seconds_by_flops,
)

__all__ = [
    "KINDS",
    "MACHINES",
    "CellRecord",
    "LayerSeconds",
    "LayerSize",
    "Machine",
    "PlacedStep",
    "Plan",
    "Prediction",
    "Problem",
    "Setting",
    "Workload",
    "cost",
    "cut_graph",
    "fitted",
    "layer_sizes",
    "machine_of",
    "partition",
    "predict",
    "print_cells",
    "search",
    "seconds_by_flops",
    "slot_bytes_of",
    "smallest",
]
