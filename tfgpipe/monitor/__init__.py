"""Numbers of a training: what `callbacks.PipelineMonitor` tells, and advice."""

from tfgpipe.monitor import statistics
from tfgpipe.monitor.advice import advise
from tfgpipe.monitor.event_log import EventLog
from tfgpipe.monitor.layout import (
    Layout,
    ideal_bubble,
    ideal_bubbles,
    layout_of,
)
from tfgpipe.monitor.memory import accelerator_mib, is_remote
from tfgpipe.monitor.picture import save_picture
from tfgpipe.monitor.rates import Rates, flops_of_example, tokens_of_example
from tfgpipe.monitor.record import Record
from tfgpipe.monitor.timed_step import Measured, TimedStep, typical
from tfgpipe.monitor.words import name, seconds

__all__ = [
    "EventLog",
    "Layout",
    "Measured",
    "Rates",
    "Record",
    "TimedStep",
    "accelerator_mib",
    "advise",
    "flops_of_example",
    "ideal_bubble",
    "ideal_bubbles",
    "is_remote",
    "layout_of",
    "name",
    "save_picture",
    "seconds",
    "statistics",
    "tokens_of_example",
    "typical",
]
