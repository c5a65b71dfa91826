"""Checks the list of layers that the user gives, and takes it apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import Step
from tfgpipe.planning import PlacedStep, partition
from tfgpipe.planning import cost as cost_lib
from tfgpipe.sequence.inference import infer, placed_steps
from tfgpipe.sequence.layer_graph import graph_problem


class LayerList:
    """A list of layers, some with a cost, maybe after a `keras.Input`.

    Args:
        items: What the user gave.

    Attributes:
        model: The model that the layers are of, if that was given.
        layers: The Keras layers.
        steps: Calls of them, one after the other.
        costs: For each what the user said of its cost, or None.
        input_spec: The tensor of a leading `keras.Input`, or of one that the
            first layer stands for; or None.
        problems: What is wrong.
    """

    model: keras.Model | None = None

    def __init__(self, items: Any):
        self.layers: list[keras.layers.Layer] = []
        self.costs: list[Any] = []
        self.input_spec: Any = None
        self.problems: list[str] = []
        found = list(items) if isinstance(items, (list, tuple)) else []
        first = found[0] if found else None
        start = 0  # index of the first layer
        if found and _input_spec(found[0]) is not None:
            self.input_spec = _input_spec(found.pop(0))
            start = 1
        if not found:
            self.problems.append(
                "`layers` must be a list of at least one Keras layer. "
                f"Received: layers={items!r}. Pass what you would pass to "
                "`keras.Sequential`."
            )
        for index, item in enumerate(found, start):
            self._add(index, item)
        self.steps = [Step(layer) for layer in self.layers]
        if self.input_spec is None and self.layers:
            self.input_spec = _declared_by(self.layers[0])
        self._check_names()
        if not self.problems:
            self._check_graph(first, start)

    def check_again(self) -> None:
        """What a layer computes may be changed until it is traced."""

    def check(self, spec: Any) -> None:
        """Its layers are called as they are, whatever they compute."""

    def infer(self, spec: Any, is_split: bool) -> tuple[Any, list[float]]:
        """What the last layer returns, and costs; see `inference.infer`."""
        return infer(self.layers, self.costs, spec, is_split)

    def placed_steps(self, spec: Any) -> tuple[list[PlacedStep], Any]:
        """What comes into each step, and goes out of the last one."""
        return placed_steps(self.layers, spec)

    def arranged(self, x: Any) -> Any:
        """Data as the first layer takes it.

        As in `keras.Sequential`, where there is a `keras.Input` it may be in a
        dict by its name, which may hold more, or in a list by itself.

        Raises:
            ValueError: If there are other inputs.
        """
        if self.input_spec is None or not isinstance(x, (dict, list, tuple)):
            return x
        name, is_dict = self.input_spec.name, isinstance(x, dict)
        if is_dict and name in x:
            return x[name]
        if not is_dict and len(x) == 1:
            return x[0]
        found = f"a dict of {[*x]}" if is_dict else f"{len(x)} tensors"
        raise ValueError(
            f"`x` must have the input of the list of layers, '{name}'. "
            f"Received: {found}. Pass one tensor, or a dict that has it by "
            "this name; for several inputs, make a `GPipe` of a functional "
            "model."
        )

    def starts(self) -> list[int]:
        """The steps with which a cell can begin."""
        return [*range(len(self.steps))]

    def cut(self, costs: Sequence[float], num_partitions: int) -> list[int]:
        """The number of steps of each cell."""
        return partition(costs, num_partitions)

    def config(self) -> dict[str, Any]:
        """The layers as plain values; a layer that comes again is one."""
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
        if not isinstance(layer, keras.layers.Layer) or _is_input(layer):
            self.problems.append(
                "`layers` must hold Keras layers or pairs (layer, cost). "
                f"Received: {item!r} (of type {type(item).__name__}) at "
                f"index {index}. Wrap a function in "
                "`keras.layers.Lambda`; a `keras.Input` comes first."
            )
            return
        self._check_cost(layer, cost)
        self.layers.append(layer)
        self.costs.append(cost)

    def _check_cost(self, layer: keras.layers.Layer, cost: Any) -> None:
        if cost is None or callable(cost):
            return  # what functions return is checked when they are called
        try:
            cost_lib.resolve_cost(layer, cost, None)
        except ValueError as error:
            self.problems.append(str(error))

    def _check_names(self) -> None:
        by_name = {layer.name: layer for layer in self.layers}
        doubles = sorted(
            {la.name for la in self.layers if by_name[la.name] is not la}
        )
        if doubles:
            self.problems.append(
                "`layers` must have different names. Received: several layers "
                f"named {doubles}. Pass `name=` to them."
            )

    def _check_graph(self, first: Any, start: int) -> None:
        if isinstance(first, keras.layers.InputLayer):
            first = first.output
        if problem := graph_problem(self.layers, first, start):
            self.problems.append(
                "`layers` must be a chain: each layer is called on what the "
                "one before returns. Received the layers of another graph: "
                f"{problem}. Pass the functional model itself, "
                "`keras.Model(inputs, outputs)`: it is taken apart by its "
                "graph. To put layers of "
                "a chain into another order, pass copies: "
                "`layer.from_config(layer.get_config())`."
            )


def is_pair(item: Any) -> bool:
    """Whether an item of a list is one with its cost."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    return not isinstance(item[1], (keras.layers.Layer, keras.KerasTensor))


def _is_input(item: Any) -> bool:
    return internals.input_layer(item) is not None


def _input_spec(item: Any) -> Any:
    """The tensor of a `keras.Input`, for batches of any size; or None."""
    layer = internals.input_layer(item)
    if layer is None:
        return None
    if layer.batch_shape[0] is None and not (layer.sparse or layer.ragged):
        return layer.output
    shape = layer.batch_shape[1:]
    return keras.Input(shape, dtype=layer.dtype, name=layer.name)


def _declared_by(layer: keras.layers.Layer) -> Any:
    """The input that a first layer stands for in `keras.Sequential`, or None.

    That of its `input_shape=`, or of a model that is built for one tensor.
    """
    shape = internals.input_shape_argument(layer)
    if shape is not None:
        return keras.Input(shape)
    is_model = isinstance(layer, keras.Model)
    inputs: list[Any] = getattr(layer, "inputs", []) if is_model else []
    if len(inputs) != 1 or tree.is_nested(getattr(layer, "input", None)):
        return None
    return keras.Input(inputs[0].shape[1:], dtype=inputs[0].dtype)
