"""A model, functional or with a `call` of its own, as it is called."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import LayerCall
from tfgpipe.internals import Nest
from tfgpipe.sequence.steps import Source


def called_model(model: keras.Model, x: Nest, training: bool | None) -> Any:
    """Calls a model as Keras's steps do; None for its own default."""
    if training is not None and internals.takes_training(model):
        return model(x, training=training)
    return model(x)


class GraphCall(LayerCall):
    """A call of a layer or an operation in the graph of a model.

    Attributes:
        source: The model, with all calls.
    """

    def __init__(self, operation: keras.Operation, source: WholeModel):
        super().__init__(operation)
        self.source = source


class WholeModel(Source):
    """A model that is called as it is, see `Source`.

    The calls of a functional one are known, also inside of functional models.
    A tensor goes from the cell that makes it to the cells that take it:

        x --> conv --> pool --> conv --> upsample --> concatenate --> y
                |________________________________________|

    Attributes:
        model: The model.
        is_functional: Whether it has a graph.
        trainer: Returns the `GPipe` that is compiled for it, or None.
    """

    model: keras.Model

    def __init__(self, model: keras.Model):
        super().__init__()
        self.model = self.user_model = model
        self.models = []
        self.trainer: Callable[[], Any] = lambda: None
        self.layers = [model]
        self._opened: list[keras.Model] = []
        self.is_functional = has_graph(model)
        if self.is_functional:
            self.models = [model]
            self.layers = internals.direct_layers(model)
            self.input_spec = model.input
            self.problems = _problems(model)
            self.calls = [
                GraphCall(called, self) for called in self._called(model)
            ]
            self.costs = [None] * len(self.calls)

    def call(self, x: Nest, training: bool | None) -> Any:
        """Calls the model, which sees that its trainer is compiled."""
        trainer, attributes = self.trainer(), {}
        if trainer is not None and trainer.compiled:
            attributes = {"compiled": True, "optimizer": trainer.optimizer}
        with contextlib.ExitStack() as stack:
            for name, value in attributes.items():
                stack.enter_context(internals.replaced(self.model, name, value))
            return called_model(self.model, x, training)

    def with_costs(self, costs: list[Any]) -> WholeModel:
        """Returns the same model with other costs of its calls."""
        other = copy.copy(self)
        other.costs = costs
        return other

    def opened(self) -> set[int]:
        """The ids of models that have calls of their own."""
        return {id(model) for model in self._opened}

    def _called(self, model: keras.Model) -> Iterator[keras.Operation]:
        """Yields the operations of a model's graph, in Keras's order."""
        self._opened.append(model)
        for call in internals.graph_calls(_functional(model)):
            if _functional(call.operation) is None:
                yield call.operation
            else:
                yield from self._called(call.operation)

    def arranged(self, x: Nest) -> Any:
        """Returns data in the structure of the inputs of a functional model.

        It takes a dict by the names of inputs, and lists for tuples.

        Raises:
            ValueError: If there are other inputs.
        """
        if not self.is_functional:
            return x
        names = [tensor.name for tensor in self.model.inputs]
        spec, flat = self.input_spec, tree.flatten(x)
        if isinstance(x, dict) and isinstance(spec, dict):
            flat = tree.flatten({k: v for k, v in x.items() if k in spec})
        elif isinstance(x, dict) and set(names) <= set(x):
            flat = [x[name] for name in names]
        if len(flat) != len(names):
            raise ValueError(
                f"`x` must have the inputs of model '{self.model.name}', "
                f"{names}. Received: {len(tree.flatten(x))} tensors"
                + (f" named {sorted(x)}." if isinstance(x, dict) else ".")
            )
        return tree.pack_sequence_as(spec, flat)

    def config(self) -> dict[str, Any]:
        """Returns the model as plain values."""
        config = {"model": keras.saving.serialize_keras_object(self.model)}
        if self.is_functional:
            config["graph"] = graph_hash(self.model)
        return config

    def check_read(self, graph: str | None) -> None:
        """Refuses a model that was read as another one than was written.

        Keras tells the calls of a layer apart by their numbers, which are
        others where a model inside is made first, of the layer's own tensors.
        `graph` is what `config` said, or None if a file is older.

        Raises:
            ValueError: If the calls are others now.
        """
        if graph not in (None, graph_hash(self.model)):
            raise ValueError(
                "A file must be read as the model that was written. Received: "
                f"model '{self.model.name}', whose layers were called on other "
                "tensors, or others were: Keras confuses the calls of a layer "
                "where a model holds a model of its own tensors, and would "
                "load another one without a word. Make the inner model of an "
                "input of its own, `inner = keras.Model(x, layer(x))` with `x "
                "= keras.Input(shape)`. The weights of this file can be read "
                "by `load_weights` of a model that the program makes again."
            )


def has_graph(model: keras.Model) -> bool:
    """Returns whether a model is functional, without another `call`."""
    is_list = isinstance(model, keras.Sequential)
    return not is_list and internals.is_functional(model)


def _functional(operation: keras.Operation) -> keras.Model | None:
    """Returns the functional model that an operation is, or None."""
    if isinstance(operation, keras.Sequential):
        operation = internals.functional_of(operation)
    return operation if internals.is_functional(operation) else None


def graph_hash(model: keras.Model) -> str:
    """Returns a hash of a model's graph, the same for equal graphs.

    It has the classes of layers alone: a file may give them other names.
    """
    inputs = [f"input {i}" for i, _ in enumerate(model.inputs)]
    return _hash(_computed(model, inputs))


def _computed(model: keras.Model, inputs: list[str]) -> list[str]:
    """Returns texts of the outputs of a model, by texts of its inputs."""
    texts = dict(zip(map(id, model.inputs), inputs))
    for call in internals.graph_calls(model):
        leaves = tree.flatten((call.args, call.kwargs))
        arguments = [texts[id(leaf)] for leaf in leaves if id(leaf) in texts]
        inner = _functional(call.operation)
        if inner is not None and len(arguments) == len(inner.inputs):
            outputs = _computed(inner, arguments)
        else:
            name, text = type(call.operation).__name__, _hash(arguments)
            outputs = [
                f"{name} of {text}, {i}" for i in range(len(call.outputs))
            ]
        texts.update(zip(map(id, call.outputs), outputs))
    return [texts[id(tensor)] for tensor in tree.flatten(model.output)]


def _hash(texts: list[str]) -> str:
    # A text of all that a tensor follows from would grow at each use.
    return hashlib.sha256(", ".join(texts).encode()).hexdigest()


def _problems(model: keras.Model) -> list[str]:
    """Returns errors of inputs that a pipeline cannot take."""
    problems = []
    # Layers with a state for each row ask for their number, and are refused.
    is_stateful = any(
        getattr(layer, "stateful", False) is True
        for layer in internals.flat_layers(model)
    )
    for tensor in model.inputs:
        of = f"the input '{tensor.name}' of model '{model.name}'"
        has_rows = not tensor.shape or tensor.shape[0] is not None
        if has_rows and not is_stateful:
            problems.append(
                f"A model must take batches of any size. Received: {of}, of "
                f"shape {tensor.shape}. Make it with `keras.Input(shape)`, "
                "where `shape` is that of a row."
            )
        if tensor.sparse or tensor.ragged:
            problems.append(
                f"The inputs of a model must be dense. Received: {of}, which "
                "is sparse or ragged. Turn the data into dense tensors, and "
                "leave `sparse` and `ragged` of `keras.Input` out."
            )
    return problems
