"""The user's model, checked: layers, or a functional model."""

from tfgpipe.sequence.regions import region_bounds
from tfgpipe.sequence.source import (
    Source,
    check_supported,
    is_task,
    items_from_config,
    layers_of,
    prepares_data,
    source_of,
)
from tfgpipe.sequence.steps import too_many_cells
