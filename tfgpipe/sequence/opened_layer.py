"""Opens a layer that calls other layers: their calls take its place.

A backbone may hold all of its blocks in one layer, which would be one cell.
What the `call` of that layer does to symbolic tensors is a graph:

    encoder(x)    is    norm(block_1(block_0(x)))

It is opened only where that graph is all it does, whenever it is called. A
layer stays closed that draws, assigns or reads variables beside its inner
calls; that takes or makes masks; two of whose calls draw from one generator or
have one state that they may assign; whose code fails on symbolic tensors; or
makes another graph the next time, for another `training`, or for sizes that are
known. Its calls come in the order in which its code makes them. To find out
takes four calls and a run.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import tree

from tfgpipe import internals
from tfgpipe.sequence.watched import WatchingScope, unnoticed

# So that four cells of such layers can be even to a tenth.
SHARE = 1 / 40
# Sizes that are unknown may be known when the layer is called: a short one and
# a long one must make no difference.
_SIZES = (7, 1031)
_VALUES = (bool, bytes, complex, float, int, str, type(None), type(Ellipsis))


def large_layers(model: keras.Model) -> set[int]:
    """The ids of layers that hold a good share of a model's weights."""
    total = _num_weights(model)
    return {
        id(layer)
        for layer in internals.flat_layers(model)
        if _num_weights(layer) > SHARE * total
    }


class Opened(NamedTuple):
    """What a call of a layer does.

    Attributes:
        model: A functional model of the call's tensors.
        written: What it computes, as a value to compare while the model is
            there.
    """

    model: keras.Model
    written: Any


def tensors_of(call: internals.GraphCall) -> list[keras.KerasTensor]:
    """The tensors of a call, each once, in the order of its arguments."""
    leaves = tree.flatten((call.args, call.kwargs))
    found = {id(t): t for t in leaves if isinstance(t, keras.KerasTensor)}
    return list(found.values())


def opened(call: internals.GraphCall) -> Opened | None:
    """What a call of a layer does, as a functional model.

    Args:
        call: The call of a layer in the graph of a model.

    Returns:
        A model of `tensors_of` the call. None if the layer stays closed.
    """
    first = called(call, True)
    is_all = first is not None and _is_all_it_does(first, call)
    return first if is_all else None


def _is_all_it_does(first: Opened, call: internals.GraphCall) -> bool:
    """Whether a call always does what it did first."""
    if not _runs(first):
        return False
    for told, size in ((False, None), *((False, n) for n in _SIZES)):
        again = called(call, told, size)
        # It has the same constants: sizes that it was told are not among them,
        # and to run it once more, for those, would find nothing.
        if again is None or again.written != first.written:
            return False
    return True


def _numbers(tensors: list[keras.KerasTensor]) -> dict[int, int]:
    return {id(tensor): i for i, tensor in enumerate(tensors)}


def called(
    call: internals.GraphCall, training: bool, size: int | None = None
) -> Opened | None:
    """What one call does, for one `training`, where unknown sizes are known."""
    layer = call.operation
    masks = map(internals.get_mask, [*tensors_of(call), *call.outputs])
    if not _is_plain(layer, call) or any(mask is not None for mask in masks):
        return None
    with unnoticed(internals.flat_layers(layer)):
        return _called(call, training, size)


def _runs(found: Opened) -> bool:
    """Whether it is right for tensors, too.

    Symbolic calls do not notice, say, a None among sizes to reshape to.
    """
    with unnoticed(internals.flat_layers(found.model)):
        try:
            internals.output_spec(found.model, found.model.inputs)
        except Exception:  # as below
            return False
    return True


def _is_plain(layer: keras.layers.Layer, call: internals.GraphCall) -> bool:
    """Whether what is around a layer's `call` does nothing."""
    cls = type(layer)
    base = keras.layers.Layer
    return (
        len(internals.flat_layers(layer)) > 1
        and not internals.is_keras(cls.call)
        and cls.__call__ is base.__call__
        and cls.compute_mask is base.compute_mask
        and "call" not in vars(layer)
        and layer.activity_regularizer is None
        and layer.quantization_mode is None
        and internals.remat_mode(layer) is None
        and not internals.own_context_arguments(layer) & set(call.kwargs)
    )


