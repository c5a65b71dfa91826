"""Variables that no optimizer updates, over micro-batches."""

from tfgpipe.state.batch_normalization import (
    MovingStatistics,
    is_synchronized,
    sum_of,
    warn_of_single_values,
)
from tfgpipe.state.flow import RandomState, StateFlow, weighted_mean
from tfgpipe.state.scope import InnerScope, ModelScope, Use
