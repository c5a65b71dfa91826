"""The graph of a cell: traced, differentiated, and cut into functions."""

from tfgpipe.graphs import gradient_sums
from tfgpipe.graphs.backward import Backward, add_backward, without_backward
from tfgpipe.graphs.bundle import by_reference, tensors
from tfgpipe.graphs.cut import CHEAP, StagedFunction, sum_over_replicas
from tfgpipe.graphs.gradient_sums import (
    Gradient,
    GradientSums,
    as_tensor,
    lookups,
)
from tfgpipe.graphs.kept import CellGraph, only_cast
from tfgpipe.graphs.same_graph import graph_key
from tfgpipe.graphs.trace import (
    Origin,
    Traced,
    TraceFindings,
    stateful_kinds,
    trace,
)

__all__ = [
    "CHEAP",
    "Backward",
    "CellGraph",
    "Gradient",
    "GradientSums",
    "Origin",
    "StagedFunction",
    "TraceFindings",
    "Traced",
    "add_backward",
    "as_tensor",
    "by_reference",
    "gradient_sums",
    "graph_key",
    "lookups",
    "only_cast",
    "stateful_kinds",
    "sum_over_replicas",
    "tensors",
    "trace",
    "without_backward",
]
