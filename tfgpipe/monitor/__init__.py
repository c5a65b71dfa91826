"""Numbers of a training: what `callbacks.PipelineMonitor` tells, and advice."""

from tfgpipe.monitor import device_memory
from tfgpipe.monitor.advice import (
    Layout,
    advise,
    ideal_bubble,
    ideal_bubbles,
    layout_of,
)
from tfgpipe.monitor.device_memory import accelerator_mib, peak_mib
from tfgpipe.monitor.event_log import (
    EventLog,
    Record,
    chrome_trace,
    plot_cells,
    save_picture,
)
from tfgpipe.monitor.measurements import (
    Measured,
    Rates,
    TimedStep,
    flops_of_example,
    tokens_of_example,
    typical,
)

__all__ = [
    "EventLog",
    "Layout",
    "Measured",
    "Rates",
    "Record",
    "TimedStep",
    "accelerator_mib",
    "advise",
    "chrome_trace",
    "device_memory",
    "flops_of_example",
    "ideal_bubble",
    "ideal_bubbles",
    "layout_of",
    "peak_mib",
    "plot_cells",
    "save_picture",
    "tokens_of_example",
    "typical",
]