def _called(
    call: internals.GraphCall, training: bool, size: int | None
) -> Opened | None:
    layer = call.operation
    fresh = {
        id(tensor): keras.Input(
            batch_shape=[size if d is None else d for d in tensor.shape],
            dtype=_converted(layer, tensor),
            name=f"input_{i}",
        )
        for i, tensor in enumerate(tensors_of(call))
    }
    args, kwargs = tree.map_structure(
        lambda leaf: fresh.get(id(leaf), leaf), (call.args, call.kwargs)
    )
    if "training" in inspect.signature(type(layer).call).parameters:
        kwargs["training"] = training
    before = _num_calls(layer)
    scope = WatchingScope()
    try:
        with (
            scope,
            internals.order_noted(),
            internals.told_training(layer, training) as last_told,
        ):
            outputs = tree.flatten(layer.call(*args, **kwargs))
        model = keras.Model([*fresh.values()], outputs, name=layer.name)
    except Exception:  # a user's code may raise anything; then: closed
        return None
    calls = internals.graph_calls(model)
    is_layer = [isinstance(c.operation, keras.layers.Layer) for c in calls]
    if (
        scope.used
        or last_told() is not training  # what a layer inside has left
        or not (size is not None or _are_like(outputs, call.outputs))
        or any(internals.get_mask(t) is not None for t in outputs)
        or sum(is_layer) != _num_calls(layer) - before  # some lead nowhere
        or internals.shared_state([c.operation for c in calls])
    ):
        return None
    written = _written(model, calls, layer, training)
    return None if written is None else Opened(model, written)


def _written(
    model: keras.Model,
    calls: list[internals.GraphCall],
    layer: keras.layers.Layer,
    training: bool,
) -> Any:
    """What the calls compute; None if they are told another `training`."""
    numbers = _numbers(model.inputs)
    rows = []

    for call in calls:
        kwargs = dict(call.kwargs)
        if kwargs.pop("training", training) not in (training, None):
            return None
        leaves = tree.flatten((call.args, kwargs))
        is_mixed = layer.compute_dtype != layer.variable_dtype
        if is_mixed and any(isinstance(v, keras.Variable) for v in leaves):
            return None  # the layer would cast it
        rows.append(
            _plain((_of_operation(call.operation), call.args, kwargs), numbers)
        )
        for tensor in call.outputs:
            numbers[id(tensor)] = len(numbers)
    return rows, [numbers[id(t)] for t in model.outputs]


def _of_operation(operation: Any) -> Any:
    """What an operation is: Keras makes its own anew for every call."""
    if not isinstance(operation, keras.layers.Layer) and internals.is_keras(
        type(operation)
    ):
        return type(operation), internals.own_attributes(operation)
    return operation


def _plain(value: Any, numbers: dict[int, int]) -> Any:
    """A value to compare; what is no plain one is equal to itself alone.

    Args:
        value: A nest of anything.
        numbers: Those of symbolic tensors.
    """
    kind = type(value)
    if id(value) in numbers:
        return "tensor", numbers[id(value)]
    if isinstance(value, (list, tuple)):
        return kind, [_plain(one, numbers) for one in value]
    if isinstance(value, dict):
        return kind, [_plain(one, numbers) for one in value.items()]
    if kind is np.ndarray and value.dtype != object:
        return kind, value.shape, value.dtype.str, value.tobytes()
    if kind in _VALUES or isinstance(value, (np.generic, slice)):
        return kind, repr(value)  # of nan, too
    return "same", id(value)


def _converted(layer: keras.layers.Layer, tensor: Any) -> str:
    """The dtype in which a layer's `call` gets a tensor."""
    is_float = keras.backend.is_float_dtype(tensor.dtype)
    return layer.input_dtype if is_float and layer.autocast else tensor.dtype


def _num_calls(layer: keras.layers.Layer) -> int:
    inner = internals.flat_layers(layer)
    return sum(len(internals.symbolic_calls(one)) for one in inner)


def _num_weights(layer: keras.layers.Layer) -> int:
    return sum(math.prod(w.shape) for w in layer.weights)


def _are_like(found: list[Any], expected: list[Any]) -> bool:
    """Whether dtypes are equal, and shapes except sizes that got lost."""
    return len(found) == len(expected) and all(
        a.dtype == b.dtype
        and len(a.shape) == len(b.shape)
        and all(i in (None, j) for i, j in zip(a.shape, b.shape))
        for a, b in zip(found, expected)
    )
