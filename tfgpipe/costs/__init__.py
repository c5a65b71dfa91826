"""Costs of layers: FLOPs, bytes, activations."""

from tfgpipe.costs.activations import kept_sizes, memory_of_steps
from tfgpipe.costs.layer_size import (
    Placed,
    example_of,
    layer_sizes,
    num_params,
    row_bytes,
    slot_bytes_of,
    weight_sizes,
    with_weights,
)
from tfgpipe.costs.sizes import Activation, Bytes, LayerSize, StepMemory
