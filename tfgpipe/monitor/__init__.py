"""Numbers of a training: what `callbacks.PipelineMonitor` tells, and advice."""

from tfgpipe.monitor import device_memory, timeline_text
from tfgpipe.monitor.advice import (
    Layout,
    advise,
    ideal_bubble,
    ideal_bubbles,
    layout_of,
)
from tfgpipe.monitor.event_log import EventLog, Record, save_picture
from tfgpipe.monitor.measurements import (
    Measured,
    Rates,
    TimedStep,
    accelerator_mib,
    flops_of_example,
    is_remote,
    peak_mib,
    tokens_of_example,
    typical,
)
from tfgpipe.monitor.plot_cells import plot_cells

__all__ = [
    "EventLog",
    "Layout",
    "Measured",
    "Rates",
    "Record",
    "TimedStep",
    "accelerator_mib",
    "advise",
    "device_memory",
    "flops_of_example",
    "ideal_bubble",
    "ideal_bubbles",
    "is_remote",
    "layout_of",
    "peak_mib",
    "plot_cells",
    "save_picture",
    "timeline_text",
    "tokens_of_example",
    "typical",
]
