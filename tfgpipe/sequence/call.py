"""A call in the graph of a model, and what it is called on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals


@dataclasses.dataclass(eq=False)
class Value:
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
class Call:
    """A call of a layer or operation; `Value`s for tensors."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Value]

    @property
    def inputs(self) -> list[Value]:
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
    calls: Iterable[Call],
    given: Iterable[tuple[Value, Any]],
    wanted: Any,
    told: dict[str, Any] | None = None,
) -> Any:
    """Makes calls, one after the other.

    Args:
        calls: The calls.
        given: What they begin with.
        wanted: A nest of `Value`s.
        told: Keyword arguments for layers.

    Returns:
        The nest, with tensors.
    """
    known = dict(given)

    def tensor(leaf: Any) -> Any:
        return known[leaf] if isinstance(leaf, Value) else leaf

    for call in calls:
        args = tree.map_structure(tensor, call.args)
        kwargs = tree.map_structure(tensor, call.kwargs)
        if isinstance(call.operation, keras.layers.Layer):
            kwargs.update(told or {})
        made = tree.flatten(call.operation(*args, **kwargs))
        known.update(zip(call.outputs, made))
    return tree.map_structure(tensor, wanted)


def tensors_of(call: internals.GraphCall) -> list[keras.KerasTensor]:
    """The tensors of a call, each once, in the order of its arguments."""
    leaves = tree.flatten((call.args, call.kwargs))
    found = {id(t): t for t in leaves if isinstance(t, keras.KerasTensor)}
    return list(found.values())


def values_in(nest: Any) -> Iterable[Value]:
    """The tensors of a nest, each once."""
    leaves = tree.flatten(nest)
    return dict.fromkeys(v for v in leaves if isinstance(v, Value))
