"""The calls in a functional model, and in the models inside it.

Keras has the graph: every call of a layer or operation on symbolic tensors. A
nested model is opened up where it is called: its own calls take its place. So
are large layers that only call others, see `opened_layer.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.sequence.opened_layer import (
    Opened,
    called,
    large_layers,
    opened,
    tensors_of,
)


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor of the graph.

    Attributes:
        spec: Its shape and dtype.
        may_be_none: Whether it is an input that may be left out.
    """

    spec: keras.KerasTensor
    may_be_none: bool = False

    @property
    def row_bytes(self) -> int:
        """Of one row; unknown sizes count as 1."""
        sizes = [size or 1 for size in self.spec.shape[1:]]
        return math.prod(sizes) * tf.as_dtype(self.spec.dtype).size


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a layer or operation; `Value`s for tensors."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Value]

    @property
    def inputs(self) -> list[Value]:
        """The tensors it takes, each once."""
        return list(values_in((self.args, self.kwargs)))


class GraphCalls:
    """Collects the calls of a model, and of those inside it.

    Args:
        model: The model.

    Attributes:
        inputs: Those of the model.
        found: The calls, in an order in which they can be run.
        outputs: A nest of those of the model.
    """

    def __init__(self, model: keras.Model) -> None:
        self.inputs = [
            Value(t, getattr(internals.producer(t), "optional", False))
            for t in model.inputs
        ]
        self.found: list[Call] = []
        self._known: dict[int, Value] = {}
        self._large = large_layers(model)
        self._opened: list[tuple[internals.GraphCall, Opened]] = []
        self.outputs = self._inline(model, self.inputs)

    def changed(self) -> list[str]:
        """The names of opened layers that compute something else now."""
        found = []
        for call, before in self._opened:
            now = called(call, True)
            if now is None or now.written != before.written:
                found.append(call.operation.name)
        return found

    def wiring(self) -> str:
        """What the outputs are computed from, the same for equal graphs.

        By the classes of layers alone: a file may give them other names.
        """
        known = {value: f"input {i}" for i, value in enumerate(self.inputs)}

        def of(nest: Any) -> str:
            values = [v for v in tree.flatten(nest) if isinstance(v, Value)]
            text = ", ".join(known[value] for value in values)
            return hashlib.sha256(text.encode()).hexdigest()

        for call in self.found:
            taken = of((call.args, call.kwargs))
            for i, value in enumerate(call.outputs):
                name = type(call.operation).__name__
                known[value] = f"{name} of {taken}, {i}"
        return of(self.outputs)

    def _value(self, leaf: Any) -> Any:
        """A `Value` for a symbolic tensor; what else there is, as it is."""
        is_tensor = isinstance(leaf, keras.KerasTensor)
        return self._known[id(leaf)] if is_tensor else leaf

    def _inline(self, model: keras.Model, inputs: list[Value]) -> Any:
        """Adds the calls of a model on these inputs; returns its outputs."""
        # In each call of a model, the symbolic tensors of its graph stand for
        # others, and for others again in a graph that has some of them.
        around = self._known
        self._known = dict(zip(map(id, model.inputs), inputs))
        for call in internals.graph_calls(model):
            self._add(call)
        outputs = tree.map_structure(self._value, model.output)
        self._known = around
        return outputs

    def _add(self, call: internals.GraphCall) -> None:
        args = tree.map_structure(self._value, call.args)
        kwargs = tree.map_structure(self._value, call.kwargs)
        # Keras hands its own to every layer, whatever the graph was made with.
        kwargs.pop("training", None)
        inner = _functional(call.operation)
        others = {k: v for k, v in kwargs.items() if k != "mask"}
        if inner is not None and len(args) == 1 and not _has_values(others):
            masks = tree.flatten(kwargs.get("mask"))
            outputs = self._inside(inner, _flat(args[0], inner), masks)
        elif found := self._as_opened(call):
            self._opened.append((call, found))
            given = [self._value(t) for t in tensors_of(call)]
            outputs = self._inside(found.model, given, [])
            for value, tensor in zip(outputs, call.outputs):
                value.spec = tensor  # in which sizes may be known that got lost
        else:
            outputs = [Value(t) for t in call.outputs]
            self.found.append(Call(call.operation, args, kwargs, outputs))
        self._known.update(zip(map(id, call.outputs), outputs))

    def _as_opened(self, call: internals.GraphCall) -> Opened | None:
        """What a layer does inside, if that can take its place."""
        # Where there is None, a layer does something else.
        if id(call.operation) not in self._large or any(
            self._value(t).may_be_none for t in tensors_of(call)
        ):
            return None
        return opened(call)

    def _inside(
        self, model: keras.Model, inputs: list[Value], masks: list[Any]
    ) -> list[Value]:
        """Adds the calls of a nested model; returns its outputs."""
        given = [
            self._as_input(*of_input)
            for of_input in itertools.zip_longest(inputs, masks, model.inputs)
        ]
        return tree.flatten(self._inline(model, given))

    def _as_input(
        self, value: Value, mask: Value | None, tensor: keras.KerasTensor
    ) -> Value:
        """What a nested model makes of its input: dtype, rank, mask."""
        same_rank = len(value.spec.shape) == len(tensor.shape)
        if value.spec.dtype == tensor.dtype and same_rank and mask is None:
            return value
        spec = keras.KerasTensor(tensor.shape, tensor.dtype)
        made = Value(spec, value.may_be_none)
        operation = AsInput(tensor.dtype, len(tensor.shape))
        self.found.append(Call(operation, (value, mask), {}, [made]))
        return made


class AsInput(keras.Operation):
    """Gives a tensor the dtype and rank of a nested model's input."""

    def __init__(self, dtype: str, rank: int):
        super().__init__()
        self.dtype = dtype
        self.rank = rank

    def call(self, x: Any, mask: Any = None) -> Any:
        """Casts; adds a last axis of size 1, or removes it; sets the mask."""
        if x is None:
            return None
        mask = internals.get_mask(x) if mask is None else mask
        x = keras.ops.convert_to_tensor(x, self.dtype)
        if len(x.shape) == self.rank + 1:
            x = keras.ops.squeeze(x, -1)
        elif len(x.shape) == self.rank - 1:
            x = keras.ops.expand_dims(x, -1)
        if mask is not None:
            internals.set_mask(x, mask)
        return x


def _functional(operation: Any) -> keras.Model | None:
    """The functional model that a nested model is, or None."""
    if isinstance(operation, keras.Sequential):
        operation = internals.functional_of(operation)
    return operation if internals.is_functional(operation) else None


def _flat(inputs: Any, model: keras.Model) -> list[Value]:
    """What a nested model is called on, in the order of its inputs."""
    if isinstance(inputs, dict) and not isinstance(model.input, dict):
        return [inputs[t.name] for t in model.inputs]
    return tree.flatten(inputs)


def _has_values(kwargs: dict[str, Any]) -> bool:
    """Whether an argument, such as a mask, is more than None."""
    return any(leaf is not None for leaf in tree.flatten(kwargs))


def values_in(nest: Any) -> Iterable[Value]:
    """The tensors of a nest, each once."""
    leaves = tree.flatten(nest)
    return dict.fromkeys(v for v in leaves if isinstance(v, Value))
