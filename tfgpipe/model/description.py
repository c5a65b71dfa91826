"""Describes a `GPipe`: its cells, its inputs and its outputs.

A list of layers gets symbolic outputs when they are first asked for:
`Built.model` calls the layers on symbolic tensors from a `keras.Input` on. They
are the model's and its layers' `inputs` and `outputs`: functional
models can be made of them.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.arguments import Arguments
from tfgpipe.devices import placement
from tfgpipe.inputs import shapes
from tfgpipe.internals import Nest
from tfgpipe.model.build import Built
from tfgpipe.model.face import Face
from tfgpipe.profiles import aligned
from tfgpipe.schedules import Rule, Schedule

# Keras itself refuses other `layers`.
_FIXED = {*inspect.signature(Arguments.__init__).parameters} - {
    "self",
    "layers",
    "replicas",
}


class Description(Face):
    """The part of `GPipe` that tells what it is, without running it."""

    def __init__(self, arguments: Arguments, **kwargs: Any):
        super().__init__(arguments, **kwargs)
        self._built: Built | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to change what cells and programs were made by."""
        if name in _FIXED:
            raise AttributeError(
                f"`{name}` must be given when a `GPipe` is made, which has its "
                f"cells by it. Received: model.{name} = {value!r}. Make a new "
                "one of the same layers, which keep their weights: "
                f"`tfgpipe.GPipe(layers, {name}={value!r}, ...)`."
            )
        if name in ("activity_regularizer", "call") and value is not None:
            raise AttributeError(
                f"`{name}` of a `GPipe` must stay as it is: a pipeline calls "
                "its layers, and not the model. Received: "
                f"model.{name} = {value!r}. Put what it does into a layer of "
                "the list."
            )
        if name == "jit_compile":  # Keras skips values that are as before
            object.__setattr__(self, name, value)
            return
        is_own = name in vars(self) or hasattr(type(self), name)
        if not is_own and self._held(name) is not None:
            raise AttributeError(
                f"`{name}` must be set in the functional model that the "
                f"`GPipe` was made of, which has it. Received: model.{name} = "
                f"{value!r}. Set `model.model.{name}` instead."
            )
        super().__setattr__(name, value)

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
    def inputs(self) -> list[keras.KerasTensor]:
        """Symbolic inputs, once the model is built."""
        flat = tree.flatten(self._known("input_spec"))
        return [tensor for tensor in flat if tensor is not None]

    @property
    def outputs(self) -> list[keras.KerasTensor]:
        """Symbolic outputs, once the model is built."""
        return tree.flatten(self.output)

    @property
    def input(self) -> Any:
        """Nest of the `inputs`, as the first layer or the `model` has it."""
        spec = self._known("input_spec")
        has_all = all(tensor is not None for tensor in tree.flatten(spec))
        # Called on it, a layer of a list has its `output`, too.
        return self.model.input if has_all else spec

    @property
    def output(self) -> Any:
        """Nest of the `outputs`, as the last layer or the `model` has it."""
        return self._known("model").output

    @property
    def input_names(self) -> list[str]:
        """Names of the `inputs`, by which a dict of data is understood."""
        return [tensor.name for tensor in self.inputs]

    @property
    def input_shape(self) -> Any:
        """Nest of shapes (batch, ...), once the model is built."""
        return shapes(self._known("input_spec"))

    @property
    def output_shape(self) -> Any:
        """Nest of shapes (batch, ...), once the model is built."""
        return shapes(self._known("output_spec"))

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
        return self._known("model") if model is None else model

    def _known(self, name: str) -> Any:
        # Keras, and users, ask by `hasattr`: no other error will do.
        if self._built is None:
            raise AttributeError(
                f"A `GPipe` has inputs and outputs when it is built. Received: "
                f"'{self.name}', which has seen no data. Call "
                "`model.build(input_shape)` first, or let the list of layers "
                "begin with `keras.Input(shape)`."
            )
        return getattr(self._built, name)

    @property
    def input_dtype(self) -> str:
        """To which `model(x)` casts floats, as the plain model does."""
        if self._source.model is not None:  # has inputs of several dtypes
            return self._source.model.input_dtype
        if self._source.input_spec is not None:
            return self._source.input_spec.dtype
        return self.sequence[0].compute_dtype

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
        dtype = self.input_dtype
        specs = tree.map_shape_structure(
            lambda shape: keras.KerasTensor(shape, dtype), input_shape
        )
        return shapes(self.compute_output_spec(specs))

    def check_input_shape(self, input_shape: Any) -> None:
        """Refuses to be built again for other inputs.

        Raises:
            ValueError: If a size other than the batch's differs.
        """
        shapes = tree.flatten(
            tree.map_shape_structure(
                lambda shape: tf.TensorShape(shape)[1:], input_shape
            )
        )
        expected = [tf.TensorShape(t.shape)[1:] for t in self.inputs]
        if len(shapes) != len(expected) or not all(
            map(tf.TensorShape.is_compatible_with, shapes, expected)
        ):
            raise ValueError(
                "`input_shape` must be that for which the model was built. "
                f"Expected: {self.input_shape}. Received: "
                f"input_shape={input_shape}. Make a new `GPipe` of new layers."
            )

    def add(self, layer: keras.layers.Layer) -> NoReturn:
        """Refused: the cells are cut once."""
        self._refuse("add", f"tfgpipe.GPipe([*layers, {layer!r}], ...)")

    def pop(self, rebuild: bool = True) -> NoReturn:
        """Refused: the cells are cut once."""
        self._refuse("pop", "tfgpipe.GPipe(layers[:-1], ...)")

    def _refuse(self, name: str, cure: str) -> NoReturn:
        raise AttributeError(
            "The layers of a `GPipe` must be given when it is made. Received: "
            f"a call of `{name}`. Change the list of layers first, then make "
            f"the model: `{cure}`."
        )

    # ------------------------------------------------------------- the cells
    def cells(self) -> list[CellRecord]:
        """Returns what each cell holds, in order. The model must be built."""
        built = self.built_for("cells()")
        records, start = [], 0
        counted: set[int] = set()
        # Each of the user's cells is as many of these as there are groups.
        by_number = itertools.groupby(built.cells, lambda cell: cell.number)
        for number, (*parts,) in by_number:
            layers = [layer for part in parts for layer in part.sequence]
            weights = {id(w): w for layer in layers for w in layer.weights}
            uncounted = [w for key, w in weights.items() if key not in counted]
            counted.update(weights)
            stop = start + len(layers)
            records.append(
                CellRecord(
                    index=number,
                    layers=tuple(layer.name for layer in layers),
                    device=parts[0].device,
                    cost=sum(built.costs[start:stop]),
                    num_params=sum(math.prod(w.shape) for w in uncounted),
                    devices=parts[0].devices,
                    unit=self._arguments.costs.unit,
                    weight_bytes=sum(map(placement.tensor_bytes, uncounted)),
                )
            )
            start = stop
        return records

    def built_for(self, what: str) -> Built:
        """Returns what `build` has found; `what` needs it, for the error.

        Raises:
            ValueError: If the model is not built.
        """
        if self._built is None:
            raise ValueError(
                f"`{what}` needs a model that is built. Received: a model that "
                "has seen no data. Call `model.build(input_shape)` first, or "
                "let the list of layers begin with `keras.Input(shape)`."
            )
        return self._built

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints Keras's summary, and the cell of each layer.

        Takes the arguments of `keras.Model.summary`. Of a functional model it
        is the model's own, with its operations and what they are connected to.
        """
        model = self._source.model
        if model is None:
            super().summary(*args, **kwargs)
        else:
            with _summary.by(self._summary_of):
                model.summary(*args, **kwargs)
        if self._built is not None:
            print_cells(self.cells(), kwargs.get("print_fn"))

    def _summary_of(
        self, model: keras.Model, *args: Any, **kwargs: Any
    ) -> None:
        """Keras's summary, by this name and with this optimizer."""
        if model is self._source.model:
            model = internals.Shown(
                model,
                name=self.name,
                compiled=self.compiled,
                optimizer=getattr(self, "optimizer", None),
            )
        _summary.original(model, *args, **kwargs)


