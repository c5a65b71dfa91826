"""The order of tasks on each device; knows no TensorFlow."""

from tfgpipe.schedules.auto import search
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
from tfgpipe.schedules.program import Op, Program
from tfgpipe.schedules.schedule import Schedule
from tfgpipe.schedules.task import KINDS, Shard, Task, merged
