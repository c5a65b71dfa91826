"""The source of a `GPipe`: a list of layers, or a model, checked.

A model, functional or with a `call` of its own, is called as it is.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import LayerCall
from tfgpipe.internals import Nest
from tfgpipe.sequence import steps
from tfgpipe.sequence.layer_list import LayerList, is_pair
from tfgpipe.state import is_synchronized


class GraphCall(LayerCall):
    """A call of a layer or an operation in the graph of a model, its source."""

    def __init__(self, operation: keras.Operation, source: WholeModel):
        super().__init__(operation)
        self.source = source


class WholeModel(steps.Source):
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
        trainer = self.trainer()
        if trainer is None or not trainer.compiled:
            return steps.called_model(self.model, x, training)
        with (
            internals.replaced(self.model, "compiled", True),
            internals.replaced(self.model, "optimizer", trainer.optimizer),
        ):
            return steps.called_model(self.model, x, training)

    def _called(self, model: keras.Model) -> Iterator[keras.Operation]:
        """Yields the operations of a model's graph, in Keras's order."""
        self.opened.append(model)
        for call in internals.graph_calls(_functional(model)):
            if _functional(call.operation) is None:
                yield call.operation
            else:
                yield from self._called(call.operation)

    def config(self) -> dict[str, Any]:
        """Returns the model as plain values."""
        config = {"model": keras.saving.serialize_keras_object(self.model)}
        if self.is_functional:
            config["graph"] = graph_hash(self.model)
        return config


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

    def digest(texts: list[str]) -> str:
        # A text of all that a tensor follows from would grow at each use.
        return hashlib.sha256(", ".join(texts).encode()).hexdigest()

    def computed(model: keras.Model, inputs: list[str]) -> list[str]:
        """Returns texts of the outputs of a model, by texts of its inputs."""
        texts = dict(zip(map(id, model.inputs), inputs))
        for call in internals.graph_calls(model):
            leaves = map(id, tree.flatten((call.args, call.kwargs)))
            arguments = [texts[leaf] for leaf in leaves if leaf in texts]
            inner = _functional(call.operation)
            if inner is not None and len(arguments) == len(inner.inputs):
                outputs = computed(inner, arguments)
            else:
                text = f"{type(call.operation).__name__} of {digest(arguments)}"
                outputs = [f"{text}, {i}" for i in range(len(call.outputs))]
            texts.update(zip(map(id, call.outputs), outputs))
        return [texts[id(tensor)] for tensor in tree.flatten(model.output)]

    return digest(
        computed(model, [f"input {i}" for i in range(len(model.inputs))])
    )


def _problems(model: keras.Model) -> list[str]:
    """Returns errors of inputs that a pipeline cannot take."""
    problems = []
    # Layers with a state for each row ask for their number, and are refused.
    layers = internals.flat_layers(model)
    is_stateful = any(getattr(la, "stateful", 0) is True for la in layers)
    for tensor in model.inputs:
        has_rows = not tensor.shape or tensor.shape[0] is not None
        is_sparse = tensor.sparse or tensor.ragged
        if is_sparse or (has_rows and not is_stateful):
            problems.append(
                "The inputs of a model must be dense, and take batches of any "
                f"size. Received: input '{tensor.name}', of shape "
                f"{tensor.shape}{', sparse or ragged' if is_sparse else ''}."
            )
    return problems


Source = LayerList | WholeModel


def source_of(layers: Any) -> Source:
    """Returns the source of layers, of a model, or of calls of `layers_of`.

    Each item may be a pair with its cost.
    """
    if isinstance(layers, keras.Model):
        _check_model(layers)
        if isinstance(layers, keras.Sequential) and not _has_own_call(layers):
            return LayerList(_items(layers), [layers])
        return WholeModel(layers)
    items = layers if isinstance(layers, (list, tuple)) else []
    pairs = [item if is_pair(item) else (item, None) for item in items]
    calls = [call for call, _ in pairs if isinstance(call, GraphCall)]
    if not calls:
        return LayerList(layers)
    model = calls[0].source
    if [*map(id, calls)] != [*map(id, model.calls)]:
        raise ValueError(
            f"`layers` must hold all {len(model.calls)} calls that `layers_of` "
            f"returned, in that order. Received: {len(calls)} of them."
        )
    with_costs = copy.copy(model)
    with_costs.costs = [cost for _, cost in pairs]
    return with_costs


# Methods of a model's class that say, save or build something, or that only the
# user calls. A `GPipe` has its own.
_HARMLESS = set(
    "add build build_from_config call compile compile_from_config "
    "compute_output_shape compute_output_spec count_params evaluate export "
    "from_config get_build_config get_compile_config get_config get_layer "
    "get_quantization_layer_structure get_state_tree get_weights loss "
    "load_own_variables load_weights path pop predict predict_on_batch "
    "quantize save save_own_variables save_weights set_state_tree set_weights "
    "summary supports_masking test_on_batch to_json train_on_batch".split()
)

_OF_GRAPHS = {"__call__", "input", "inputs", "layers", "output", "outputs"}

# Others that begin with an underscore are called where a model is made, saved
# or quantised, or are no methods of Keras: those come and go with its versions.
_PRIVATE = {"__call__", *internals.METHODS_OF_STEPS}


def _overridden(model: keras.Model) -> list[str]:
    """Returns the overridden names that matter to training and inference."""
    is_list = isinstance(model, keras.Sequential)
    harmless = _HARMLESS if is_list else _HARMLESS | _OF_GRAPHS
    if is_task(model) or getattr(model, "preprocessor", True) is None:
        harmless = harmless | {"fit"}  # which prepares data, or has nothing to
    keras_cls = next(filter(internals.is_keras, type(model).__mro__))
    return [
        name
        for name in sorted(internals.overridden(model))
        if name in _PRIVATE or not name.startswith("_")
        if hasattr(keras_cls, name) and name not in harmless
    ]


def _has_own_call(model: keras.Model) -> bool:
    """Returns whether a model has another `call` than its layers or graph."""
    if isinstance(model, keras.Sequential):
        return not internals.runs_its_layers(model)
    return not has_graph(model)


def _check_model(model: keras.Model) -> None:
    """Refuses a model whose class does more than its layers, or its `call`."""
    received = f"'{model.name}', a {type(model).__name__}"
    if _has_own_call(model) and model.activity_regularizer is not None:
        raise ValueError(
            "A model must have no `activity_regularizer` of its own. Received: "
            f"{received}. Add it by `self.add_loss`, divided by the rows."
        )
    if overridden := _overridden(model):
        raise ValueError(
            f"A model must be trained in Keras's way. Received: {received} "
            f"that overrides {', '.join(overridden)}. Override them in a "
            "subclass of `tfgpipe.GPipe` instead."
        )


def is_task(model: keras.Model | None) -> bool:
    """Returns whether a model is a task of KerasHub."""
    return hasattr(model, "preprocess_samples")


def prepares_data(model: keras.Model | None) -> bool:
    """Returns whether a model is a task of KerasHub with a preprocessor."""
    has_one = getattr(model, "preprocessor", None) is not None
    return has_one and is_task(model)


def _items(model: keras.Sequential) -> list[Any]:
    """Returns the layers of a model, after its `keras.Input` if any."""
    first = model.inputs[:1] if model.built and model.inputs else []
    return [*first, *model.layers]


def layers_of(model: keras.Model) -> list[Any]:
    """Takes a model apart into what `GPipe` makes cells of.

    Args:
        model: A functional `keras.Model`, or a `keras.Sequential`.

    Returns:
        The layers of a `keras.Sequential`. Of a functional model its calls of
        layers and operations, in order, each with the `layer` and the
        `operation` that it calls. Put a cost to some of them, `(call, cost)`,
        or count them for `layers_per_cell`; all of them, in this order, make a
        `GPipe`, as the model itself does.

    Raises:
        ValueError: If the model is neither.

    Example:

    >>> import tfgpipe
    >>> x = keras.Input((8,))
    >>> hidden = keras.layers.Dense(8, "relu", name="hidden")(x)
    >>> y = keras.layers.Add(name="sum")([x, hidden])
    >>> calls = tfgpipe.layers_of(keras.Model(x, y))
    >>> [call.layer.name for call in calls]
    ['hidden', 'sum']
    >>> pipeline = tfgpipe.GPipe([(calls[0], 3.0), (calls[1], 1.0)], 1)
    """
    source = source_of(model) if isinstance(model, keras.Model) else None
    if isinstance(source, LayerList):
        return _items(model)
    if source is None or not source.is_functional:
        raise ValueError(
            "`model` must be a functional `keras.Model` or a `Sequential`. "
            f"Received: model={model!r}."
        )
    return [*source.calls]


def items_from_config(config: dict[str, Any], custom_objects: Any) -> Any:
    """Returns the layers, or calls, of a `Source.config`, with costs.

    Or the model, if it has a `call` of its own.
    """

    def deserialized(value: dict[str, Any]) -> Any:
        return keras.saving.deserialize_keras_object(
            value, custom_objects=custom_objects
        )

    costs = config.pop("costs")
    if "model" in config:
        with warnings.catch_warnings():
            # Keras says so of a task of KerasHub, which is compiled when it is
            # made; and the `GPipe` is compiled, with the optimizer's state.
            warnings.filterwarnings("ignore", r"`compile\(\)` was not called")
            model = deserialized(config.pop("model"))
        _check_model(model)
        if isinstance(model, keras.Sequential) or _has_own_call(model):
            return model
        whole = WholeModel(model)
        # Keras tells the calls of a layer apart by their numbers, which are
        # others where a model inside is made first, of the layer's own tensors.
        graph = graph_hash(model)
        if config.pop("graph", graph) != graph:
            raise ValueError(
                f"Keras confuses calls of layers of model '{model.name}', "
                "which holds a model of its own tensors. Make the inner model "
                "of an input of its own, `inner = keras.Model(x, layer(x))` "
                "with `x = keras.Input(shape)`."
            )
        config.pop("wiring", None)  # of older versions, which counted others
        if len(costs) != len(whole.calls):
            config["layers_per_cell"] = None
            return model
        return [*zip(whole.calls, costs, strict=True)]
    layers = [deserialized(layer) for layer in config.pop("layers")]
    order = config.pop("order", range(len(costs)))
    first = layers[: len(layers) - max(order) - 1]  # `keras.Input`, or none
    sequence = [layers[len(first) + i] for i in order]
    return [*first, *zip(sequence, costs, strict=True)]


# ---------------------------------------------------- layers that are refused
def check_supported(
    layers: Sequence[keras.layers.Layer],
    num_micro_batches: int,
    num_replicas: int = 1,
) -> None:
    """Refuses layers whose meaning a pipeline would change, by what they are.

    What only a trace shows is refused there: `cells/tracer.py`,
    `state/scope.py`, `state/batch_normalization.py`.
    """
    is_split = num_micro_batches * num_replicas > 1
    for layer in (i for la in layers for i in internals.flat_layers(la)):
        reason = None
        if is_split and getattr(layer, "renorm", False) is True:
            reason = (
                "renorm=True. Pass renorm=False, or "
                "num_micro_batches=1 without replicas."
            )
        elif num_replicas > 1 and is_synchronized(layer):
            reason = "synchronized=True. Pass synchronized=False."
        elif getattr(layer, "stateful", False) is True:
            reason = (
                "stateful=True. Make the states inputs and outputs of the "
                "model, see docs/your_model.md#states-from-batch-to-batch."
            )
        elif internals.remat_mode(layer) is not None:
            reason = "a `keras.RematScope`. Choose `remat` instead."
        if reason is not None:
            raise ValueError(
                "A layer must treat micro-batches as it treats their "
                f"mini-batch. Received: layer '{layer.name}' with {reason}"
            )
