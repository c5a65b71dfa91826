"""A step of a cell: a call of a layer on what the step before has left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import tree

from tfgpipe.cells.values import Boundary, structure_of


class Step:
    """Calls a layer on all that the step before returned.

    Args:
        layer: The layer.

    Attributes:
        repeated: By the id of a weight, for each of its lookups, whether its
            indices are the same for all micro-batches: found by a trial.
    """

    def __init__(self, layer: keras.layers.Layer):
        self.layer = layer
        self.repeated: dict[int, list[bool]] = {}

    def __call__(self, values: Any, training: bool) -> Any:
        """Runs the layer.

        It gets identities of its inputs, so that the gradients of all its uses
        of a tensor are summed first, wherever a cell begins.

        Args:
            values: What the step before returned, a nest of tensors.
            training: For the layer, or it is what the last layer left.
        """
        return self.layer(_copied(values), training=training)


@dataclasses.dataclass(frozen=True)
class Live:
    """A tensor that comes into a `GraphStep`, by its position."""

    index: int


@dataclasses.dataclass(frozen=True)
class Made:
    """An output of the operation of a `GraphStep`, by its position."""

    index: int


class GraphStep(Step):
    """Calls a layer, or an operation, of a model's graph.

    The tensors that are alive before it come in, flat; those that are alive
    afterwards go out. One that several steps use goes from one to the next:

        t ---+---------+--- ...     gradient of t = that of its first use
             |         |                            + gradient of what goes on
           step 3    step 7

    so the gradients of its uses are added one by one, from the last one on,
    and the sum does not depend on where cells begin.

    Args:
        operation: The layer or the `keras.Operation`.
        args: Its positional arguments, with `Live` for tensors.
        kwargs: Its keyword arguments.
        gives: What goes out: a nest of `Live` and `Made`.

    Attributes:
        graph: What knows the whole model.
        uses: The positions of the tensors that the operation takes.
    """

    def __init__(
        self,
        operation: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        gives: Any,
    ):
        is_layer = isinstance(operation, keras.layers.Layer)
        read = [
            leaf
            for leaf in tree.flatten((args, kwargs))
            if isinstance(leaf, keras.Variable)
        ]
        super().__init__(operation if is_layer else _stand_in(operation, read))
        self.graph: Any = None
        self.operation = operation
        self.args = args
        self.kwargs = kwargs
        self.gives = gives
        self.uses = list(
            dict.fromkeys(
                leaf.index
                for leaf in tree.flatten((args, kwargs))
                if isinstance(leaf, Live)
            )
        )

    def __call__(self, values: Any, training: bool) -> Any:
        """See `Step`."""
        live = tree.flatten(values)
        given = {i: _copied(live[i]) for i in self.uses}
        made = tree.flatten(self.run(given, training))
        return self.goes_on(
            lambda i: _copied(live[i]) if i in given else live[i],
            lambda i: made[i],
        )

    def goes_on(
        self, live: Callable[[int], Any], made: Callable[[int], Any]
    ) -> Any:
        """What goes out, a nest.

        Args:
            live: Returns what came in, by its position.
            made: Returns what the operation made.
        """
        return tree.map_structure(
            lambda leaf: (live if isinstance(leaf, Live) else made)(leaf.index),
            self.gives,
        )

    def run(self, given: Mapping[int, Any], training: bool) -> Any:
        """Calls the operation.

        Args:
            given: The tensors that it takes, by their positions.
            training: For layers.
        """
        args, kwargs = self.arguments(given)
        if isinstance(self.operation, keras.layers.Layer):
            kwargs["training"] = training
        return self.operation(*args, **kwargs)

    def arguments(self, given: Mapping[int, Any]) -> tuple[Any, Any]:
        """Positional and keyword arguments, with these tensors."""
        return tree.map_structure(
            lambda leaf: given[leaf.index] if isinstance(leaf, Live) else leaf,
            (self.args, self.kwargs),
        )


def _copied(nest: Any) -> Any:
    """Identities of tensors, with their masks."""
    return Boundary.of(nest).nest(structure_of(nest))


class _StandIn(keras.layers.Layer):
    """A layer for all that is noted by layers."""


def _stand_in(
    operation: keras.Operation, variables: list[keras.Variable]
) -> keras.layers.Layer:
    """What stands for an operation, with what it reads."""
    layer = _StandIn(name=operation.name)
    layer.read = variables
    layer.built = True
    return layer


def named(layer: keras.layers.Layer) -> str:
    """What to call a layer, or the operation for which it stands."""
    kind = "operation" if isinstance(layer, _StandIn) else "layer"
    return f"{kind} '{layer.name}'"
