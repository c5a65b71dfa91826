"""What a layer costs by what the user says; a batch of one example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import keras

from tfgpipe.checks import is_amount

Cost: TypeAlias = float | Callable[[keras.layers.Layer, Any], float]


def resolve_cost(
    layer: keras.layers.Layer, cost: Cost, input_spec: Any
) -> float:
    """What a layer costs by what the user gave, in the unit of that.

    `cost` is a finite number from 0, or a function of the layer and
    `input_spec`, a nest of `keras.KerasTensor`, that returns one.

    Raises:
        ValueError: If it is something else, or the function fails.

    Example:

    >>> spec = keras.KerasTensor((None, 3))
    >>> resolve_cost(keras.layers.Dense(4), lambda layer, x: layer.units, spec)
    4.0
    """
    if not callable(cost):
        if is_amount(cost):
            return float(cost)
        raise _bad_cost(layer, f"cost={cost!r}")
    try:
        value = cost(layer, input_spec)
    except Exception as error:
        raise _bad_cost(
            layer,
            "its function, called for an input of shape "
            f"{_shapes(input_spec)}, raised {type(error).__name__}: {error}",
        ) from error
    if is_amount(value):
        return float(value)
    raise _bad_cost(layer, f"its function returned {value!r}")


def _bad_cost(layer: keras.layers.Layer, received: str) -> ValueError:
    return ValueError(
        f"`cost` of layer '{layer.name}' must be a finite number that is not "
        "negative, or a function of (layer, input spec) that returns one. "
        f"Received: {received}. "
        "Pass the layer without a cost to have its FLOPs estimated."
    )


def _shapes(input_spec: Any) -> Any:
    return keras.tree.map_structure(
        lambda x: getattr(x, "shape", None), input_spec
    )


def example_of(spec: Any, rows: int = 1, size: int | None = None) -> Any:
    """A nest of specs of batches, as those of batches of so many rows.

    Sizes that are not known become `size`.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, keras.KerasTensor) or not leaf.shape:
            return leaf
        sizes = [size if d is None else d for d in leaf.shape[1:]]
        return keras.KerasTensor((rows, *sizes), leaf.dtype)

    return keras.tree.map_structure(one, spec)
