"""The graph of a model: differentiated, and cut into functions of cells."""

from tfgpipe.graphs import gradient_sums
from tfgpipe.graphs.bundle import Values, by_reference, tensors
from tfgpipe.graphs.by_device import run_by_device
from tfgpipe.graphs.cell_functions import CellFunctions, only_cast
from tfgpipe.graphs.cut import (
    CHEAP,
    GraphCutter,
    StagedFunction,
    WholeGraph,
    follows,
    functions_of,
    sum_over_replicas,
    sums_over_replicas,
)
from tfgpipe.graphs.flops import (
    LIKELY_ROWS,
    operation_flops,
)
from tfgpipe.graphs.gradient_sums import (
    Gradient,
    GradientSums,
    Indices,
    Piece,
    are_distinct,
    as_tensor,
    is_continuous,
    lookups,
    pieces_of,
)
from tfgpipe.graphs.parts import Part, alive, parts_of
from tfgpipe.graphs.repeats import BlockKeys, Repeat, repeats_of
from tfgpipe.graphs.same_graph import part_key
from tfgpipe.graphs.traced_model import (
    Differentiated,
    TracedModel,
    TraceOptions,
    differentiate,
    stateful_kinds,
    without_gradients,
)
from tfgpipe.graphs.turns import in_turn, one_step, out_of_turn
from tfgpipe.graphs.xla import NotCompilable, check_compilable, warn_of_host

__all__ = [
    "CHEAP",
    "LIKELY_ROWS",
    "BlockKeys",
    "CellFunctions",
    "Differentiated",
    "Gradient",
    "GradientSums",
    "GraphCutter",
    "Indices",
    "NotCompilable",
    "Part",
    "Piece",
    "Repeat",
    "StagedFunction",
    "TraceOptions",
    "TracedModel",
    "Values",
    "WholeGraph",
    "alive",
    "are_distinct",
    "as_tensor",
    "by_reference",
    "check_compilable",
    "differentiate",
    "follows",
    "functions_of",
    "gradient_sums",
    "in_turn",
    "is_continuous",
    "lookups",
    "one_step",
    "only_cast",
    "operation_flops",
    "out_of_turn",
    "part_key",
    "parts_of",
    "pieces_of",
    "repeats_of",
    "run_by_device",
    "stateful_kinds",
    "sum_over_replicas",
    "sums_over_replicas",
    "tensors",
    "warn_of_host",
    "without_gradients",
]
