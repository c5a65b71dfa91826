"""What layers cost: FLOPs, bytes, and what they keep for the backward pass."""

from tfgpipe.costs.activations import (
    Activation,
    StepMemory,
    kept_sizes,
    memory_of_steps,
)
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
    "Activation",
    "LayerSize",
    "Placed",
    "StepMemory",
    "bytes_between",
    "example_of",
    "kept_sizes",
    "layer_sizes",
    "memory_of_steps",
    "num_params",
    "row_bytes",
    "slot_bytes_of",
    "weight_sizes",
    "with_weights",
]
