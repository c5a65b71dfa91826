"""What a layer costs; a layer with one example; which layers are equal.

A layer's floating-point operations (FLOPs) are estimated on one example.
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

import hashlib
import json
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import LayerCall
from tfgpipe.checks import is_amount
from tfgpipe.costs.flops import graph_flops

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


def estimated(call: LayerCall, example: Any, known: dict[Any, Any]) -> Estimate:
    """Estimates a layer for what layers before have made of one example.

    That may be several rows by now. A layer that fails on it may train all the
    same, on more examples: it is taken to multiply and add once by each of its
    weights. `known` is read and added to: with one dict, at first empty, for a
    model, layers of one class, config, input and variable shapes are traced
    once.
    """
    key = key_of(call, example)
    if key in known:
        return known[key]
    try:
        known[key] = estimate_of(call, example)
    except ValueError:
        sizes = [math.prod(v.shape) for v in call.layer.weights]
        return Estimate(2.0 * sum(sizes), None)
    return known[key]


def _shapes(input_spec: Any) -> Any:
    return keras.tree.map_structure(
        lambda x: getattr(x, "shape", None), input_spec
    )


def key_of(call: LayerCall, input_spec: Any) -> Any:
    """What calls of equal layers on equal inputs have in common.

    A configuration that no file can hold says too little: then it is the layer
    itself. It is more exact than `layer_key`, where names do not count.
    """
    called = call.operation
    inputs = keras.tree.map_structure(
        lambda x: (getattr(x, "shape", None), getattr(x, "dtype", None)),
        input_spec,
    )
    try:
        config = {**called.get_config(), "name": None}
        text = json.dumps(config, sort_keys=True)
    except Exception:  # a user's method may raise anything
        return id(called), call.wiring, str(inputs)
    variables = [(tuple(v.shape), v.dtype) for v in call.layer.variables]
    return type(called), text, call.wiring, str(variables), str(inputs)


class Estimate(NamedTuple):
    """What a layer does with one example.

    Attributes:
        outputs: Specs of its outputs, a nest, or None if they are not known.
    """

    flops: float
    outputs: Any


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


def goes_on(call: LayerCall, live: Any, made: Any, spec: Any) -> Any:
    """Specs of what goes on of one example, as far as it is known.

    All are nests: `live` of what was alive before the call, `made` of what it
    made, or None, `spec` of what goes on of a batch.
    """
    made = call.specs_behind(live, made)
    expected = example_of(spec)
    found, leaves = keras.tree.flatten(made), keras.tree.flatten(expected)
    if len(found) != len(leaves):
        return expected
    return keras.tree.pack_sequence_as(
        expected, [_known_sizes(*pair) for pair in zip(found, leaves)]
    )


def _known_sizes(made: Any, expected: Any) -> Any:
    """A leaf that was made; of sizes that are not known, only the first."""
    if made is None or expected is None or not made.shape:
        return expected
    if len(made.shape) != len(expected.shape):
        return expected
    pairs = zip(made.shape[1:], expected.shape[1:])
    sizes = [None if known is None else size for size, known in pairs]
    return keras.KerasTensor((made.shape[0], *sizes), made.dtype)


def estimate_of(call: LayerCall, example: Any) -> Estimate:
    """Traces a layer, for a nest of `keras.KerasTensor` of one example.

    Raises:
        ValueError: If it fails.
    """
    layer = call.layer
    failure: Any = None
    # Unknown sizes count as 1, but a 3x3 convolution, say, fails on an image
    # of one pixel: then they stay unknown.
    for unknown in (1, None):
        try:
            graph, outputs = traced(call.run, example, unknown)
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
    """The graph of a layer's call, which never runs, and its outputs' specs.

    Sizes that are not known are `unknown`, or stay so if that is None.
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


def layer_key(call: LayerCall) -> str:
    """What layers of one class, configuration and shapes of weights share.

    Names are left out, those of layers inside it too: Keras counts layers on
    where they are made again. Of a layer without a configuration that a file
    can hold, only class and weights are compared. The layer is built.
    """
    weights = [
        (list(v.shape), v.dtype, v.trainable) for v in call.layer.weights
    ]
    config, cls = _config(call.operation), type(call.operation)
    facts = [cls.__module__, cls.__qualname__, config, weights, call.wiring]
    text = json.dumps(facts, sort_keys=True)
    return f"{cls.__name__} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _config(called: Any) -> Any:
    try:
        config = called.get_config()
        json.dumps(config)
    except Exception:  # a user's method may raise anything
        return None
    names = dict.fromkeys(_names(config))
    return _renamed(config, {name: f"#{i}" for i, name in enumerate(names)})


def _names(value: Any) -> list[str]:
    """The names in a configuration, in the order of its layers."""
    if isinstance(value, dict):
        name = value.get("name")
        own = [name] if isinstance(name, str) else []
        return own + [n for k in sorted(value) for n in _names(value[k])]
    if isinstance(value, (list, tuple)):
        return [name for one in value for name in _names(one)]
    return []


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """The same, with other names wherever they stand."""
    if isinstance(value, dict):
        return {key: _renamed(own, names) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(own, names) for own in value]
    return names.get(value, value) if isinstance(value, str) else value
