"""What a layer costs: as given, or its floating-point operations (FLOPs).

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), sections 2.1
and 2.2, balances cells by such an estimate of each layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import keras

from tfgpipe.checks import is_amount
from tfgpipe.planning.one_example import Estimate, estimate_of, example_of

Cost: TypeAlias = float | Callable[[keras.layers.Layer, Any], float]


def resolve_cost(
    layer: keras.layers.Layer, cost: Cost, input_spec: Any
) -> float:
    """Returns what a layer costs by what the user gave.

    Args:
        layer: The layer.
        cost: A finite number that is not negative, in any unit; or a function
            of the layer and `input_spec` that returns one.
        input_spec: Nest of `keras.KerasTensor` that the layer is called on.

    Returns:
        The cost, in the unit of what was given.

    Raises:
        ValueError: If that is not a finite number from 0, or the function
            fails.

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


def layer_flops(layer: keras.layers.Layer, input_spec: Any) -> float:
    """Estimates the FLOPs of a layer's forward pass for one example.

    Args:
        layer: A layer that is built; its variables need no values yet.
        input_spec: Nest (tensor, tuple, list, dict; None as a leaf) of
            `keras.KerasTensor` that the layer is called on, whose first
            dimension is the batch.

    Returns:
        Floating-point operations of one example.

    Raises:
        ValueError: If the layer is not built, or fails on one example.

    Example:

    >>> layer = keras.layers.Dense(4, use_bias=False)
    >>> layer.build((None, 3))
    >>> layer_flops(layer, keras.KerasTensor((None, 3)))
    24.0
    """
    if not layer.built:
        raise ValueError(
            f"Layer '{layer.name}' must be built before its FLOPs can be "
            f"estimated. Received: a {type(layer).__name__} without variables. "
            "Call `layer.build(input_shape)`, or call the layer, first."
        )
    return estimate_of(layer, example_of(input_spec), layer).flops


def estimated(
    layer: keras.layers.Layer, example: Any, known: dict[Any, Any], step: Any
) -> Estimate:
    """As `layer_flops`, for what layers before have made of one example.

    A layer that fails on it may train all the same, on more examples: it is
    taken to multiply and add once by each of its weights.

    Args:
        layer: A layer that is built; its variables need no values yet.
        example: Nest of `keras.KerasTensor` of one example, which may be
            several rows by now.
        known: Estimates made before, which this call reads and adds to. Pass
            the same (at first empty) dict for all layers of a model, and
            layers of one class, config, input and variable shapes are traced
            once.
        step: The `cells.GraphStep` that calls it, on arguments by position;
            None for a layer that is called on the inputs alone.
    """
    key = key_of(layer, example, step)
    if key is not None and key in known:
        return known[key]
    try:
        made = estimate_of(layer, example, layer if step is None else step.run)
    except ValueError:
        sizes = [math.prod(v.shape) for v in layer.weights]
        return Estimate(2.0 * sum(sizes), None)
    if key is not None:
        known[key] = made
    return made


def _shapes(input_spec: Any) -> Any:
    return keras.tree.map_structure(
        lambda x: getattr(x, "shape", None), input_spec
    )


def key_of(layer: keras.layers.Layer, input_spec: Any, step: Any) -> Any:
    """What equal layers have in common, or None if that cannot be told."""
    called = layer if step is None else step.operation
    wiring = None if step is None else str((step.args, step.kwargs))
    try:
        config = {**called.get_config(), "name": None}
        text = json.dumps(config, sort_keys=True)
    except Exception:  # a user's method may raise anything; then: no sharing
        return None
    variables = [(tuple(v.shape), v.dtype) for v in layer.variables]
    inputs = keras.tree.map_structure(
        lambda x: (getattr(x, "shape", None), getattr(x, "dtype", None)),
        input_spec,
    )
    return type(called), text, wiring, str(variables), str(inputs)
