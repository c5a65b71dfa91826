"""The order of tasks on each device; knows no TensorFlow."""

from tfgpipe.schedules.lowering import (
    REMAT,
    CellFacts,
    Remat,
    Rule,
    checked_rule,
    lower,
    rule_of,
)
from tfgpipe.schedules.orders import (
    CHUNKS,
    SCHEDULES,
    devices_for,
    devices_of_cells,
)
from tfgpipe.schedules.orders.auto import search
from tfgpipe.schedules.program import Op, Program
from tfgpipe.schedules.schedule import Schedule
from tfgpipe.schedules.task import HALVES, KINDS, Shard, Task, merged

__all__ = [
    "CHUNKS",
    "HALVES",
    "KINDS",
    "REMAT",
    "SCHEDULES",
    "CellFacts",
    "Op",
    "Program",
    "Remat",
    "Rule",
    "Schedule",
    "Shard",
    "Task",
    "checked_rule",
    "devices_for",
    "devices_of_cells",
    "lower",
    "merged",
    "rule_of",
    "search",
]
