"""Sizes of layers, by their rows, without allocating any of it.

The model is traced for two numbers of rows, into graphs that never run. What
grows with the rows is a line through both.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Hashable, Iterator, Sequence

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.costs.activations import memory_of_steps, tensor_bytes
from tfgpipe.costs.placed import Placed
from tfgpipe.costs.sizes import Activation, Bytes, LayerSize, StepMemory
from tfgpipe.devices import placement
from tfgpipe.graphs import is_continuous, operation_flops
from tfgpipe.internals import Nest

# A row more must show, and a layer may fail on a single one.
_ROWS = (2, 4)

# More than what an accelerator's caches hold.
_CACHE_BYTES = 64 * 2**20


def layer_sizes(
    placed: Placed, num_slot_bytes: Callable[[keras.Variable], int]
) -> list[LayerSize]:
    """Computes the sizes of all steps, in order; weights need no values.

    `num_slot_bytes` tells what the optimizer keeps for a variable.
    """
    with internals.outside_functions():
        few, many = map(_steps_for, [placed] * 2, _ROWS)
    sizes = []
    for some, more, (layer, weights) in zip(few, many, with_weights(placed)):
        flops, live, floats = (
            _line(pair).at(1) for pair in zip(some[:3], more[:3])
        )
        sizes.append(
            LayerSize(
                name=layer.name,
                num_values=sum(map(_count, weights)),
                **weight_sizes(weights, num_slot_bytes),
                flops=flops,
                live_bytes=live,
                float_bytes=floats,
                memory=_memory_line(some[3], more[3]),
                dtype=some[4],
            )
        )
    return sizes


def _steps_for(
    placed: Placed, rows: int
) -> list[tuple[float, int, int, StepMemory, str]]:
    """Returns what each step needs for so many rows.

    FLOPs, bytes of what is alive before it, of what of that may have a
    gradient, what its tasks need, and the dtype of most FLOPs.
    """
    steps = placed.differentiated(rows)
    memory = memory_of_steps([step.part for step in steps])
    return [
        (
            sum(map(operation_flops, step.part.operations)),
            sum(map(tensor_bytes, step.live)),
            sum(map(tensor_bytes, filter(is_continuous, step.live))),
            needs,
            _dtype(step.part.operations),
        )
        for step, needs in zip(steps, memory)
    ]


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

    def lines(
        some: Sequence[Activation], more: Sequence[Activation]
    ) -> tuple[Activation, ...]:
        return tuple(
            Activation(a.by, _line((a.size, b.size)))
            for a, b in zip(some, more)
        )

    return StepMemory(
        lines(few.inputs, many.inputs),
        lines(few.made, many.made),
        _line((few.crossing, many.crossing)),
        _line((few.sparse, many.sparse)),
        _line((few.forward, many.forward)),
        _line((few.backward, many.backward)),
        few.reaches,
    )


def bytes_between(placed: Placed, rows: int) -> int:
    """Estimates the bytes that others use between two tasks of a layer.

    Weights, unless single rows of them are looked up, and sums of gradients;
    outputs and their gradients. No more than caches hold. `rows` are a
    micro-batch; other sizes that are not known count as 1.
    """
    weights = sum(
        placement.tensor_bytes(v)
        for layer, weights_of_layer in with_weights(placed)
        if not isinstance(layer, keras.layers.Embedding)
        for v in weights_of_layer
    )
    live = sum(_row_bytes(t) for step in placed.steps for t in step.live)
    return min(2 * (weights + rows * live), _CACHE_BYTES)


def row_bytes(spec: Nest) -> int:
    """Returns the bytes of a row of a nest of tensors, or specs of them.

    Other sizes that are not known count as 1.
    """
    return sum(
        tf.as_dtype(t.dtype).size * math.prod(n or 1 for n in t.shape[1:])
        for t in keras.tree.flatten(spec)
        if t is not None
    )


def _row_bytes(tensor: tf.Tensor) -> int:
    sizes = tensor.shape.as_list() if tensor.shape.rank else []
    return tensor.dtype.size * math.prod(n or 1 for n in sizes)


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
    for step in placed.steps:
        yield step.layer, [v for v in step.weights if id(v) not in seen]
        seen |= {*map(id, step.weights)}


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


# Sizes that tell one axis from another.
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def slot_bytes_of(
    optimizer: str | keras.Optimizer | None,
) -> Callable[[keras.Variable], int]:
    """Returns a function that tells the bytes of a variable's slots.

    A twin of the optimizer is built for a tiny variable of as many axes. Each
    slot's axes are axes of the variable. The optimizer, or None for none, is
    left alone.

    Raises:
        ValueError: If it is no optimizer, or cannot be made again.
    """
    if optimizer is None:
        return lambda _: 0
    try:
        original = keras.optimizers.get(optimizer)
    except Exception as error:  # of many kinds
        raise ValueError(
            "`optimizer` must be what `compile` takes: the name of one, or a "
            "`keras.optimizers.Optimizer`; or None. Received: "
            f"optimizer={optimizer!r}, and this {type(error).__name__}: {error}"
        ) from error
    known: dict[Hashable, list[tuple[tuple[int, ...], int]]] = {}

    def slot_bytes(variable: keras.Variable) -> int:
        # A matrix (rows, columns) has a twin of shape (2, 3), so that a slot of
        # shape (3,) is one number a column.
        axes = dict(zip(_PRIMES, variable.shape))
        key = len(axes), variable.dtype
        if key not in known:
            known[key] = _slots(original, [*axes], variable.dtype)
        return sum(
            itemsize * math.prod(axes.get(size, size) for size in shape)
            for shape, itemsize in known[key]
        )

    return slot_bytes


def _slots(
    optimizer: keras.Optimizer, shape: Sequence[int], dtype: str
) -> list[tuple[tuple[int, ...], int]]:
    """Shapes, and bytes of a number, of the slots of a tiny variable."""
    with (
        tf.init_scope(),
        internals.without_strategy(),
        tf.device("CPU:0"),
        internals.names_kept(),
    ):
        twin = _twin(optimizer)
        weight = keras.Variable("zeros", shape=shape, dtype=dtype)
        twin.build([weight])
    return [
        (tuple(slot.shape), tf.as_dtype(slot.dtype).size)
        for part in internals.with_inner(twin)
        for slot in internals.slots(part, weight)
    ]


def _twin(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Returns an equal optimizer that is not built."""
    try:
        config = copy.deepcopy(optimizer.get_config())
        return type(optimizer).from_config(config)
    except Exception as error:
        raise ValueError(
            "`optimizer` must be one that can be made again of what its "
            "`get_config` returns, so that its slots can be counted. Received: "
            f"{optimizer!r}, and this {type(error).__name__}: {error}. Pass "
            "the name of one with as many slots, such as 'adam'."
        ) from error
