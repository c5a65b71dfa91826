"""Finds out what layers return and cost, before they have any variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfgpipe import internals
from tfgpipe.cells import shapes
from tfgpipe.planning import PlacedStep, one_example
from tfgpipe.planning import cost as cost_lib
from tfgpipe.sequence.restrictions import check_rows_stay


def infer(
    layers: Sequence[keras.layers.Layer],
    costs: Sequence[Any],
    spec: Any,
    is_split: bool,
) -> tuple[Any, list[float]]:
    """Builds layers, each for the outputs of the one before.

    Their variables get no storage yet.

    Args:
        layers: The layers, in order.
        costs: For each what the user said of its cost, or None.
        spec: Nest of `keras.KerasTensor`s: what the first layer takes.
        is_split: Whether mini-batches are split into several micro-batches.

    Returns:
        What the last layer returns, a nest of `keras.KerasTensor`s, and the
        costs of the layers.

    Raises:
        ValueError: If a layer does not take what the one before returns, or
            its outputs have no row for each row of its inputs.
    """
    before = "the model's inputs"
    found = []
    known: dict[Any, Any] = {}  # equal layers are estimated once
    example = one_example.example_of(spec)
    with (
        internals.deferred_variables(),
        internals.tracing_anew(),
        internals.in_no_graph(layers),
    ):
        for layer, cost in zip(layers, costs):
            output = _called(layer, spec, before)
            if is_split:
                check_rows_stay(layer, spec, output, layer is layers[-1])
            if cost is None:
                made = cost_lib.estimated(layer, example, known, None)
            else:
                value = cost_lib.resolve_cost(layer, cost, spec)
                made = one_example.Estimate(value, None)
            found.append(made.flops)
            example = one_example.goes_on(None, example, made.outputs, output)
            spec, before = output, f"the outputs of layer '{layer.name}'"
    return spec, found


def placed_steps(
    layers: Sequence[keras.layers.Layer], spec: Any
) -> tuple[list[PlacedStep], Any]:
    """What comes into each layer; of equal ones, only the first is built.

    Args:
        layers: The layers, in order.
        spec: As for `infer`.

    Returns:
        A step for each layer, and what the last one returns.
    """
    before = "the model's inputs"
    steps = []
    known: dict[Any, Any] = {}
    with (
        internals.deferred_variables(),
        internals.tracing_anew(),
        internals.in_no_graph(layers),
    ):
        for layer in layers:
            key = cost_lib.key_of(layer, spec, None)
            key = id(layer) if key is None else key
            if key not in known:
                known[key] = _called(layer, spec, before)
            steps.append(PlacedStep(layer, spec, key))
            spec, before = known[key], f"the outputs of layer '{layer.name}'"
    return steps, spec


def _called(layer: keras.layers.Layer, spec: Any, before: str) -> Any:
    """What a layer returns for what comes before it."""
    try:
        try:
            return layer(spec)
        except NotImplementedError:  # Keras tries a `Lambda` on floats only
            return one_example.traced(layer, spec, None)[1]
    except Exception as error:
        raise ValueError(
            f"Layer '{layer.name}' must accept {before}. Received: tensors of "
            f"shape {shapes(spec)}, and this {type(error).__name__}: {error}\n"
            "Check the order of the layers and their sizes. If `call` needs "
            "values of tensors or raises this on purpose, give the layer a "
            "`compute_output_spec`."
        ) from error
