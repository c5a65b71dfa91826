"""Refuses layers that a pipeline cannot train as Keras would."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfgpipe import internals


def check_supported(
    layers: Sequence[keras.layers.Layer], num_micro_batches: int
) -> None:
    """Refuses layers that a pipeline would change the meaning of.

    Args:
        layers: Built or not; what a layer makes when it is built is not seen
            before.
        num_micro_batches: M.

    Raises:
        ValueError: If there is one.
    """
    for layer in layers:
        for inner in internals.flat_layers(layer):
            if reason := _unsupported(inner, num_micro_batches):
                raise ValueError(
                    "A layer must treat micro-batches as it treats their "
                    f"mini-batch. Received: layer '{inner.name}' with {reason}"
                )


def _unsupported(
    layer: keras.layers.Layer, num_micro_batches: int
) -> str | None:
    """What of the layer does not go with a pipeline, or None."""
    if num_micro_batches > 1 and getattr(layer, "renorm", False) is True:
        return (
            "renorm=True, which normalises by its moving statistics, and "
            f"num_micro_batches={num_micro_batches}. Pass renorm=False, or "
            "num_micro_batches=1."
        )
    if getattr(layer, "stateful", False) is True:
        return (
            "stateful=True, which keeps a state for every row of a batch. "
            "Pass stateful=False."
        )
    if internals.remat_mode(layer) is not None:
        return (
            "a `keras.RematScope` around it, which recomputes the layer in "
            "its own way. Make the layer outside of the scope, and choose "
            "what is recomputed with `remat`."
        )
    return None
