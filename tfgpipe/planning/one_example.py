"""Estimates the floating-point operations (FLOPs) of a layer on one example.

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
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.planning.flops import graph_flops


class Estimate(NamedTuple):
    """What a layer does with one example.

    Attributes:
        flops: Floating-point operations.
        outputs: Specs of its outputs, a nest, or None if they are not known.
    """

    flops: float
    outputs: Any


def example_of(spec: Any) -> Any:
    """A nest of specs of batches, as those of batches of one row."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, keras.KerasTensor) or not leaf.shape:
            return leaf
        return keras.KerasTensor((1, *leaf.shape[1:]), leaf.dtype)

    return keras.tree.map_structure(one, spec)


def goes_on(step: Any, live: Any, made: Any, spec: Any) -> Any:
    """What goes on of one example, as far as it is known.

    Args:
        step: The `cells.GraphStep` that made something of it; None for a layer
            that is called on all that is alive.
        live: Specs of what it took, a nest.
        made: Those of what it made, a nest, or None.
        spec: Those of what goes on of a batch, a nest.
    """
    if step is not None:
        given, outputs = keras.tree.flatten(live), keras.tree.flatten(made)
        none = made is None
        made = step.goes_on(
            lambda i: given[i], lambda i: None if none else outputs[i]
        )
    expected = example_of(spec)
    found, leaves = keras.tree.flatten(made), keras.tree.flatten(expected)
    if len(found) != len(leaves):
        return expected
    return keras.tree.pack_sequence_as(
        expected, [_merged(*pair) for pair in zip(found, leaves)]
    )


def _merged(made: Any, expected: Any) -> Any:
    """A leaf that was made; of sizes that are not known, only the first."""
    if made is None or expected is None or not made.shape:
        return expected
    if len(made.shape) != len(expected.shape):
        return expected
    pairs = zip(made.shape[1:], expected.shape[1:])
    sizes = [None if known is None else size for size, known in pairs]
    return keras.KerasTensor((made.shape[0], *sizes), made.dtype)


def estimate_of(
    layer: keras.layers.Layer, example: Any, call: Callable
) -> Estimate:
    """Traces a layer.

    Args:
        layer: The layer.
        example: Nest of `keras.KerasTensor` that it is called on.
        call: Calls it, on the inputs alone.

    Raises:
        ValueError: If it fails.
    """
    failure: Any = None
    # Unknown sizes count as 1, but a 3x3 convolution, say, fails on an image
    # of one pixel: then they stay unknown.
    for unknown in (1, None):
        try:
            graph, outputs = traced(call, example, unknown)
        except Exception as error:
            failure = error
        else:
            return Estimate(graph_flops(graph), outputs)
    batch = keras.tree.map_structure(
        lambda t: None if t is None else (None, *t.shape[1:]), example
    )
    raise ValueError(
        f"Layer '{layer.name}' ({type(layer).__name__}) failed in its `call`, "
        "with training=True, on one example of inputs of shape "
        f"{batch}. Received: this {type(failure).__name__}: "
        f"{failure}\nCorrect the layer; if it is right and needs more than "
        "one example, pass the pair `(layer, cost)` instead of it, so that it "
        "is not called to estimate its FLOPs."
    ) from failure


def traced(call: Callable, spec: Any, unknown: int | None) -> tuple[Any, Any]:
    """Calls a layer in a graph that never runs.

    Args:
        call: The layer, or a function that calls it.
        spec: Nest of `keras.KerasTensor` that it is called on.
        unknown: What sizes are that are not known, or None.

    Returns:
        The graph, and specs of the outputs.
    """
    found: list[Any] = []

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, keras.KerasTensor):
            return leaf
        shape = [unknown if size is None else size for size in leaf.shape]
        return tf.compat.v1.placeholder(leaf.dtype, shape)

    def run() -> list[Any]:
        inputs = keras.tree.map_structure(placeholder, spec)
        with _PlaceholderScope(tf.compat.v1.get_default_graph()):
            outputs = call(inputs, training=True)
        found.append(keras.tree.map_structure(_spec_of, outputs))
        return [t for t in keras.tree.flatten(outputs) if tf.is_tensor(t)]

    with internals.random_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real calls will warn
        function = tf.function(run, autograph=False).get_concrete_function()
    return function.graph, found[-1]


def _spec_of(leaf: Any) -> Any:
    """That of a tensor of known rank, or None."""
    if not tf.is_tensor(leaf) or leaf.shape.rank is None:
        return None
    return keras.KerasTensor(tuple(leaf.shape), leaf.dtype.name)


class _PlaceholderScope(internals.ReadingScope):
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
