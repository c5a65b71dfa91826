"""Checks the list of layers that the user gives, and takes it apart."""

from __future__ import annotations

from typing import Any

import keras

from tfgpipe import cost as cost_lib
from tfgpipe.layer_graph import graph_problem


class LayerList:
    """A list of layers, some with a cost, maybe after a `keras.Input`.

    Args:
        items: What the user gave.

    Attributes:
        layers: The Keras layers.
        costs: For each what the user said of its cost, or None.
        input_spec: `keras.KerasTensor` of a leading `keras.Input`, or None.
        problems: What is wrong.
    """

    def __init__(self, items: Any):
        self.layers: list[keras.layers.Layer] = []
        self.costs: list[Any] = []
        self.input_spec: Any = None
        self.problems: list[str] = []
        found = list(items) if isinstance(items, (list, tuple)) else []
        first = found[0] if found else None
        if found and _input_spec(found[0]) is not None:
            self.input_spec = _input_spec(found.pop(0))
        if not found:
            self.problems.append(
                "`layers` must be a list of at least one Keras layer. "
                f"Received: layers={items!r}. Pass what you would pass to "
                "`keras.Sequential`."
            )
        for index, item in enumerate(found):
            self._add(index, item)
        self._check_names()
        if not self.problems:
            self._check_graph(first)

    def _add(self, index: int, item: Any) -> None:
        layer, cost = item if _is_pair(item) else (item, None)
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

    def _check_graph(self, first: Any) -> None:
        if isinstance(first, keras.layers.InputLayer):
            first = first.output
        if problem := graph_problem(self.layers, first):
            self.problems.append(
                "`layers` must be a chain: each layer is called on what the "
                "one before returns. Received the layers of another graph: "
                f"{problem}. A functional model is not taken, but as one "
                "layer: put its branches and operations into layers of your "
                "own, or let tensors travel along in a nest. To put layers of "
                "a chain into another order, pass copies: "
                "`layer.from_config(layer.get_config())`."
            )


def _is_pair(item: Any) -> bool:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    return not isinstance(item[1], (keras.layers.Layer, keras.KerasTensor))


def _is_input(item: Any) -> bool:
    return isinstance(item, (keras.layers.InputLayer, keras.KerasTensor))


def _input_spec(item: Any) -> Any:
    """The spec of a `keras.Input` or `keras.layers.InputLayer`, or None."""
    if not _is_input(item):
        return None
    is_tensor = isinstance(item, keras.KerasTensor)
    shape = item.shape if is_tensor else item.batch_shape
    return keras.KerasTensor((None, *shape[1:]), item.dtype)
