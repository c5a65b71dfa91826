"""The calls in a functional model, in models inside it and in opened layers.

Keras has the graph: every call of a layer or operation on symbolic tensors. A
nested model is opened up where it is called: its own calls take its place. So
are large layers that only call others.

A layer that calls other layers is opened: their calls take its place. A
backbone may hold all of its blocks in one layer, which would be one cell. What
the `call` of that layer does to symbolic tensors is a graph:

    encoder(x)    is    norm(block_1(block_0(x)))

It is opened only where that graph is all that it does, whenever it is called.
Mostly that is tried, see `trial/layer_calls.py`. A trial does not tell whether
a value was read from a variable, which may have another one later; whether
calls inside lead nowhere, whose layers would be in no cell; and whether two of
them draw from one generator or have one state that they may assign. Then, too,
the layer stays closed, as where masks come in, or where its code fails on
symbolic tensors. Its calls come in the order in which its code makes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import math
import pathlib
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.trial import (
    LayerTrial,
    Shapes,
    calls_undone,
    masked_layers,
    tensors_of,
    with_sizes,
)

_ANY_SIZE = 6

# What becomes of large layers inside one that is opened.
_TRIED = "tried by itself"

_OPENED = "opened, and tried with it"

_CLOSED = "left closed"


class GraphCalls:
    """Collects the calls of a model, and of those inside it.

    Attributes:
        inputs: Those of the model.
        found: The calls, in an order in which they can be run.
        outputs: A nest of those of the model.
        closed: By the ids of layers that call others, but were not opened, the
            reason in words.
    """

    def __init__(self, model: keras.Model) -> None:
        self.inputs = [
            ModelTensor(t, internals.is_optional(t)) for t in model.inputs
        ]
        self.found: list[ModelCall] = []
        self._known: dict[int, ModelTensor] = {}
        self._large = large_layers(model)
        self._masked = masked_layers(model)
        self._inner = _TRIED
        self.closed: dict[int, str] = {}
        self._autocast: str | None = None
        self._nested: list[tuple[Any, list[keras.layers.Layer]]] = []
        self._tried: list[tuple[LayerTrial, list[ModelTensor]]] = []
        dtype = internals.autocast_dtype(model, None)
        with internals.replaced(self, "_autocast", dtype):
            self.outputs = self._inline(model, self.inputs)

    @property
    def has_masks(self) -> bool:
        """Whether a layer gets masks when the model runs."""
        return bool(self._masked)

    def differing(self, specs: list[Any], num_rows: int | None) -> list[str]:
        """The names of opened layers that compute something else.

        Than they did when they were opened, or at other sizes: they are tried
        at those that they have for inputs of these shapes, with few rows, and
        with all where their number is known and it takes little time. And those
        of nested models to which layers were added since.
        """
        changed = [
            x.name
            for x, layers in self._nested
            if _functional(x) is None or x.layers != layers
        ]
        if changed or not self._tried:
            return [*dict.fromkeys(changed)]
        trials, given = zip(*self._tried)

        def tries(rows: int) -> list[tuple[LayerTrial, Shapes]]:
            return [*zip(trials, self._taken(specs, rows, given), strict=True)]

        wanted = tries(2)
        if not all(trial.is_affordable(shapes) for trial, shapes in wanted):
            wanted = tries(1)
        all_rows = [] if num_rows is None else tries(num_rows)
        all_rows = [(t, s) for t, s in all_rows if t.is_affordable(s)]
        found = [
            trial.name
            for (trial, shapes), has_gradients in [
                *((one, True) for one in wanted),
                *((one, False) for one in all_rows),
            ]
            if not all(
                trial.found(shapes, told, told and has_gradients).is_same
                for told in (True, False)
            )
        ]
        for trial in trials:
            trial.forget_values()
        return [*dict.fromkeys(found)]

    def _taken(
        self, specs: list[Any], rows: int, wanted: Sequence[list[ModelTensor]]
    ) -> list[Shapes]:
        """The shapes of `ModelTensor`s for inputs of so many rows."""
        shapes = [[value.spec.shape for value in own] for own in wanted]
        if any(None in shape[1:] for own in shapes for shape in own):
            shapes = self._inferred(specs, rows, wanted) or shapes
        return [with_sizes(own, rows, _ANY_SIZE) for own in shapes]

    def _inferred(
        self, specs: list[Any], rows: int, wanted: Sequence[list[ModelTensor]]
    ) -> list[list[Any]] | None:
        """The same, where sizes may be unknown; None if that fails."""

        def run(*inputs: Any) -> Any:
            return run_calls(self.found, zip(self.inputs, inputs), wanted)

        try:
            given = [
                keras.KerasTensor((rows, *spec.shape[1:]), spec.dtype)
                for spec in specs
            ]
            with calls_undone(()):
                found = internals.output_spec(run, *given)
        except Exception:  # as where a layer needs sizes that are not known
            return None
        return [[spec.shape for spec in own] for own in found]

    def wiring(self) -> str:
        """What the outputs are computed from, the same for equal graphs.

        By the classes of layers alone: a file may give them other names.
        """
        # By tensor, what it is computed from; inputs by their places.
        known = {value: f"input {i}" for i, value in enumerate(self.inputs)}

        def of(nest: Any) -> str:
            values = [
                v for v in tree.flatten(nest) if isinstance(v, ModelTensor)
            ]
            text = ", ".join(known[value] for value in values)
            # A hash: the text of all that it follows from grows at each use.
            return hashlib.sha256(text.encode()).hexdigest()

        for call in self.found:
            taken = of((call.args, call.kwargs))
            for i, value in enumerate(call.outputs):
                name = type(call.operation).__name__
                known[value] = f"{name} of {taken}, {i}"
        return of(self.outputs)

    def _value(self, leaf: Any) -> Any:
        """A `ModelTensor` for a symbolic tensor; all else as it is."""
        is_tensor = isinstance(leaf, keras.KerasTensor)
        return self._known[id(leaf)] if is_tensor else leaf

    def _inline(self, model: keras.Model, inputs: list[ModelTensor]) -> Any:
        """Adds the calls of a model on these inputs; returns its outputs."""
        # In each call of a model, the symbolic tensors of its graph stand for
        # others, and for others again in a graph that has some of them.
        known = dict(zip(map(id, model.inputs), inputs))
        with internals.replaced(self, "_known", known):
            for call in internals.graph_calls(model):
                self._add(call)
            return tree.map_structure(self._value, model.output)

    def _add(self, call: internals.GraphCall) -> None:
        args = tree.map_structure(self._value, call.args)
        kwargs = tree.map_structure(self._value, call.kwargs)
        # Keras hands its own to every layer, whatever the graph was made with.
        kwargs.pop("training", None)
        inner = _functional(call.operation)
        others = {k: v for k, v in kwargs.items() if k != "mask"}
        if inner is not None and len(args) == 1 and not _has_values(others):
            mask = kwargs.get("mask")
            masks = [] if mask is None else _flat(mask, inner)
            self._nested.append((call.operation, [*call.operation.layers]))
            dtype = internals.autocast_dtype(call.operation, self._autocast)
            with internals.replaced(self, "_autocast", dtype):
                outputs = self._inside(inner, _flat(args[0], inner), masks)
        elif found := self._opened(call):
            outputs = found
        else:
            made = [ModelTensor(t) for t in call.outputs]
            own = ModelCall(call.operation, args, kwargs, made)
            if not isinstance(call.operation, keras.layers.Layer):
                own.autocast = self._autocast
            self.found.append(own)
            outputs = made
        self._known.update(zip(map(id, call.outputs), outputs))

    def _opened(self, call: internals.GraphCall) -> list[ModelTensor] | None:
        """The outputs of a layer whose inner calls can take its place, or None.

        These calls are added to what was found.
        """
        given = [self._value(t) for t in tensors_of(call)]
        layer = call.operation
        if self._inner == _CLOSED or not calls_others(layer):
            return None
        model = self._graph_of(call, given)
        if isinstance(model, str):
            self.closed[id(layer)] = model
            return None
        if self._inner == _OPENED:
            return self._in_place(call, model, given)
        # With large layers inside it opened as well, or else as they are;
        # calls that do not compute the same are taken back.
        for inner in (_OPENED, _CLOSED):
            start, num_nested = len(self.found), len(self._nested)
            with internals.replaced(self, "_inner", inner):
                outputs = self._in_place(call, model, given)
            trial = _trial(call, given, self.found[start:], outputs)
            agrees = trial.agrees()
            trial.forget_values()
            if agrees:
                self._tried.append((trial, given))
                return outputs
            del self.found[start:], self._nested[num_nested:]
        self.closed[id(layer)] = (
            "the layers that it calls do not make at all sizes, in training "
            "and in inference, what its code makes"
        )
        return None

    def _graph_of(
        self, call: internals.GraphCall, given: list[ModelTensor]
    ) -> keras.Model | str:
        """What a layer does, yet to be tried; if it stays closed, why."""
        layer = call.operation
        if id(layer) not in self._large:
            return "it has few of the model's weights"
        if id(layer) in self._masked:
            return "it gets masks"
        # Where there is None, a layer does something else.
        if any(value.may_be_none for value in given):
            return "what it takes may be None"
        model = graph_of(call)
        is_open = not isinstance(model, str)
        if is_open and _trial(call, given, [], []).leaves_something():
            return "its code keeps something in Python"
        return model

    def _in_place(
        self,
        call: internals.GraphCall,
        model: keras.Model,
        given: list[ModelTensor],
    ) -> list[ModelTensor]:
        """Adds the calls of a model in the place of one of a layer."""
        with internals.replaced(self, "_autocast", None):
            outputs = self._inside(model, given, [])
        for value, tensor in zip(outputs, call.outputs):
            value.spec = tensor  # in which sizes may be known that got lost
        return outputs

    def _inside(
        self, model: keras.Model, inputs: list[ModelTensor], masks: list[Any]
    ) -> list[ModelTensor]:
        """Adds the calls of a nested model; returns its outputs."""
        given = [
            self._as_input(*of_input)
            for of_input in itertools.zip_longest(inputs, masks, model.inputs)
        ]
        return tree.flatten(self._inline(model, given))

    def _as_input(
        self,
        value: ModelTensor,
        mask: ModelTensor | None,
        tensor: keras.KerasTensor,
    ) -> ModelTensor:
        """What a nested model makes of its input: dtype, rank, mask."""
        same_rank = len(value.spec.shape) == len(tensor.shape)
        if value.spec.dtype == tensor.dtype and same_rank and mask is None:
            return value
        spec = keras.KerasTensor(tensor.shape, tensor.dtype)
        made = ModelTensor(spec, value.may_be_none)
        operation = AsInput(tensor.dtype, len(tensor.shape))
        self.found.append(ModelCall(operation, (value, mask), {}, [made]))
        return made


def _trial(
    call: internals.GraphCall,
    given: list[ModelTensor],
    calls: list[ModelCall],
    outputs: list[ModelTensor],
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


def _flat(given: Any, model: keras.Model) -> list[Any]:
    """What a nested model is given for its inputs, in their order.

    A dict may hold more: of one for a dict, Keras takes the first, and warns.
    """
    if isinstance(given, dict) and not isinstance(model.input, dict):
        return [given[t.name] for t in model.inputs]
    return tree.flatten(given)[: len(model.inputs)]


def _has_values(kwargs: dict[str, Any]) -> bool:
    """Whether an argument, such as a mask, is more than None."""
    return any(leaf is not None for leaf in tree.flatten(kwargs))


@dataclasses.dataclass(eq=False)
class ModelTensor:
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
class ModelCall:
    """A call of a layer or operation; `ModelTensor`s for tensors.

    Attributes:
        autocast: As what an operation reads variables, see `autocast_dtype`.
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[ModelTensor]
    autocast: str | None = None

    @property
    def inputs(self) -> list[ModelTensor]:
        """The tensors it takes, each once."""
        return list(values_in((self.args, self.kwargs)))


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


