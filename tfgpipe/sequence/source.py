"""The source of a `GPipe`: a list of layers, or a model, checked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tfgpipe import internals
from tfgpipe.sequence.layer_list import LayerList, is_pair
from tfgpipe.sequence.whole_model import GraphCall, WholeModel, has_graph
from tfgpipe.state import is_synchronized

Source = LayerList | WholeModel


def source_of(layers: Any) -> Source:
    """Returns the source of layers, of a model, or of calls of `layers_of`.

    Each item may be a pair with its cost.

    Raises:
        ValueError: If it is a model that cannot be taken apart.
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
            "`layers` must hold all that `layers_of` returned for a model, in "
            f"that order. Received: {len(calls)} of the {len(model.calls)} "
            f"calls of model '{model.model.name}', or others. To leave some "
            "out, make a model of the rest: `keras.Model(inputs, outputs)`."
        )
    return model.with_costs([cost for _, cost in pairs])


# Methods of a model's class that say, save or build something, or that only the
# user calls. A `GPipe` has its own.
_HARMLESS = set(
    "add build build_from_config call compile compile_from_config "
    "compute_output_shape compute_output_spec count_params evaluate export fit "
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
    cls = type(model)
    has_none = cls.call is keras.Model.call and "call" not in vars(model)
    if _has_own_call(model) and has_none:
        cure = (
            "Define `call` in its class, or pass `keras.Model(inputs, outputs)`"
        )
        if cls.train_step is not keras.Model.train_step:
            cure = (
                "Its `train_step` says what it trains: pass that model to a "
                "subclass of `tfgpipe.GPipe`, which holds the rest, such as a "
                "normaliser and an average of the weights, and whose "
                "`train_step` makes inputs and labels and calls "
                "`super().train_step((x, y))`, see "
                "docs/training.md#training-of-your-own"
            )
        raise ValueError(
            "A model must have a `call`, or be functional. Received: "
            f"'{model.name}', a {cls.__name__} with neither. {cure}."
        )
    if _has_own_call(model) and model.activity_regularizer is not None:
        raise ValueError(
            "A model must have no `activity_regularizer` of its own. Received: "
            f"'{model.name}', a {cls.__name__} with one. Add what it says by "
            "`self.add_loss` in its `call`, divided by the number of rows."
        )
    overridden = _overridden(model)
    if overridden:
        raise ValueError(
            "A model must be trained in Keras's way: a `GPipe` has steps, "
            "losses and metrics of its own. Received: "
            f"'{model.name}', a {cls.__name__} that overrides "
            f"{', '.join(overridden)}. Override them in a subclass of "
            "`tfgpipe.GPipe`, in which a step calls that of its base, as "
            "`super().train_step(data)`; and pass a model without them, as "
            "`keras.Model(model.inputs, model.outputs)` of a functional one."
        )
    may_prepare = (
        not hasattr(cls, _PREPARES)  # which `GPipe` calls, too
        and getattr(model, "preprocessor", True) is not None
    )
    if cls.fit is not keras.Model.fit and may_prepare:
        warnings.warn(
            "A `GPipe` does not call the `fit` of a model's class, which may "
            "prepare the data. Received: "
            f"'{model.name}', a {cls.__name__} with a `fit` of its own. Hand "
            "over data as the layers take them.",
            stacklevel=2,
        )


_PREPARES = "preprocess_samples"


def is_task(model: keras.Model | None) -> bool:
    """Returns whether a model is a task of KerasHub."""
    return hasattr(model, _PREPARES)


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
    if not isinstance(model, keras.Model):
        raise ValueError(
            "`model` must be a functional `keras.Model`, or a "
            f"`keras.Sequential`. Received: model={model!r}. A list of layers "
            "is taken as it is by `GPipe`."
        )
    source = source_of(model)
    if isinstance(source, LayerList):
        return _items(model)
    if not source.is_functional:
        raise ValueError(
            "`model` must be functional, or a `keras.Sequential`: which layers "
            "a `call` of its own calls is known when it has run. Received: "
            f"'{model.name}', a {type(model).__name__}. Pass the model to "
            "`GPipe` itself; `cells()` shows what it calls."
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
        whole.check_read(config.pop("graph", None))
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

    Raises:
        ValueError: If there is one.
    """
    for layer in layers:
        for inner in internals.flat_layers(layer):
            if reason := _unsupported(inner, num_micro_batches, num_replicas):
                raise ValueError(
                    "A layer must treat micro-batches as it treats their "
                    f"mini-batch. Received: layer '{inner.name}' with {reason}"
                )


def _unsupported(
    layer: keras.layers.Layer, num_micro_batches: int, num_replicas: int
) -> str | None:
    """Says why a pipeline cannot train a layer as Keras would, or None."""
    is_split = num_micro_batches * num_replicas > 1
    if is_split and getattr(layer, "renorm", False) is True:
        return (
            "renorm=True, which normalises by its moving statistics, and "
            f"num_micro_batches={num_micro_batches}"
            + (f" in {num_replicas} replicas" if num_replicas > 1 else "")
            + ". Pass renorm=False, or num_micro_batches=1"
            + (" and no replicas." if num_replicas > 1 else ".")
        )
    is_known = isinstance(
        layer, keras.layers.BatchNormalization
    ) and not internals.has_own_moments(layer)
    if num_replicas > 1 and is_synchronized(layer) and not is_known:
        return (
            "synchronized=True, which takes moments over replicas, and "
            f"{num_replicas} replicas. Pass synchronized=False, or use a "
            "`keras.layers.BatchNormalization`, which computes its moments "
            "in Keras's way."
        )
    if getattr(layer, "stateful", False) is True:
        return (
            "stateful=True, which keeps a state for every row of a batch. "
            "Pass stateful=False, and make the states inputs and outputs of "
            "the model, by `initial_state` and return_state=True: a subclass "
            "of `GPipe` hands them on from batch to batch, see "
            "docs/your_model.md#states-from-batch-to-batch."
        )
    if internals.remat_mode(layer) is not None:
        return (
            "a `keras.RematScope` around it, which recomputes the layer in "
            "its own way. Make the layer outside of the scope, and choose "
            "what is recomputed with `remat`."
        )
    return None
