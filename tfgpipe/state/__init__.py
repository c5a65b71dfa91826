"""Variables that no optimizer updates, over micro-batches."""

from tfgpipe.state.batch_normalization import (
    MovingStatistics,
    choosing_moments,
    is_synchronized,
)
from tfgpipe.state.flow import StateFlow
from tfgpipe.state.rules import (
    RandomState,
    seeds_expected,
    sum_of,
    weighted_mean,
)
from tfgpipe.state.scope import InnerScope, ModelScope, Use

__all__ = [
    "InnerScope",
    "ModelScope",
    "MovingStatistics",
    "RandomState",
    "StateFlow",
    "Use",
    "choosing_moments",
    "is_synchronized",
    "seeds_expected",
    "sum_of",
    "weighted_mean",
]
