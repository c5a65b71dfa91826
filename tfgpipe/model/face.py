"""Shows Keras the model inside of a `GPipe`, whatever it reads.

Keras's trainer, `compile` and its files ask a model for its policy, weights,
layers and names. A `GPipe` that was made of a model answers as that model does:
by the attributes that `FORWARDED` lists, by the variables, because Keras tracks
the model as all that a `GPipe` holds, and in files, where the saver goes
through the model's attributes. One that was made of a list of layers answers
for itself, as a `keras.Sequential` of the list would.

What belongs to a training is the `GPipe`'s own: the optimizer, losses and
metrics of `compile`, `run_eagerly`, `jit_compile`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras

from tfgpipe import failures, internals
from tfgpipe.arguments import Arguments

# Properties that have the model's values, and are set in the model.
FORWARDED = (
    "compute_dtype",
    "dtype_policy",
    "quantization_mode",
    "supports_masking",
    "trainable",
    "variable_dtype",
)

# Methods of a model's class that Keras calls, where there are any.
_CALLED = ("load_assets", "save_assets")

# What the saver does not look into: it finds the layers by other names.
_HIDDEN = {"held_parts", "model", "sequence", "user_model"}

# In a model's group of a file, what a subclass of `GPipe` has beside it.
_BESIDE = "gpipe_"


def _holds_layers(value: Any, model: keras.Model) -> bool:
    """Returns whether a value has a layer that the graph has not."""
    if isinstance(value, keras.layers.Layer):
        return all(value is not operation for operation in model.operations)
    if isinstance(value, dict):
        value = [*value.values()]
    return isinstance(value, (list, tuple)) and any(
        _holds_layers(one, model) for one in value
    )


def _forwarded(name: str) -> property:
    """A property of Keras's layers that is the model's."""
    plain = getattr(keras.Model, name)

    def value(self: Any) -> Any:
        model = self.user_model
        return plain.fget(self) if model is None else getattr(model, name)

    def assign(self: Any, new: Any) -> None:
        model = self.user_model
        if model is None:
            plain.fset(self, new)
        else:
            setattr(model, name, new)

    return property(value, assign)


class Face(internals.HoldingModel):
    """The part of `GPipe` that Keras takes for the model inside.

    `arguments` has the layers, or the model.
    """

    def __init__(self, arguments: Arguments, **kwargs: object):
        super().__init__(**kwargs)
        self._arguments = arguments
        self._layers_come_first = False
        model = self.user_model
        # All that Keras tracks of the layers, and so the order of variables.
        self.held_parts = self.sequence if model is None else [model]
        if model is not None:
            self.autocast = model.autocast
            if not kwargs.get("trainable", True):
                model.trainable = False

    @property
    def _source(self) -> Any:
        return self._arguments.source

    @property
    def user_model(self) -> keras.Model | None:
        """The user's model; None for a list of layers."""
        arguments = vars(self).get("_arguments")  # none before it is made
        return None if arguments is None else arguments.source.user_model

    @property
    def sequence(self) -> list[keras.layers.Layer]:
        """The layers, in order; or the model, if it has a `call` of its own."""
        return self._source.layers

    def _named_after(self) -> keras.Model | None:
        return self.user_model

    # ------------------------------------------------------- what a model holds
    def _held(self, name: str) -> Any:
        """Returns an attribute of the model that holds layers beside its graph.

        A task of KerasHub has its `preprocessor`.
        """
        if name.startswith(internals.OF_TRACKING):
            return None
        model = self.user_model
        if name in _CALLED:
            return getattr(model, name, None)
        try:
            value = getattr(model, name)
            return value if _holds_layers(value, model) else None
        except Exception:  # Keras, too, passes by what raises, to save
            return None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Layers that the model holds besides its graph."""
            value = self._held(name)
            # A property that has no value has an error that says why.
            return super().__getattribute__(name) if value is None else value

    def _functional(self, what: str) -> keras.Model:
        """The functional model that it was made of, which has something.

        Raises:
            AttributeError: If it was made of a list of layers. Keras asks by
                `hasattr`.
        """
        model = self._source.model
        if model is None:
            raise AttributeError(
                f"A `GPipe` of a functional model has `{what}`. Received: "
                f"'{self.name}', which was made of a list of layers. See "
                "`model.layers`."
            )
        return model

    @property
    def operations(self) -> list[Any]:
        """The operations of the `model`, layers among them."""
        return self._functional("operations").operations

    @property
    def output_names(self) -> list[str]:
        """Names of the `model`'s outputs, for losses and labels."""
        return self._functional("output_names").output_names

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers, each once; in the order of the `model`, if it has one.

        What a subclass holds besides is in its attributes.
        """
        model = self._source.model
        layers_by_id = {id(layer): layer for layer in self.sequence}
        return [*layers_by_id.values()] if model is None else model.layers

    @property
    def metrics(self) -> list[Any]:
        """As Keras has them of the model that this was made of."""
        metrics: list[Any] = super().metrics
        model = self.user_model
        if model is None:
            return metrics
        end = len(internals.own_metrics(self))
        return [*metrics[:end], *internals.held_metrics(model), *metrics[end:]]

    def get_quantization_layer_structure(self, mode: str | None = None) -> Any:
        """Which layers are quantised in which order, as the model says."""
        model = self.user_model
        if model is None:
            return super().get_quantization_layer_structure(mode)
        return model.get_quantization_layer_structure(mode)

    # ---------------------------------------------------------------- files
    def save_own_variables(self, store: Any) -> None:
        """Writes what no layer has: what the model makes itself, as it does."""
        self._layers_come_first = False
        model, beside = self.user_model, dict[str, Any]()
        super().save_own_variables(beside)
        if model is None:
            _put(store, beside)
            return
        values: dict[str, Any] = {}
        model.save_own_variables(values)
        _put(store, values)
        prefix = _BESIDE if values else ""
        _put(store, {f"{prefix}{name}": v for name, v in beside.items()})

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote, or that of the plain model.

        Files of earlier versions have nothing that the model makes itself,
        which is said; and of a model with a `call` all layers as `layers`.
        """
        model = self.user_model
        self._layers_come_first = False
        if model is None:
            super().load_own_variables(store)
            return
        if not internals.is_functional(model):
            names = [name for name, _ in internals.saved_parts(model)]
            early = names[: names.index("layers")] if "layers" in names else []
            self._layers_come_first = internals.has_group(
                store, "layers"
            ) and not any(internals.has_group(store, name) for name in early)
        names = [*store.keys()]
        if internals.direct_variables(self):
            expected: dict[str, Any] = {}
            model.save_own_variables(expected)
            prefix = _BESIDE if expected else ""
            names_beside = [name for name in names if name.startswith(prefix)]
            super().load_own_variables(
                {
                    name.removeprefix(prefix): store[name]
                    for name in names_beside
                }
            )
            store = {n: store[n] for n in names if n not in names_beside}
        if names or not internals.direct_variables(model):
            model.load_own_variables(store)
            return
        lost = [v.name for v in internals.direct_variables(model)]
        failures.warn(
            "A file must have the weights that a model makes itself by "
            "`add_weight`, which files of earlier versions do not have. "
            f"Received: model '{model.name}', of which {lost} are not in the "
            "file, and stay as they are."
        )

    def parts_in_files(self) -> Iterator[tuple[str, Any]]:
        """Returns what Keras's files have of it, as of the plain model.

        After what the model has comes what belongs to the training: optimizer,
        seeds, what a subclass holds.
        """
        model, hidden = self.user_model, {*_HIDDEN}
        if model is not None:
            hidden.add("layers")
            if self._layers_come_first:
                yield "layers", model.layers
            for name, part in internals.saved_parts(model):
                if name != "optimizer":
                    yield name, part
        for name, part in internals.saved_parts(self):
            if name not in hidden:
                yield name, part


def _put(store: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        store[name] = value


for _name in FORWARDED:
    setattr(Face, _name, _forwarded(_name))
internals.save_by(Face, Face.parts_in_files)
