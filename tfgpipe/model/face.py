"""What a `GPipe` is to Keras, and to who asks it: the model inside.

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

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
from keras import tree

from tfgpipe import internals
from tfgpipe.arguments import DEFAULTS, Arguments
from tfgpipe.inputs import shapes
from tfgpipe.internals import Nest
from tfgpipe.model.build import Built
from tfgpipe.model.groups import CellRecord, cell_records, print_cells
from tfgpipe.schedules import Rule, Schedule

# Properties that have the model's values, and are set in the model.
FORWARDED = (
    "compute_dtype dtype_policy quantization_mode supports_masking trainable "
    "variable_dtype".split()
)

# What a functional model, or a model's class, may have, and Keras asks for; and
# what a task of KerasHub has.
_ASKED_FOR = (
    "load_assets operations output_names preprocessor save_assets".split()
)

# What the saver does not look into: it finds the layers by other names.
_HIDDEN = {"held_parts", "model", "sequence", "user_model"}

# In a model's group of a file, what a subclass of `GPipe` has beside it.
_BESIDE = "gpipe_"

# Keras itself refuses other `layers`.
_FIXED = {*DEFAULTS, "costs"}


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

    def __init__(self, arguments: Arguments, **kwargs: Any):
        super().__init__(**kwargs)
        self._arguments = arguments
        self._built: Built | None = None
        model = self.user_model
        # All that Keras tracks of the layers, and so the order of variables.
        self.held_parts = self.sequence if model is None else [model]
        if model is not None:
            self.autocast = model.autocast
            if not kwargs.get("trainable", True):
                model.trainable = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to change what cells and programs were made by."""
        cure = None
        if name in _FIXED:
            cure = (
                "Make a new one of the same layers, which keep their weights: "
                f"`tfgpipe.GPipe(layers, {name}={value!r}, ...)`"
            )
        elif name in ("activity_regularizer", "call") and value is not None:
            cure = "Put what it does into a layer of the list"
        elif name == "jit_compile":  # Keras skips values that are as before
            object.__setattr__(self, name, value)
            return
        elif name == "preprocessor" and hasattr(self.user_model, name):
            cure = f"The model inside has it: set `model.model.{name}`"
        if cure is not None:
            raise AttributeError(
                f"`{name}` of a `GPipe` must stay as it was made. Received: "
                f"model.{name} = {value!r}. {cure}."
            )
        super().__setattr__(name, value)

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
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What the model has, of what Keras asks for."""
            if name in _ASKED_FOR:
                value = getattr(self.user_model, name, None)
                if value is not None:
                    return value
            # A property that has no value has an error that says why.
            return super().__getattribute__(name)

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers, each once; in the order of the `model`, if it has one."""
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

    # ------------------------------------------------------------ the arguments
    @property
    def num_partitions(self) -> int:
        """K, the number of cells."""
        return self._arguments.num_partitions

    @property
    def num_micro_batches(self) -> int:
        """M, the number of micro-batches of a mini-batch, in each replica."""
        return self._arguments.num_micro_batches

    @property
    def num_replicas(self) -> int:
        """R, the number of pipelines, see `PipelineStrategy`."""
        return self._arguments.num_replicas

    @property
    def devices(self) -> list[str]:
        """Full names, replica after replica, as events number them."""
        return [*self._arguments.devices]

    @property
    def schedule(self) -> str | Schedule:
        """The order of the tasks on each device: a name, or tasks."""
        return self._arguments.schedule

    @property
    def remat(self) -> Rule | Mapping[int, Rule]:
        """Which micro-batches are computed again, of all cells or by cell."""
        return self._arguments.remat

    @property
    def skip_nonfinite(self) -> bool:
        """Returns whether mini-batches that are not finite change nothing."""
        return self._arguments.skip_nonfinite

    @property
    def skip_outliers(self) -> float | None:
        """How far outliers are, which change nothing; None if none are."""
        return self._arguments.skip_outliers

    # ------------------------------------------------------- inputs and outputs
    @property
    def inputs(self) -> list[keras.KerasTensor]:
        """Symbolic inputs, once the model is built."""
        flat = tree.flatten(self._known("inputs").input_spec)
        return [tensor for tensor in flat if tensor is not None]

    @property
    def outputs(self) -> list[keras.KerasTensor]:
        """Symbolic outputs, once the model is built."""
        return tree.flatten(self.output)

    @property
    def input(self) -> Any:
        """Nest of the `inputs`, as the first layer or the `model` has it."""
        spec = self._known("input").input_spec
        has_all = all(tensor is not None for tensor in tree.flatten(spec))
        # Called on it, a layer of a list has its `output`, too.
        return self.model.input if has_all else spec

    @property
    def output(self) -> Any:
        """Nest of the `outputs`, as the last layer or the `model` has it."""
        return self._known("output").model.output

    @property
    def input_names(self) -> list[str]:
        """Names of the `inputs`, by which a dict of data is understood."""
        return [tensor.name for tensor in self.inputs]

    @property
    def input_shape(self) -> Any:
        """Nest of shapes (batch, ...), once the model is built."""
        return shapes(self._known("input_shape").input_spec)

    @property
    def output_shape(self) -> Any:
        """Nest of shapes (batch, ...), once the model is built."""
        return shapes(self._known("output_shape").output_spec)

    @property
    def model(self) -> keras.Model:
        """A plain model of Keras with these layers, and so their weights.

        The model that it was made of; of a list of layers, or a
        `keras.Sequential` that is not built, one that begins at its `input` and
        ends at its `output`, once it is built. `model.save` writes a file that
        plain Keras loads.
        """
        model = self.user_model
        if isinstance(model, keras.Sequential) and not model.built:
            model = None
        return self._known("model").model if model is None else model

    def _known(self, name: str) -> Built:
        # Keras, and users, ask by `hasattr`: no other error will do.
        return self.built_for(name, AttributeError)

    def built_for(
        self, what: str, error: type[Exception] = ValueError
    ) -> Built:
        """Returns what `build` has found; `what` needs it, for the error."""
        if self._built is None:
            raise error(
                f"`{what}` needs a model that is built. Call "
                "`model.build(input_shape)` first."
            )
        return self._built

    @property
    def input_dtype(self) -> str:
        """To which `model(x)` casts floats, as the plain model does."""
        if self._source.model is not None:  # has inputs of several dtypes
            return self._source.model.input_dtype
        if self._source.input_spec is not None:
            return self._source.input_spec.dtype
        return self.sequence[0].compute_dtype

    def specs_of_shapes(self, input_shape: Any) -> Any:
        """Returns specs of inputs of such shapes, in `input_dtype`."""
        dtype = self.input_dtype
        return tree.map_shape_structure(
            lambda shape: keras.KerasTensor(shape, dtype), input_shape
        )

    def compute_output_spec(
        self, inputs: Nest, training: bool | None = None
    ) -> Any:
        """Shapes and dtypes of outputs, see `keras.Layer`; nothing is run."""
        if self._source.model is not None:
            return self._source.model.compute_output_spec(inputs)
        for layer in self.sequence:
            inputs = layer.compute_output_spec(inputs)
        return inputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Shapes of outputs for shapes of inputs, built or not."""
        return shapes(
            self.compute_output_spec(self.specs_of_shapes(input_shape))
        )

    def cells(self) -> list[CellRecord]:
        """Returns what each cell holds, in order. The model must be built."""
        built, unit = self.built_for("cells()"), self._arguments.costs.unit
        return cell_records(built.cells, built.costs, unit)

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints Keras's summary, and the cell of each layer.

        Takes the arguments of `keras.Model.summary`. Of a functional model it
        is the model's own, with its operations and what they are connected to.
        """
        model = self._source.model
        if model is None:
            super().summary(*args, **kwargs)
        else:
            model.summary(*args, **kwargs)
        if self._built is not None:
            print_cells(self.cells(), kwargs.get("print_fn"))

    # ---------------------------------------------------------------- files
    def save_own_variables(self, store: Any) -> None:
        """Writes what no layer has: what the model makes itself, as it does."""
        values, beside = dict[str, Any](), dict[str, Any]()
        super().save_own_variables(beside)
        if self.user_model is not None:
            self.user_model.save_own_variables(values)
        prefix = _BESIDE if values else ""
        values |= {f"{prefix}{name}": value for name, value in beside.items()}
        for name, value in values.items():
            store[name] = value

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote, or the plain model."""
        model = self.user_model
        if model is None:
            super().load_own_variables(store)
            return
        if internals.direct_variables(self):
            expected: dict[str, Any] = {}
            model.save_own_variables(expected)
            prefix = _BESIDE if expected else ""
            names = [*store.keys()]
            beside = [name for name in names if name.startswith(prefix)]
            super().load_own_variables(
                {name.removeprefix(prefix): store[name] for name in beside}
            )
            store = {n: store[n] for n in names if n not in beside}
        model.load_own_variables(store)

    def parts_in_files(self) -> Iterator[tuple[str, Any]]:
        """Returns what Keras's files have of it, as of the plain model.

        After what the model has comes what belongs to the training: optimizer,
        seeds, what a subclass holds.
        """
        model, hidden = self.user_model, {*_HIDDEN}
        if model is not None:
            hidden.add("layers")
            for name, part in internals.saved_parts(model):
                if name != "optimizer":
                    yield name, part
        for name, part in internals.saved_parts(self):
            if name not in hidden:
                yield name, part


for _name in FORWARDED:
    setattr(Face, _name, _forwarded(_name))
internals.save_by(Face, Face.parts_in_files)
internals.draw_as(Face, lambda model: model.model if model.built else model)
