"""Cells: a model's graph becomes functions, forward and backward.

`Tracer` runs the model once in a graph, `trace_model`, and cuts the functions
of each cell's tasks out of it, `CellTasks`.
"""

from tfgpipe.cells.cell import (
    Cell,
    LayerCall,
    SectionCall,
    counts_of_shards,
    shards_of,
)
from tfgpipe.cells.columns import WITH_COLUMNS, computes_columns, num_columns
from tfgpipe.cells.head_tasks import HeadTasks
from tfgpipe.cells.model_trace import (
    LossAndMetrics,
    ModelCall,
    as_number,
    trace_model,
)
from tfgpipe.cells.outline import (
    Outline,
    cell_of_call,
    nonempty_sections,
    outline,
    shape_trace,
)
from tfgpipe.cells.sections import Section, is_named, is_whole
from tfgpipe.cells.tasks import CellTasks, KeptValues, TaskCall
from tfgpipe.cells.tracer import Tracer

__all__ = [
    "WITH_COLUMNS",
    "Cell",
    "CellTasks",
    "HeadTasks",
    "KeptValues",
    "LayerCall",
    "LossAndMetrics",
    "ModelCall",
    "Outline",
    "Section",
    "SectionCall",
    "TaskCall",
    "Tracer",
    "as_number",
    "cell_of_call",
    "computes_columns",
    "counts_of_shards",
    "is_named",
    "is_whole",
    "nonempty_sections",
    "num_columns",
    "outline",
    "shape_trace",
    "shards_of",
    "trace_model",
]
