"""Estimates what a layer costs, in floating-point operations (FLOPs).

Method: the layer's call is traced for one example into a graph of its own that
never runs, and the FLOPs of the operations that its outputs need are added up,
by the table in `flops.py`. So nested models, attention and custom layers need
no rule of their own. While tracing, every variable is a placeholder: nothing is
allocated, initialised or assigned, and no random state is used up.

Cost: one trace, 10 to 100 ms a layer; equal layers can share one.

Limits: the call is traced with `training=True` and without masks. A dimension
other than the batch that is unknown counts as 1, a loop whose number of
iterations is unknown runs once, and what Python or NumPy compute inside a
`tf.numpy_function` is not seen. FLOPs are not seconds: where that matters, pass
measured costs.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), sections 2.1
and 2.2, balances cells by such an estimate of each layer.
"""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.checks import is_amount
from tfgpipe.planning.flops import graph_flops

Cost: TypeAlias = float | Callable[[keras.layers.Layer, Any], float] | None


def resolve_cost(
    layer: keras.layers.Layer,
    cost: Cost,
    input_spec: Any,
    known: dict[Any, float] | None = None,
    step: Any = None,
) -> float:
    """Returns what a layer costs: as given, or else its estimated FLOPs.

    Args:
        layer: The layer; built, where its cost is to be estimated.
        cost: A finite number that is not negative, in any unit; or a function
            of the layer and `input_spec` that returns one; or None for the
            FLOPs of one example, see `layer_flops`.
        input_spec: Nest of `keras.KerasTensor` that the layer is called on.
        known: As for `layer_flops`.
        step: The same.

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
    if cost is None:
        return layer_flops(layer, input_spec, known, step)
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


def layer_flops(
    layer: keras.layers.Layer,
    input_spec: Any,
    known: dict[Any, float] | None = None,
    step: Any = None,
) -> float:
    """Estimates the FLOPs of a layer's forward pass for one example.

    Args:
        layer: A layer that is built; its variables need no values yet.
        input_spec: Nest (tensor, tuple, list, dict; None as a leaf) of
            `keras.KerasTensor` that the layer is called on, whose first
            dimension is the batch.
        known: Estimates made before, which this call reads and adds to. Pass
            the same (at first empty) dict for all layers of a model, and
            layers of one class, config, input and variable shapes are traced
            once.
        step: The `cells.GraphStep` that calls it, on arguments by position;
            None for a layer that is called on the inputs alone.

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
    call = layer if step is None else step.run
    key = None if known is None else key_of(layer, input_spec, step)
    if known is None or key is None:
        return _traced_flops(layer, input_spec, call)
    if key not in known:
        known[key] = _traced_flops(layer, input_spec, call)
    return known[key]


def _traced_flops(
    layer: keras.layers.Layer, input_spec: Any, call: Callable
) -> float:
    failure: Any = None
    # Unknown sizes count as 1, but a 3x3 convolution, say, fails on an image
    # of one pixel: then they stay unknown.
    for unknown in (1, None):
        try:
            graph = _trace(call, input_spec, unknown)
        except Exception as error:
            failure = error
        else:
            return graph_flops(graph)
    raise ValueError(
        f"Layer '{layer.name}' ({type(layer).__name__}) failed in its `call`, "
        "with training=True, on one example of inputs of shape "
        f"{_shapes(input_spec)}. Received: this {type(failure).__name__}: "
        f"{failure}\nCorrect the layer; if it is right and needs more than "
        "one example, pass the pair `(layer, cost)` instead of it, so that it "
        "is not called to estimate its FLOPs."
    ) from failure


def _trace(call: Callable, input_spec: Any, unknown: int | None) -> tf.Graph:
    def one_example(leaf: Any) -> Any:
        if not isinstance(leaf, keras.KerasTensor):
            return leaf
        sizes = [unknown if size is None else size for size in leaf.shape[1:]]
        shape = [1, *sizes] if leaf.shape else []
        return tf.compat.v1.placeholder(leaf.dtype, shape)

    def run() -> list[Any]:
        inputs = keras.tree.map_structure(one_example, input_spec)
        with _PlaceholderScope(tf.compat.v1.get_default_graph()):
            outputs = call(inputs, training=True)
        return [t for t in keras.tree.flatten(outputs) if tf.is_tensor(t)]

    with random_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real calls will warn
        return tf.function(run, autograph=False).get_concrete_function().graph


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


class _PlaceholderScope(keras.StatelessScope):
    """Inside, every variable without an update reads as a placeholder."""

    def __init__(self, graph: tf.Graph):
        super().__init__(initialize_variables=False)
        self._graph = graph
        self._placeholders: dict[tuple[int, str], tf.Tensor] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if value is not None:
            return value
        key = (id(variable), variable.dtype)  # which depends on autocasting
        if key not in self._placeholders:
            with self._graph.as_default():  # not in that of a loop's body
                self._placeholders[key] = tf.compat.v1.placeholder(
                    variable.dtype, variable.shape
                )
        return self._placeholders[key]


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Undoes what a trace does to the random state of Python, NumPy, Keras."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with internals.seed_generator_kept():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
