"""The order of tasks on each device; knows no TensorFlow."""

from tfgpipe.schedules.best_order import search
from tfgpipe.schedules.ideal import IDEALS
from tfgpipe.schedules.named import (
    CHUNKS,
    SCHEDULES,
    devices_for,
    devices_of_cells,
)
from tfgpipe.schedules.remat import REMAT, Remat
from tfgpipe.schedules.schedule import Schedule, fill_drain
from tfgpipe.schedules.task import Task

__all__ = [
    "CHUNKS",
    "IDEALS",
    "REMAT",
    "SCHEDULES",
    "Remat",
    "Schedule",
    "Task",
    "devices_for",
    "devices_of_cells",
    "fill_drain",
    "search",
]
