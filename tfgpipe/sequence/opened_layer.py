"""Opens a layer that calls other layers: their calls take its place.

A backbone may hold all of its blocks in one layer, which would be one cell.
What the `call` of that layer does to symbolic tensors is a graph:

    encoder(x)    is    norm(block_1(block_0(x)))

It is opened only where that graph is all that it does, whenever it is called.
Mostly that is tried, see `layer_trial.py`. A trial does not tell whether a
value was read from a variable, which may have another one later; whether calls
inside lead nowhere, whose layers would be in no cell; and whether two of them
draw from one generator or have one state that they may assign. Then, too, the
layer stays closed, as where masks come in, or where its code fails on symbolic
tensors. Its calls come in the order in which its code makes them.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import keras
from keras import tree

from tfgpipe import internals
from tfgpipe.sequence.call import tensors_of
from tfgpipe.sequence.watched import unnoticed

# So that four cells of such layers can be even to a tenth.
SHARE = 1 / 40


def large_layers(model: keras.Model) -> set[int]:
    """The ids of layers that hold a good share of a model's weights."""
    total = _num_weights(model)
    return {
        id(layer)
        for layer in internals.flat_layers(model)
        if _num_weights(layer) > SHARE * total
    }


def graph_of(call: internals.GraphCall) -> keras.Model | None:
    """What a call of a layer does, as a functional model; yet to be tried.

    Args:
        call: The call of a layer in the graph of a model.

    Returns:
        A model of `tensors_of` the call. None if the layer stays closed.
    """
    if not _may_be_opened(call):
        return None
    with unnoticed(internals.flat_layers(call.operation)):
        return _called(call)


def _may_be_opened(call: internals.GraphCall) -> bool:
    """Whether a layer calls others in a way of its own, without masks."""
    layer = call.operation
    masks = map(internals.get_mask, tensors_of(call))
    return (
        len(internals.flat_layers(layer)) > 1
        and not internals.is_keras(type(layer).call)
        and internals.remat_mode(layer) is None
        and not internals.own_context_arguments(layer) & set(call.kwargs)
        and all(mask is None for mask in masks)
    )


class _UsageScope(keras.StatelessScope):
    """Notes whether a layer itself uses a variable.

    What the layers do that it calls, is in scopes of their own: a call of a
    layer on symbolic tensors runs in one.
    """

    is_used = False

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Called where a variable is read."""
        self.is_used = True
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Called by `Variable.assign`."""
        self.is_used = True
        super().add_update(update)


def _called(call: internals.GraphCall) -> keras.Model | None:
    """What a layer does in one call, in training; None if it stays closed."""
    layer = call.operation
    fresh = {
        id(tensor): keras.Input(
            batch_shape=tensor.shape,
            dtype=_converted(layer, tensor),
            name=f"input_{i}",
        )
        for i, tensor in enumerate(tensors_of(call))
    }
    args, kwargs = tree.map_structure(
        lambda leaf: fresh.get(id(leaf), leaf), (call.args, call.kwargs)
    )
    if "training" in inspect.signature(type(layer).call).parameters:
        kwargs["training"] = True
    before = _num_calls(layer)
    scope = _UsageScope()
    try:
        with (
            scope,
            internals.order_noted(),
            internals.told_training(layer, True),
        ):
            outputs = tree.flatten(layer.call(*args, **kwargs))
        model = keras.Model([*fresh.values()], outputs, name=layer.name)
    except Exception:  # a user's code may raise anything; then: closed
        return None
    calls = internals.graph_calls(model)
    is_layer = [isinstance(c.operation, keras.layers.Layer) for c in calls]
    if (
        scope.is_used
        or sum(is_layer) != _num_calls(layer) - before  # some lead nowhere
        or internals.shared_state([c.operation for c in calls])
        or any(_is_cast(layer, c) for c in calls)
    ):
        return None
    return model


def _is_cast(layer: keras.layers.Layer, call: internals.GraphCall) -> bool:
    """Whether a layer would cast a variable that a call takes."""
    leaves = tree.flatten((call.args, call.kwargs))
    is_mixed = layer.compute_dtype != layer.variable_dtype
    return is_mixed and any(isinstance(v, keras.Variable) for v in leaves)


def _converted(layer: keras.layers.Layer, tensor: Any) -> str:
    """The dtype in which a layer's `call` gets a tensor."""
    is_float = keras.backend.is_float_dtype(tensor.dtype)
    return layer.input_dtype if is_float and layer.autocast else tensor.dtype


def _num_calls(layer: keras.layers.Layer) -> int:
    inner = internals.flat_layers(layer)
    return sum(len(internals.symbolic_calls(one)) for one in inner)


def _num_weights(layer: keras.layers.Layer) -> int:
    return sum(math.prod(w.shape) for w in layer.weights)
