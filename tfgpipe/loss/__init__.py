"""Loss and metrics of a mini-batch, and where its gradients start."""

from tfgpipe.loss.head import Head
from tfgpipe.loss.objective import Objective
from tfgpipe.loss.row_wise import streams_loss, streams_metrics

__all__ = ["Head", "Objective", "streams_loss", "streams_metrics"]
