"""The calls in a functional model, and in the models inside it.

Keras has the graph: every call of a layer or operation on symbolic tensors. A
nested model is opened up where it is called: its own calls take its place. So
are large layers that only call others, see `opened_layer.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import tree

from tfgpipe import internals
from tfgpipe.sequence.call import (
    AsInput,
    Call,
    Value,
    run_calls,
    tensors_of,
)
from tfgpipe.sequence.layer_trial import LayerTrial, Shapes, with_sizes
from tfgpipe.sequence.opened_layer import graph_of, large_layers
from tfgpipe.sequence.watched import unnoticed

_ANY_SIZE = 6
# What becomes of large layers inside one that is opened.
_TRIED = "tried by itself"
_OPENED = "opened, and tried with it"
_CLOSED = "left closed"


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
        self._inner = _TRIED
        self._tried: list[tuple[LayerTrial, list[Value]]] = []
        self.outputs = self._inline(model, self.inputs)

    def differing(self, specs: list[Any]) -> list[str]:
        """The names of opened layers that compute something else.

        Than they did when they were opened, or at other sizes: they are tried
        at those that they have for such inputs, with few rows.

        Args:
            specs: Those of the model's inputs, with shapes.
        """
        if not self._tried:
            return []
        trials, given = zip(*self._tried)
        for rows in (2, 1):
            taken = self._taken(specs, rows, given)
            if all(t.is_affordable(s) for t, s in zip(trials, taken)):
                break
        return [
            trial.name
            for trial, shapes in zip(trials, taken)
            if not all(
                trial.found(shapes, training).is_same
                for training in (True, False)
            )
        ]

    def _taken(
        self, specs: list[Any], rows: int, wanted: Sequence[list[Value]]
    ) -> list[Shapes]:
        """The shapes of `Value`s for inputs of so many rows."""
        shapes = [[value.spec.shape for value in own] for own in wanted]
        if any(None in shape[1:] for own in shapes for shape in own):
            shapes = self._inferred(specs, rows, wanted) or shapes
        return [with_sizes(own, rows, _ANY_SIZE) for own in shapes]

    def _inferred(
        self, specs: list[Any], rows: int, wanted: Sequence[list[Value]]
    ) -> list[list[Any]] | None:
        """The same, where sizes may be unknown; None if that fails."""

        def run(*inputs: Any) -> Any:
            return run_calls(self.found, zip(self.inputs, inputs), wanted)

        try:
            given = [
                keras.KerasTensor((rows, *spec.shape[1:]), spec.dtype)
                for spec in specs
            ]
            with unnoticed(()):
                found = internals.output_spec(run, *given)
        except Exception:  # as where a layer needs sizes that are not known
            return None
        return [[spec.shape for spec in own] for own in found]

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
        elif found := self._opened(call):
            outputs = found
        else:
            made = [Value(t) for t in call.outputs]
            self.found.append(Call(call.operation, args, kwargs, made))
            outputs = made
        self._known.update(zip(map(id, call.outputs), outputs))

    def _opened(self, call: internals.GraphCall) -> list[Value] | None:
        """Adds the calls inside a layer, if they can take its place.

        Returns:
            The layer's outputs, or None.
        """
        given = [self._value(t) for t in tensors_of(call)]
        if (
            self._inner == _CLOSED
            or id(call.operation) not in self._large
            # Where there is None, a layer does something else.
            or any(value.may_be_none for value in given)
        ):
            return None
        model = graph_of(call)
        if model is None:
            return None
        if self._inner == _OPENED:
            return self._in_place(call, model, given)
        for inner in (_OPENED, _CLOSED):
            start = len(self.found)
            with self._large_inside(inner):
                outputs = self._in_place(call, model, given)
            trial = _trial(call, given, self.found[start:], outputs)
            if trial.agrees():
                self._tried.append((trial, given))
                return outputs
            del self.found[start:]
        return None

    @contextlib.contextmanager
    def _large_inside(self, inner: str) -> Iterator[None]:
        """Says what becomes of large layers inside a layer."""
        before, self._inner = self._inner, inner
        yield
        self._inner = before

    def _in_place(
        self, call: internals.GraphCall, model: keras.Model, given: list[Value]
    ) -> list[Value]:
        """Adds the calls of a model in the place of one of a layer."""
        outputs = self._inside(model, given, [])
        for value, tensor in zip(outputs, call.outputs):
            value.spec = tensor  # in which sizes may be known that got lost
        return outputs

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


def _trial(
    call: internals.GraphCall,
    given: list[Value],
    calls: list[Call],
    outputs: list[Value],
) -> LayerTrial:
    """Of a layer, and of the calls that would take its place."""

    def run(tensors: list[Any], training: bool) -> Any:
        told = {"training": training}
        return run_calls(calls, zip(given, tensors), outputs, told)

    return LayerTrial(call, run)


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
