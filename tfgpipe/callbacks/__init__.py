"""Callbacks for the `fit` of a `GPipe`."""

from tfgpipe.callbacks.checkpoint import Checkpoint
from tfgpipe.callbacks.pipeline_monitor import PipelineMonitor
from tfgpipe.callbacks.stop_on_nonfinite import StopOnNonFinite

__all__ = ["Checkpoint", "PipelineMonitor", "StopOnNonFinite"]
