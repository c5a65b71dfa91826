"""Sizes of the steps of a model, by their rows, without allocating any of it.

The model runs on shapes, see `cells/outline.py`. A step is what a cell can
begin with, see `sequence/steps.py`:

    sections    embed | block | attention | dense | block | attention | head
    steps       embed | block                     | block             | head

It is traced for two numbers of rows, into graphs that never run. What grows
with the rows is a line through both.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import cell_of_call, shape_trace
from tfgpipe.costs.activations import memory_of_steps
from tfgpipe.costs.sizes import Activation, Bytes, LayerSize, StepMemory
from tfgpipe.devices import placement
from tfgpipe.graphs import (
    Indices,
    Part,
    TracedModel,
    differentiate,
    is_continuous,
    operation_flops,
    part_key,
    parts_of,
)
from tfgpipe.internals import Nest


class Placed:
    """A model as its steps.

    Their layers are built, without values.

    Args:
        source: The layers of the model, see `Source`.
        spec: Nest of `keras.KerasTensor`s that the model takes.

    Attributes:
        source: The same.
        spec: The same.
        layers: What each step holds, see `SectionCall`.
        parts: What each has of the graph, without losses and new state.
        weights: All that each has, and what is read of no layer.
        home: Tells which of the steps a call of a layer begins, or None.
        output: Specs of the outputs, a nest.

    Raises:
        ValueError: If a layer fails. It is named.
    """

    def __init__(self, source: Any, spec: Nest):
        self.source = source
        self.spec = spec
        outlined, self.output = source.outlined(spec)
        self.layers = [step.layer for step in source.steps]
        self.home = cell_of_call([step] for step in source.steps)
        self.parts = self._parts(outlined.traced)
        self.weights = self._weights(self.parts)

    def differentiated(self, rows: int) -> list[Part]:
        """Returns the steps for so many rows, with their backward passes.

        Without these, if the model cannot be differentiated: it may be made for
        `predict`.
        """
        source, spec = self.source, example_of(self.spec, rows)
        traced = shape_trace(source.call, source.layers, spec)
        return self._parts(traced, are_trained=True)

    @functools.cached_property
    def keys(self) -> list[str]:
        """Texts for files: all that a step computes, and all weights."""
        keys = []
        for part, weights in zip(self.parts, self.weights):
            shapes = [(tuple(v.shape), v.dtype, v.trainable) for v in weights]
            inputs = {t.ref() for t in part.inputs}
            are_inputs = [t.ref() in inputs for t in part.forward_inputs]
            facts = [are_inputs, repr(shapes)]
            keys.append(part_key(part, facts, in_process=False)[:32])
        return keys

    def _parts(
        self, traced: TracedModel, are_trained: bool = False
    ) -> list[Part]:
        cells = traced.cells_by(self.home)
        alone = dataclasses.replace(
            traced, cells=cells, losses=(), counts=(), new_state=(), moments=()
        )
        nothing: list[list[Indices]] = [[] for _ in traced.uses]
        if are_trained:
            has_gradient = [*map(is_continuous, alone.handed_out)]
            with contextlib.suppress(Exception):  # of many kinds
                alone = differentiate(alone, has_gradient, [])
        return parts_of(alone, len(self.layers), nothing)

    def _weights(self, parts: Sequence[Part]) -> list[list[keras.Variable]]:
        known = [v for layer in self.layers for v in layer.variables]
        held = {*map(id, known + internals.seeds_of(self.source.layers))}
        by_step = []
        for layer, part in zip(self.layers, parts):
            taken = {t.ref() for t in part.forward_inputs}
            read = [use.variable for use in part.uses]
            read += [v for v, t in part.traced.state if t.ref() in taken]
            others = {id(v): v for v in read if id(v) not in held}
            by_step.append([*layer.weights, *others.values()])
        return by_step


def example_of(spec: Nest, rows: int, size: int | None = None) -> Any:
    """Returns a nest of specs of batches for so many rows.

    Sizes that are not known become `size`.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, keras.KerasTensor) or not leaf.shape:
            return leaf
        sizes = [size if d is None else d for d in leaf.shape[1:]]
        return keras.KerasTensor((rows, *sizes), leaf.dtype)

    return tree.map_structure(one, spec)


# -------------------------------------------------------------- sizes of steps
# A row more must show, and a layer may fail on a single one.
_ROWS = (2, 4)


def layer_sizes(
    placed: Placed, num_slot_bytes: Callable[[keras.Variable], int]
) -> list[LayerSize]:
    """Computes the sizes of all steps, in order; weights need no values.

    `num_slot_bytes` tells what the optimizer keeps for a variable.
    """
    with internals.outside_functions():
        by_rows = [placed.differentiated(rows) for rows in _ROWS]
    memory = [*map(memory_of_steps, by_rows)]
    sizes, source = [], placed.source
    for part, needs, (layer, weights), flops, live in zip(
        by_rows[0],
        zip(*memory),
        with_weights(placed),
        source.flops,
        [row_bytes(placed.spec), *source.live_bytes[1:]],
    ):
        sizes.append(
            LayerSize(
                name=layer.name,
                num_values=sum(map(_count, weights)),
                **weight_sizes(weights, num_slot_bytes),
                flops=flops,
                live_bytes=live,
                memory=_memory_line(*needs),
                dtype=_dtype(part.operations),
            )
        )
    return sizes


