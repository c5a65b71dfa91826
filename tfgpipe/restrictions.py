"""Refuses layers that a pipeline cannot train as Keras would."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfgpipe import internals
from tfgpipe.moments import is_synchronized


def check_supported(
    layers: Sequence[keras.layers.Layer],
    num_micro_batches: int,
    num_replicas: int = 1,
) -> None:
    """Refuses layers that a pipeline would change the meaning of.

    Args:
        layers: Built or not; what a layer makes when it is built is not seen
            before.
        num_micro_batches: M.
        num_replicas: R.

    Raises:
        ValueError: If there is one.
    """
    for layer in layers:
        for inner in internals.flat_layers(layer):
            if reason := _unsupported(inner, num_micro_batches, num_replicas):
                raise ValueError(
                    "A layer must treat micro-batches as it treats their "
                    f"mini-batch. Received: layer '{inner.name}' with {reason}"
                )


def _unsupported(
    layer: keras.layers.Layer, num_micro_batches: int, num_replicas: int
) -> str | None:
    """What of the layer does not go with a pipeline, or None."""
    is_split = num_micro_batches * num_replicas > 1
    if is_split and getattr(layer, "renorm", False) is True:
        return (
            "renorm=True, which normalises by its moving statistics, and "
            f"num_micro_batches={num_micro_batches}"
            + (f" in {num_replicas} replicas" if num_replicas > 1 else "")
            + ". Pass renorm=False, or num_micro_batches=1"
            + (" and no replicas." if num_replicas > 1 else ".")
        )
    if num_replicas > 1 and is_synchronized(layer) and _is_foreign(layer):
        return (
            "synchronized=True, which takes moments over replicas, and "
            f"{num_replicas} replicas. Pass synchronized=False, or use a "
            "`keras.layers.BatchNormalization`, which computes its moments "
            "in Keras's way."
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


def _is_foreign(layer: keras.layers.Layer) -> bool:
    """Whether nothing is known of how a layer computes moments."""
    known = isinstance(layer, keras.layers.BatchNormalization)
    return not known or internals.has_own_moments(layer)
