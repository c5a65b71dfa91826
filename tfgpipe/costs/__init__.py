"""What layers cost: FLOPs, bytes, and what they keep for the backward pass."""

from tfgpipe.costs.gradient_path import GradientPaths
from tfgpipe.costs.layer_size import (
    LayerSize,
    bytes_between,
    layer_sizes,
    num_params,
    row_bytes,
    slot_bytes_of,
    weight_sizes,
    with_weights,
)
from tfgpipe.costs.placed import Placed, example_of

__all__ = [
    "GradientPaths",
    "LayerSize",
    "Placed",
    "bytes_between",
    "example_of",
    "layer_sizes",
    "num_params",
    "row_bytes",
    "slot_bytes_of",
    "weight_sizes",
    "with_weights",
]
