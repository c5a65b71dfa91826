"""Costs of layers, the cut into cells, and what settings come to."""

from tfgpipe.planning import cost, one_example
from tfgpipe.planning.cell_record import CellRecord, print_cells
from tfgpipe.planning.fit import Problem, fitted
from tfgpipe.planning.graph_cut import cut_graph
from tfgpipe.planning.layer_key import layer_key
from tfgpipe.planning.layer_profiles import kept_in_row, layer_profiles
from tfgpipe.planning.layer_record import MEASURED
from tfgpipe.planning.layer_size import (
    LayerSize,
    PlacedStep,
    layer_sizes,
    num_params,
)
from tfgpipe.planning.machine import (
    MACHINES,
    Machine,
    machine_named,
    machine_of,
)
from tfgpipe.planning.measure import MeasureSetting, Measuring
from tfgpipe.planning.partition import partition
from tfgpipe.planning.plan_record import Plan
from tfgpipe.planning.prediction import Prediction, predict
from tfgpipe.planning.profile_record import Profile
from tfgpipe.planning.search import search, smallest
from tfgpipe.planning.setting import Setting
from tfgpipe.planning.slots import slot_bytes_of
from tfgpipe.planning.workload import LayerSeconds, Workload, seconds_by_flops

__all__ = [
    "MACHINES",
    "MEASURED",
    "CellRecord",
    "LayerSeconds",
    "LayerSize",
    "Machine",
    "MeasureSetting",
    "Measuring",
    "PlacedStep",
    "Plan",
    "Prediction",
    "Problem",
    "Profile",
    "Setting",
    "Workload",
    "cost",
    "cut_graph",
    "fitted",
    "kept_in_row",
    "layer_key",
    "layer_profiles",
    "layer_sizes",
    "machine_named",
    "machine_of",
    "num_params",
    "one_example",
    "partition",
    "predict",
    "print_cells",
    "search",
    "seconds_by_flops",
    "slot_bytes_of",
    "smallest",
]
