"""Costs of layers: FLOPs, bytes, activations."""

from tfgpipe.costs.activations import memory_of_steps
from tfgpipe.costs.layer_size import (
    bytes_between,
    layer_sizes,
    num_params,
    row_bytes,
    slot_bytes_of,
    weight_sizes,
    with_weights,
)
from tfgpipe.costs.placed import Placed, example_of
from tfgpipe.costs.sizes import (
    Activation,
    Bytes,
    KeptTensors,
    LayerSize,
    StepMemory,
    kept_sizes,
)

__all__ = [
    "Activation",
    "Bytes",
    "KeptTensors",
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