_summary = internals.Replaceable(keras.Model, "summary")
internals.draw_as(
    Description, lambda model: model.model if model.built else model
)


@dataclasses.dataclass(frozen=True)
class CellRecord:
    """The contents of one cell of a `GPipe`.

    Attributes:
        index: Position in the pipeline, from 0.
        layers: Names of the layers, in order.
        device: Full name of the device that runs it; of the first, if there
            are replicas.
        cost: Sum of the layers' costs, in their unit; by default FLOPs of one
            forward pass of one example.
        num_params: Scalars in all variables that were created for this cell. A
            variable that cells share counts in the first of them.
        devices: Full names of the devices that run it, one a replica. They
            share out the weights.
        unit: Of the cost: "FLOPs", "s" or "bytes"; empty if the user gave it.
        weight_bytes: Size of the variables that `num_params` counts.
    """

    index: int
    layers: tuple[str, ...]
    device: str
    cost: float
    num_params: int
    devices: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    unit: str = dataclasses.field(default="", repr=False)
    weight_bytes: int = dataclasses.field(default=0, repr=False)


def print_cells(
    cells: list[CellRecord], print_fn: Callable[[str], object] | None = None
) -> None:
    """Prints a table of the cells: one line a layer, one more a cell.

    `print_fn` is called with each line; None for `print`.
    """
    write = print_fn or print
    total = sum(cell.cost for cell in cells)
    unit = f" ({cells[0].unit})" if cells[0].unit else ""
    rows = [["cell", "device", "layers", "params", f"cost{unit}", "share"]]
    for cell in cells:
        share = cell.cost / total if total else 1 / len(cells)
        rows.append(
            [
                str(cell.index),
                " ".join(map(_short, cell.devices or (cell.device,))),
                cell.layers[0],
                f"{cell.num_params:,}",
                f"{cell.cost:.3g}",
                f"{share:.0%}",
            ]
        )
        rows += [["", "", name, "", "", ""] for name in cell.layers[1:]]
    for line in aligned(rows, (0, 1, 2)):
        write(line)


def _short(device: str) -> str:
    return device.removeprefix("/job:localhost/replica:0/task:0")
