"""Cells: a model's graph becomes functions, forward and backward.

`trace_cells` runs the model once, in a graph; `tasks_of` cuts the functions of
each cell's tasks out of it, `CellTasks`.
"""

from tfgpipe.cells.cell import (
    Cell,
    LayerCall,
    SectionCall,
    counts_of_shards,
    shards_of,
)
from tfgpipe.cells.columns import WITH_COLUMNS, num_columns
from tfgpipe.cells.head import Head
from tfgpipe.cells.outline import (
    Outline,
    cell_of_call,
    nonempty_sections,
    outline,
    shape_trace,
)
from tfgpipe.cells.sections import Section, is_named, is_whole
from tfgpipe.cells.tasks import CellTasks, HeadTasks, TaskCall
from tfgpipe.cells.tracer import (
    ModelCall,
    tasks_of,
    trace_cells,
    trace_model,
    unanalysed,
)
