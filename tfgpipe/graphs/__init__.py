"""The graph of a model: differentiated, and cut into functions of cells."""

from tfgpipe.graphs import gradient_sums
from tfgpipe.graphs.by_device import GraphByDevice
from tfgpipe.graphs.cell_functions import CellFunctions, only_cast
from tfgpipe.graphs.cut import (
    CHEAP,
    GraphCutter,
    WholeGraph,
    called_functions,
    follows,
    functions_of,
)
from tfgpipe.graphs.flops import LIKELY_ROWS, operation_flops
from tfgpipe.graphs.functions import (
    Subfunction,
    Values,
    by_reference,
    in_turn,
    one_step,
    tensors,
)
from tfgpipe.graphs.gradient_sums import (
    Gradient,
    GradientSums,
    Indices,
    Piece,
    are_distinct,
    as_tensor,
    is_continuous,
    pieces_of,
)
from tfgpipe.graphs.parts import (
    NotCompilable,
    Part,
    alive,
    check_compilable,
    parts_of,
)
from tfgpipe.graphs.same_graph import Repeat, part_key, repeats_of
from tfgpipe.graphs.traced_model import (
    TracedModel,
    TraceOptions,
    differentiate,
    stateful_kinds,
)
