"""Loss and metrics of a mini-batch, and where its gradients start."""

from tfgpipe.loss.objective import (
    Objective,
    SummedLoss,
    WholeMiniBatchLoss,
    add_direct,
)
from tfgpipe.loss.row_wise import has_own_scale, loss_obstacle, metrics_add_up