def run_calls(
    calls: Iterable[ModelCall],
    given: Iterable[tuple[ModelTensor, Any]],
    wanted: Any,
    told: dict[str, Any] | None = None,
) -> Any:
    """Makes calls, one after the other; returns the nest `wanted`, of tensors.

    They begin with what is `given`; `told` are keyword arguments for layers.
    """
    known = dict(given)

    def tensor(leaf: Any) -> Any:
        return known[leaf] if isinstance(leaf, ModelTensor) else leaf

    for call in calls:
        args = tree.map_structure(tensor, call.args)
        kwargs = tree.map_structure(tensor, call.kwargs)
        if isinstance(call.operation, keras.layers.Layer):
            kwargs.update(told or {})
        with internals.autocast(call.autocast):
            made = tree.flatten(call.operation(*args, **kwargs))
        known.update(zip(call.outputs, made))
    return tree.map_structure(tensor, wanted)


def values_in(nest: Any) -> Iterable[ModelTensor]:
    """The tensors of a nest, each once."""
    leaves = tree.flatten(nest)
    return dict.fromkeys(v for v in leaves if isinstance(v, ModelTensor))


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


def graph_of(call: internals.GraphCall) -> keras.Model | str:
    """What a call of a layer does, as a functional model; yet to be tried.

    It takes `tensors_of` the call. If the layer stays closed, why.
    """
    layer = call.operation
    if internals.remat_mode(layer) is not None:
        return "it is in a `keras.RematScope`"
    if internals.own_context_arguments(layer) & set(call.kwargs):
        return "it is called with arguments for all layers inside"
    if any(internals.get_mask(t) is not None for t in tensors_of(call)):
        return "it gets masks"
    with calls_undone(internals.flat_layers(call.operation)):
        return _called(call)


