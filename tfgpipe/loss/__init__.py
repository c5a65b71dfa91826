"""Loss and metrics of a mini-batch, and where its gradients start."""

from tfgpipe.loss.head import Head
from tfgpipe.loss.objective import Objective, SummedLoss, add_direct
from tfgpipe.loss.row_wise import has_own_scale, streams_loss, streams_metrics
from tfgpipe.loss.whole_mini_batch import WholeMiniBatchLoss

__all__ = [
    "Head",
    "Objective",
    "SummedLoss",
    "WholeMiniBatchLoss",
    "add_direct",
    "has_own_scale",
    "streams_loss",
    "streams_metrics",
]
