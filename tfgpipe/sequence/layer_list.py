"""A list of layers: checked for a chain, and called one after the other.

Layers of a functional model that is no chain are refused. Its list of layers
says nothing of branches, and of operations such as `+`, which are no layers:
called one after the other, the layers compute something else. Keras notes in
each layer the symbolic tensors on which it was called; so the list can be
compared with the graph.

A layer that was never called in a graph goes anywhere, and so does one that
takes the outputs of a layer that is left out: the user has replaced that one,
or begins in the middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import LayerCall
from tfgpipe.checks import is_amount
from tfgpipe.internals import Nest, SymbolicCall
from tfgpipe.sequence.steps import Source, called_model, cost_problem


class LayerList(Source):
    """A list of layers, some with a cost, maybe after a `keras.Input`.

    See `Source`; it has a call of each layer, one after the other.
    """

    model: keras.Model | None = None

    def __init__(self, items: Any, models: Sequence[keras.Model] = ()):
        super().__init__()
        self.models, self.opened = models, [*models]
        self.user_model = models[0] if models else None
        self.layers = []
        left = list(items) if isinstance(items, (list, tuple)) else []
        first = left[0] if left else None
        self.input_spec = _input_spec(first)
        start = 0 if self.input_spec is None else 1  # of the first layer
        if not left[start:]:
            self.problems.append(
                "`layers` must be a list of at least one Keras layer. "
                f"Received: layers={items!r}."
            )
        for index, item in enumerate(left[start:], start):
            self._add(index, item)
        self.calls = [LayerCall(layer) for layer in self.layers]
        if self.input_spec is None and self.layers:
            self.input_spec = _declared_by(self.layers[0])
        by_name = {layer.name: layer for layer in self.layers}
        doubles = {la.name for la in self.layers if by_name[la.name] is not la}
        if doubles:
            self.problems.append(
                "`layers` must have different names. Received: several of "
                f"{sorted(doubles)}."
            )
        if self.problems:
            return
        if isinstance(first, keras.layers.InputLayer):
            first = first.output
        if problem := _break_in(self.layers, first, start):
            self.problems.append(
                f"`layers` must be a chain. Received: {problem}. Pass the "
                "functional model itself, `keras.Model(inputs, outputs)`."
            )

    def call(self, x: Nest, training: bool | None) -> Any:
        """Calls the layers one after the other, or the model that they are."""
        for model in self.models:
            if model.built:
                return called_model(model, x, training)
        for layer in self.layers:
            x = _called(layer, x, training)
        return x

    def symbolic(self, spec: Nest) -> Any:
        """Returns the layers' symbolic outputs; they may get variables."""
        with (
            internals.deferred_variables(),
            internals.tracing_anew(),
            internals.in_no_graph(self.layers),
        ):
            for layer in self.layers:
                spec = layer(spec)
        return spec

    def config(self) -> dict[str, Any]:
        """Returns the layers as plain values, each once, and their order.

        Or their model, if it has other weights.
        """
        model = self.user_model
        if model is not None and internals.direct_variables(model):
            return {"model": keras.saving.serialize_keras_object(model)}
        first = internals.input_layer(self.input_spec)
        once = list({id(la): la for la in self.layers}.values())
        return {
            "layers": [
                keras.saving.serialize_keras_object(layer)
                for layer in ([first] if first else []) + once
            ],
            "order": [once.index(layer) for layer in self.layers],
        }

    def _add(self, index: int, item: Any) -> None:
        layer, cost = item if is_pair(item) else (item, None)
        is_input = internals.input_layer(layer) is not None
        if is_input or not isinstance(layer, keras.layers.Layer):
            self.problems.append(
                "`layers` must hold Keras layers or pairs (layer, cost), after "
                f"at most a `keras.Input`. Received: {item!r} at index {index}."
            )
            return
        if not (cost is None or callable(cost) or is_amount(cost)):
            self.problems.append(cost_problem(layer, cost))
        self.layers.append(layer)
        self.costs.append(cost)


