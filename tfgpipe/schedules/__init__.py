"""The order of tasks on each device; knows no TensorFlow."""

from tfgpipe.schedules.named import SCHEDULES
from tfgpipe.schedules.schedule import Schedule, fill_drain
from tfgpipe.schedules.task import Task

__all__ = ["SCHEDULES", "Schedule", "Task", "fill_drain"]
