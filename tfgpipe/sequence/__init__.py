"""What the user gives, checked: layers, a functional model, data."""

from tfgpipe.sequence import inputs
from tfgpipe.sequence.regions import region_bounds
from tfgpipe.sequence.restrictions import check_supported
from tfgpipe.sequence.source import (
    is_task,
    items_from_config,
    layers_of,
    prepares_data,
    source_of,
)
from tfgpipe.sequence.steps import too_many_cells

__all__ = [
    "check_supported",
    "inputs",
    "is_task",
    "items_from_config",
    "layers_of",
    "prepares_data",
    "region_bounds",
    "source_of",
    "too_many_cells",
]