def is_pair(item: Any) -> bool:
    """Returns whether an item of a list is a pair with its cost."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    return not isinstance(item[1], (keras.layers.Layer, keras.KerasTensor))


def _input_spec(item: Any) -> keras.KerasTensor | None:
    """Returns the tensor of a `keras.Input`, for any batch size; or None."""
    layer = internals.input_layer(item)
    if layer is None:
        return None
    if layer.batch_shape[0] is None and not (layer.sparse or layer.ragged):
        return layer.output
    shape = layer.batch_shape[1:]
    return keras.Input(shape, dtype=layer.dtype, name=layer.name)


def _declared_by(layer: keras.layers.Layer) -> keras.KerasTensor | None:
    """Returns the input that a first layer declares in `keras.Sequential`.

    By `input_shape=`, or a model that is built for one tensor; else None.
    """
    is_model = isinstance(layer, keras.Model)
    inputs: list[Any] = getattr(layer, "inputs", []) if is_model else []
    if len(inputs) != 1 or tree.is_nested(getattr(layer, "input", None)):
        return None
    return keras.Input(inputs[0].shape[1:], dtype=inputs[0].dtype)


def _break_in(
    layers: Sequence[keras.layers.Layer], first: Any, start: int
) -> str | None:
    """Names the layer at which layers are no chain in their graphs, or None.

    `first` is the `keras.KerasTensor` before them, or another first item;
    `start` the index of the first layer in the user's list.
    """
    listed = {id(layer) for layer in layers}
    taken: set[int] = set()  # tensors that earlier layers take
    source = internals.producer(first)
    # The call that made an input, if others take it.
    before: list[SymbolicCall] = []
    if source is not None and internals.calls_on(source):
        before = internals.symbolic_calls(source)

    def follows(call: SymbolicCall) -> bool:
        """Returns whether a call is next in the chain, or begins another."""
        if any(_ids(call.inputs) == _ids(c.outputs) for c in before):
            return True
        sources = [internals.producer(tensor) for tensor in call.inputs]
        if any(id(source) in listed for source in sources):
            return False
        is_fork = bool(_ids(call.inputs) & taken)
        return not is_fork and not (before and any(map(_is_operation, sources)))

    for i, layer in enumerate(layers, start):
        calls = internals.symbolic_calls(layer)
        following = [call for call in calls if follows(call)]
        if calls and not following:
            return f"'{layer.name}' at index {i}, called on other tensors"
        taken |= {key for call in calls for key in _ids(call.inputs)}
        before = following

    def goes_on(call: SymbolicCall) -> bool:
        """Returns whether a listed layer, or an operation, takes outputs."""
        outputs = _ids(call.outputs)
        calls = internals.calls_on(layers[-1])
        users = [c.operation for c in calls if _ids(c.inputs) & outputs]
        return any(id(user) in listed or _is_operation(user) for user in users)

    if before and all(map(goes_on, before)):
        return f"layer '{layers[-1].name}' at the end, whose outputs go on"
    return None


def _is_operation(source: keras.Operation | None) -> bool:
    """Returns whether a called operation is no layer."""
    return source is not None and not isinstance(source, keras.layers.Layer)


def _ids(tensors: Iterable[keras.KerasTensor]) -> set[int]:
    return {id(tensor) for tensor in tensors}


def _called(layer: keras.layers.Layer, x: Nest, training: bool | None) -> Any:
    """Calls a layer, whose output gets the mask that it has in a model.

    Keras gives none to a tensor that has one. In a model of the layers a tensor
    that a layer returns unchanged has the mask that this layer computes.
    """
    mask = None if tree.is_nested(x) else internals.get_mask(x)
    # None would override the layer's default.
    options = {} if training is None else {"training": training}
    y = layer(x, **options)
    if y is not x or mask is None or not layer.supports_masking:
        return y
    new_mask = layer.compute_mask(x, mask)
    if new_mask is None or new_mask is mask:
        return y
    (copy,) = internals.copies_of(y, 1)
    internals.set_mask(copy, new_mask)
    return copy
