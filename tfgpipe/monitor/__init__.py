"""Numbers of a training: what `callbacks.PipelineMonitor` tells, and advice."""

from tfgpipe.monitor.advice import (
    Layout,
    advise,
    ideal_bubble,
    layout_of,
)
from tfgpipe.monitor.measurements import (
    EventLog,
    Measured,
    Rates,
    TimedStep,
    accelerator_mib,
    flops_of_example,
    host_bytes,
    peak_mib,
    plot_cells,
    save_picture,
    tokens_of_example,
    typical,
)
