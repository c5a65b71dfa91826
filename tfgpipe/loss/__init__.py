"""Loss and metrics of a mini-batch, and where its gradients start."""

from tfgpipe.loss.objective import (
    Objective,
    SummedLoss,
    WholeMiniBatchLoss,
    add_direct,
    penalties,
)
from tfgpipe.loss.row_wise import has_own_scale, loss_adds_up, metrics_add_up
