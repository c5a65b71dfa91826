"""What text generation and beam search have in common."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def num_devices(layers: Sequence[layers.Layer]) -> int:
    """How many devices have weights of layers."""
    return len({w.value.device for layer in layers for w in layer.weights})


def device_of(layer: layers.Layer) -> Any:
    """A context for the device of a layer's weights.

    A pipeline's layers are on several devices. Inside the context, operations
    run where the weights are.

    Args:
        layer: A layer that is built.

    Returns:
        The context; it does nothing for a layer without weights.
    """
    weights = layer.weights
    return tf.device(weights[0].value.device if weights else None)


def empty_caches(layers: Sequence[layers.Layer], num_rows: Any) -> list[Any]:
    """Caches before the first position, on the devices of their layers."""
    found = []
    for layer in layers:
        with device_of(layer):
            found.append(layer.empty_cache(num_rows))
    return found


def in_groups(
    function: Callable[[Any, Any], Any], rows: Any, num_groups: int
) -> Any:
    """Joins nests (rows, ...) that a function returns of groups of rows.

    Args:
        function: Takes the first row of a group, and the one behind its last.
        rows: How many there are. If fewer than groups, some have none.
        num_groups: How many groups.
    """
    ends = [rows * m // num_groups for m in range(num_groups + 1)]
    found = [function(*pair) for pair in itertools.pairwise(ends)]
    return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *found)


def growing(kept: Any) -> Any:
    """Shapes of what a loop carries for caches, whose axis 1 may grow."""
    return keras.tree.map_structure(
        lambda x: tf.TensorShape(
            [None if axis == 1 else n for axis, n in enumerate(x.shape)]
        ),
        kept,
    )


def check_layers(
    found: Sequence[layers.Layer], expected: Sequence[type], maker: str
) -> None:
    """Checks that layers are those of one of the models.

    Args:
        found: The layers.
        expected: The class of each.
        maker: What makes such a list, for the error.

    Raises:
        ValueError: If they are not, or are not built.
    """
    kinds = [type(layer) for layer in found]
    if kinds != list(expected):
        raise ValueError(
            f"`layers` must be all layers that `{maker}` made. Received: "
            f"layers of the classes {[kind.__name__ for kind in kinds]}. "
            "Pass `model.layers`."
        )
    unbuilt = [layer.name for layer in found if not layer.built]
    if unbuilt:
        raise ValueError(
            "`layers` must have weights. Received: layers that are not built: "
            f"{unbuilt}. Call the model on data first, or load its weights."
        )


def checked_ids(argument: str, ids: Any, shape: str) -> np.ndarray:
    """Checks token ids that a user gave.

    Args:
        argument: What the argument is called, for the error.
        ids: The token ids.
        shape: What its two axes are, for the error.

    Returns:
        Array of int32, with at least one row and one column.

    Raises:
        ValueError: If they are not integers of that shape.
    """
    array = np.asarray(ids)
    if array.ndim != 2 or not array.size or array.dtype.kind not in "iu":
        raise ValueError(
            f"`{argument}` must be integers of shape ({shape}), at least one "
            f"of each. Received: shape {array.shape} of {array.dtype}."
        )
    return array.astype(np.int32)


def at_least_float32(x: Any) -> Any:
    """Casts a tensor of lower precision to float32."""
    dtype = keras.backend.result_type(x.dtype, "float32")
    return keras.ops.cast(x, dtype)