def _dtype(operations: Sequence[tf.Operation]) -> str:
    """Returns the floating-point dtype in which most FLOPs are computed."""
    flops: dict[str, float] = collections.defaultdict(float)
    for operation in operations:
        dtypes = [t.dtype for t in operation.outputs if t.dtype.is_floating]
        for dtype in dtypes[:1]:
            flops[dtype.name] += operation_flops(operation)
    return max(flops, key=flops.__getitem__, default="float32")


def _memory_line(few: StepMemory, many: StepMemory) -> StepMemory:
    """Returns the sizes as `Bytes`, by those for `_ROWS`."""
    lines: dict[str, Any] = {
        name: tuple(
            Activation(a.by, _line((a.size, b.size)))
            for a, b in zip(getattr(few, name), getattr(many, name))
        )
        for name in ("inputs", "made")
    }
    for name in ("crossing", "sparse", "forward", "backward"):
        lines[name] = _line((getattr(few, name), getattr(many, name)))
    return few._replace(**lines)


def row_bytes(spec: Nest) -> int:
    """Returns the bytes of a row of a nest of tensors, or specs of them.

    Other sizes that are not known count as 1.
    """
    return sum(
        tf.as_dtype(t.dtype).size * math.prod(n or 1 for n in t.shape[1:])
        for t in keras.tree.flatten(spec)
        if t is not None
    )


def num_params(placed: Placed) -> int:
    """Counts the numbers in trainable weights, tied ones once."""
    return sum(
        _count(weight)
        for _, weights in with_weights(placed)
        for weight in weights
        if weight.trainable
    )


def with_weights(
    placed: Placed,
) -> Iterator[tuple[keras.layers.Layer, list[keras.Variable]]]:
    """Yields each layer, with its weights that those before it have not."""
    seen: set[int] = set()
    for layer, weights in zip(placed.layers, placed.weights):
        yield layer, [v for v in weights if id(v) not in seen]
        seen |= {*map(id, weights)}


def weight_sizes(
    weights: Sequence[keras.Variable],
    num_slot_bytes: Callable[[keras.Variable], int],
) -> dict[str, int]:
    """Returns the fields of `LayerSize` that follow from weights."""
    trainable = [v for v in weights if v.trainable]
    return {
        "num_params": sum(map(_count, trainable)),
        "weight_bytes": sum(map(placement.tensor_bytes, weights)),
        "slot_bytes": sum(map(num_slot_bytes, trainable)),
        "gradient_bytes": sum(map(placement.tensor_bytes, trainable)),
    }


def _line(values: Sequence[float]) -> Bytes:
    """Through what was found for `_ROWS`; never below what is fixed."""
    (a, b), (first, second) = _ROWS, values
    per_row = (second - first) / (b - a)
    return Bytes(max(first - a * per_row, 0.0), per_row)


def _count(variable: keras.Variable) -> int:
    return math.prod(variable.shape)


def slot_bytes_of(
    optimizer: str | keras.Optimizer | None,
) -> Callable[[keras.Variable], int]:
    """Returns a function that tells the bytes of a variable's slots.

    A twin of the optimizer is built for a variable without storage. The
    optimizer, or None for none, is left alone.

    Raises:
        ValueError: If it is no optimizer, or cannot be made again.
    """
    if optimizer is None:
        return lambda _: 0

    @functools.cache
    def slot_bytes(shape: tuple[int, ...], dtype: str) -> int:
        with (
            tf.init_scope(),
            internals.without_strategy(),
            internals.names_kept(),
        ):
            original = keras.optimizers.get(optimizer)
            config = copy.deepcopy(original.get_config())
            with tf.Graph().as_default():  # nothing is allocated there
                twin = type(original).from_config(config)
                weight = keras.Variable("zeros", shape=shape, dtype=dtype)
                twin.build([weight])
        return sum(
            placement.tensor_bytes(slot)
            for part in internals.with_inner(twin)
            for slot in internals.slots(part, weight)
        )

    try:
        slot_bytes((1,), "float32")
    except Exception as error:  # of many kinds
        raise ValueError(
            "`optimizer` must be what `compile` takes, and be made again of "
            "what its `get_config` returns, so that its slots can be counted. "
            f"Received: optimizer={optimizer!r}, and this "
            f"{type(error).__name__}: {error}. Pass the name of one with as "
            "many slots, such as 'adam'; or None."
        ) from error
    return lambda variable: slot_bytes(tuple(variable.shape), variable.dtype)
