"""Which layers of a model have columns, for `shards`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from keras import layers as kl


def shards_of(layers: Iterable[Any], devices: Sequence[str], count: int) -> Any:
    """Devices by the names of all layers that have so many columns."""
    return {
        layer.name: [*devices]
        for layer in layers
        if isinstance(layer, kl.Layer)
        and layer.dtype_policy.quantization_mode is None
        and _num_columns(layer) >= count
    }


def _num_columns(layer: Any) -> int:
    call = type(layer).call
    if call is kl.Dense.call:
        return int(layer.units)
    if call is kl.EinsumDense.call:
        return min(n or 1 for n in layer.partial_output_shape)
    if call is kl.MultiHeadAttention.call:
        return 0 if layer.dropout else int(layer.num_heads)
    tables = kl.Embedding, getattr(kl, "ReversibleEmbedding", kl.Embedding)
    return int(layer.output_dim) if call in [t.call for t in tables] else 0