def calls_others(layer: Any) -> bool:
    """Whether an operation is a layer with others inside, in its own way."""
    return (
        isinstance(layer, keras.layers.Layer)
        and len(internals.flat_layers(layer)) > 1
        and not internals.is_keras(type(layer).call)
    )


class _UsageScope(keras.StatelessScope):
    """Notes whether a layer itself uses a variable.

    What the layers do that it calls, is in scopes of their own: a call of a
    layer on symbolic tensors runs in one.
    """

    used: keras.Variable | None = None

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Called where a variable is read."""
        self.used = variable
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """`Variable.assign` calls it: the layer uses the variable."""
        self.used = update[0]
        super().add_update(update)


def _called(call: internals.GraphCall) -> keras.Model | str:
    """What a layer does in one call, in training; or why it stays closed."""
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
    except Exception as error:  # a user's code may raise anything
        what = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        where = _place(error, layer)
        return f"its code fails on symbolic tensors{where}, by {what}"
    calls = internals.graph_calls(model)
    is_layer = [isinstance(c.operation, keras.layers.Layer) for c in calls]
    if scope.used is not None:
        is_seed = scope.used.name == "seed_generator_state"
        what = "draws" if is_seed else f"uses variable '{scope.used.path}'"
        return f"its own code {what}"
    if sum(is_layer) != _num_calls(layer) - before:
        return "it calls layers of whose outputs nothing becomes"
    if internals.shared_state([c.operation for c in calls]):
        return "layers that it calls share state, or draw by one seed"
    if any(_is_cast(layer, c) for c in calls):
        return "it hands a variable to an operation, which it casts"
    return model


def _place(error: Exception, layer: keras.layers.Layer) -> str:
    """The last line in the file of a layer's code that an error came through.

    Empty where it came from elsewhere.
    """
    code = getattr(inspect.unwrap(type(layer).call), "__code__", None)
    own = getattr(code, "co_filename", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == own]
    return f" at {pathlib.Path(own).name}:{lines[-1]}" if own and lines else ""


def _is_cast(layer: keras.layers.Layer, call: internals.GraphCall) -> bool:
    """Whether a layer would cast a variable that a call takes."""
    is_mixed = layer.compute_dtype != layer.variable_dtype
    return is_mixed and _reads_variables(call)


def _reads_variables(call: internals.GraphCall) -> bool:
    """Whether a call takes variables as arguments, as operations may."""
    leaves = tree.flatten((call.args, call.kwargs))
    return any(isinstance(v, keras.Variable) for v in leaves)


def _converted(layer: keras.layers.Layer, tensor: Any) -> str:
    """The dtype in which a layer's `call` gets a tensor."""
    is_float = keras.backend.is_float_dtype(tensor.dtype)
    return layer.input_dtype if is_float and layer.autocast else tensor.dtype


def _num_calls(layer: keras.layers.Layer) -> int:
    inner = internals.flat_layers(layer)
    return sum(len(internals.symbolic_calls(one)) for one in inner)


def _num_weights(layer: keras.layers.Layer) -> int:
    return sum(math.prod(w.shape) for w in layer.weights)
