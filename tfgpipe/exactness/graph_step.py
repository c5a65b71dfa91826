"""The step that `fit` runs, beside the same one by layers.

It is traced as for `fit`, and tells its gradients. Given these, Keras's
optimizer updates the same variables on the host:

    graph step      gradients --> weights, slots
                        |              |
    layers, Keras   gradients      weights', slots'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.exactness.difference import (
    limit_of,
    of_change,
    of_outputs,
)
from tfgpipe.exactness.layers import OnHost
from tfgpipe.exactness.parts import HOST
from tfgpipe.exactness.recorder import Recorded
from tfgpipe.exactness.report import Tally
from tfgpipe.exactness.weights import Gradients, Places, compare_weights


class GraphStep(NamedTuple):
    """A training step in a graph, and what it has left.

    Attributes:
        logs: What `fit` would show.
        pairs: Gradients, or None, and their weights.
        before: Values of all variables, by id.
        after: The same after the step.
    """

    logs: Mapping[str, Any]
    pairs: Gradients
    before: Mapping[int, np.ndarray]
    after: Mapping[int, np.ndarray]


def run_graph_step(model: Any, data: tuple[Any, Any, Any]) -> GraphStep:
    """Trains on a mini-batch, as `fit` does."""
    told: list[Any] = []
    train_step = model.train_step

    def step(batch: Any) -> Any:
        with model.telling_gradients(told.append):
            logs = train_step(batch)
        return logs, [d for d, _ in told[-1]] if told else []

    packed = keras.utils.pack_x_y_sample_weight(*data)
    packed = packed if isinstance(packed, tuple) else (packed,)
    before = _values(model)
    with model.nothing_eager():
        function = model.train_function_of(step)
        logs, gradients = function(iter([packed]))
    variables = [v for _, v in told[-1]] if told else []
    return GraphStep(logs, [*zip(gradients, variables)], before, _values(model))


def _values(model: Any) -> dict[int, np.ndarray]:
    return {id(v): v.numpy() for v in _variables(model)}


def _variables(model: Any) -> list[keras.Variable]:
    return [
        *model.variables,
        *model.metrics_variables,
        *_of_optimizer(model),
    ]


def _of_optimizer(model: Any) -> list[keras.Variable]:
    optimizer = model.optimizer
    return [*optimizer.variables, *internals.unlisted(optimizer)]


def compare_step(
    tally: Tally,
    places: Places,
    step: GraphStep,
    total: tf.Tensor,
    pairs: Gradients,
    sums_in: str | None,
) -> None:
    """Compares the step in the graph with the one by layers.

    Args:
        tally: Takes the comparisons.
        places: Where the weights are.
        step: The step in the graph.
        total: The loss by layers.
        pairs: The gradients by layers.
        sums_in: In which dtype gradients are summed, or None.
    """
    if "loss" in step.logs:
        difference = of_outputs([step.logs["loss"]], [total])
        tally.note("step", "the graph", "loss", difference, places.worst)
    expected = {id(v): d for d, v in pairs}
    compare_weights(tally, "step", places, step.pairs, expected, sums_in)


def compare_update(
    tally: Tally,
    model: Any,
    places: Places,
    step: GraphStep,
    assigned: Mapping[int, Any],
) -> None:
    """Compares what the graph has made of weights and slots with Keras.

    Args:
        tally: Takes the comparisons.
        model: The `GPipe`, with the variables that it had before the step.
        places: Where the weights are.
        step: The step in the graph.
        assigned: What layers themselves assign, by id.
    """
    optimizer = model.optimizer
    weights = model.trainable_variables
    with tf.device(HOST), internals.without_all_reduce(optimizer):
        for weight in weights:
            if id(weight) in assigned:
                weight.assign(assigned[id(weight)])
        optimizer.apply_gradients(step.pairs)
    for variable in [*weights, *_of_optimizer(model)]:
        key = id(variable)
        difference = of_change(
            step.after[key], variable.numpy(), step.before[key]
        )
        limit = limit_of([variable.dtype])
        tally.note("update", places.name(variable), "update", difference, limit)


def compare_state(
    tally: Tally,
    places: Places,
    step: GraphStep,
    recorded: Recorded,
    on_host: OnHost,
) -> None:
    """Compares what the graph has made of other variables with Keras.

    Args:
        tally: Takes the comparisons.
        places: Where the variables are.
        step: The step in the graph.
        recorded: The layers.
        on_host: What they have come to on the host.
    """
    state = {
        id(v): v
        for place, _ in recorded
        for v in place.own_variables
        if not v.trainable
    }
    seeds = {id(v) for place, _ in recorded for v in place.cell.seeds}
    for key, variable in state.items():
        if key in seeds | on_host.unknown:
            continue
        before = step.before[key]
        expected = on_host.assigned.get(key, before)
        scale = places.scale(variable)
        difference = of_change(step.after[key], expected, before, scale)
        limit = places.limit(variable)
        tally.note("state", places.name(variable), "value", difference, limit)
