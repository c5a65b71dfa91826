"""What layers need, by their rows, without allocating any of it.

Each layer is traced for two numbers of rows, into graphs that never run; equal
ones are traced once. What grows with the rows is a line through both.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import LayerCall
from tfgpipe.costs import cost as cost_lib
from tfgpipe.costs.kept_bytes import KeptBytes, among_live, kept_bytes
from tfgpipe.devices import placement

# A row more must show, and a layer may fail on a single one.
_ROWS = (2, 4)

# More than what an accelerator's caches hold.
_CACHE_BYTES = 64 * 2**20


class PlacedCall(NamedTuple):
    """A call of a layer, and what is alive before it.

    Attributes:
        live: All tensors that are alive, which cross if a cell begins here, a
            nest of `keras.KerasTensor`s.
        key: What equal ones have in common.
    """

    call: LayerCall
    live: Any
    key: Any

    @property
    def layer(self) -> keras.layers.Layer:
        """The layer that is called."""
        return self.call.layer


class Bytes(NamedTuple):
    """Bytes for a number of rows.

    Attributes:
        fixed: Whatever the rows.
        per_row: For each row.
    """

    fixed: float
    per_row: float

    def of(self, rows: float) -> float:
        """Bytes for so many rows."""
        return self.fixed + rows * self.per_row


class LayerSize(NamedTuple):
    """What one step needs; of tied weights, the first step has all.

    Attributes:
        name: Of its layer.
        num_params: Numbers in its trainable weights.
        num_values: Numbers in all its weights.
        weight_bytes: Bytes of these.
        slot_bytes: Bytes that the optimizer keeps for them.
        gradient_bytes: Bytes of a gradient for each trainable weight.
        flops: Of a row's forward pass.
        live_bytes: Of a row of what is alive before it, which crosses if a
            cell begins with it.
        float_bytes: Of these, what has a gradient, which crosses back.
        kept: What its tasks keep, and need while they run: `Bytes`.
    """

    name: str
    num_params: int
    num_values: int
    weight_bytes: int
    slot_bytes: int
    gradient_bytes: int
    flops: float
    live_bytes: float
    float_bytes: float
    kept: KeptBytes


def layer_sizes(
    steps: Sequence[PlacedCall], num_slot_bytes: Callable[[Any], int]
) -> list[LayerSize]:
    """What each step needs, in order.

    Of equal ones the layer of the first is built; its weights need no values.
    `num_slot_bytes` tells what the optimizer keeps for a variable.
    """
    found: list[LayerSize] = []
    known: dict[Any, tuple[cost_lib.Estimate, KeptBytes]] = {}
    estimates: dict[Any, Any] = {}
    live = cost_lib.example_of(steps[0].live) if steps else None
    with internals.in_no_graph([s.layer for s in steps]):
        for i, (step, first, weights) in enumerate(with_weights(steps)):
            key = id(first), _specs(live)
            if key not in known:
                made = cost_lib.estimated(
                    first.call, first.call.taken(live), estimates
                )
                known[key] = made, _measured(first, live)
            made, kept = known[key]
            path = among_live(kept.path, step.call, _tensors(step.live))
            alive = _tensors(live)
            floats = [t for t in alive if keras.backend.is_float_dtype(t.dtype)]
            found.append(
                LayerSize(
                    name=step.layer.name,
                    num_values=sum(map(_count, weights)),
                    **weight_sizes(weights, num_slot_bytes),
                    flops=made.flops,
                    live_bytes=_row_bytes(alive),
                    float_bytes=_row_bytes(floats),
                    kept=kept._replace(path=path),
                )
            )
            if i + 1 < len(steps):
                live = cost_lib.goes_on(
                    step.call, live, made.outputs, steps[i + 1].live
                )
    return found


def bytes_between(placed: Sequence[PlacedCall], rows: int) -> int:
    """What other layers read and write between two tasks of one, in bytes.

    Weights, unless single rows of them are looked up, and sums of gradients;
    outputs and their gradients. No more than caches hold. Of equal steps the
    layer of the first is built; `rows` are those of a micro-batch.
    """
    weights = sum(
        placement.num_bytes(v)
        for step, _, own in with_weights(placed)
        if not isinstance(step.layer, keras.layers.Embedding)
        for v in own
    )
    live = sum(
        placement.num_bytes(cost_lib.example_of(t, size=1))
        for step in placed
        for t in _tensors(step.live)
    )
    return min(2 * (weights + rows * live), _CACHE_BYTES)


def num_params(steps: Sequence[PlacedCall]) -> int:
    """Numbers in the trainable weights of the steps, tied ones once."""
    return sum(
        _count(weight)
        for _, _, weights in with_weights(steps)
        for weight in weights
        if weight.trainable
    )


def with_weights(
    steps: Sequence[PlacedCall],
) -> Iterator[tuple[PlacedCall, PlacedCall, list[keras.Variable]]]:
    """Each step, the first that is equal, and weights like its own.

    Without those of steps before it.
    """
    known: dict[Any, PlacedCall] = {}
    seen: set[int] = set()  # layers, which may not be built, and variables
    for step in steps:
        layer = step.layer
        first = known.setdefault((step.key, _specs(step.live)), step)
        weights = [v for v in layer.weights if id(v) not in seen]
        # Of equal layers the first alone is built: its weights are like theirs.
        if not layer.weights and id(layer) not in seen:
            weights = first.layer.weights
        seen |= {id(layer), *map(id, layer.weights)}
        yield step, first, weights


def _measured(step: PlacedCall, live: Any) -> KeptBytes:
    """What the tasks of a step keep, and need.

    `live` are specs of what one example is before it, maybe several rows.
    """
    taken, run = step.call.taken(live), step.call.run
    *numbers, paths = zip(
        *(kept_bytes(step.layer, _of_rows(taken, rows), run) for rows in _ROWS)
    )
    return KeptBytes._make([*map(_line, numbers), paths[0]])


def _row_bytes(specs: Sequence[Any]) -> int:
    return sum(placement.num_bytes(_of_rows(spec, 1)) for spec in specs)


def weight_sizes(
    weights: Sequence[keras.Variable],
    num_slot_bytes: Callable[[keras.Variable], int],
) -> dict[str, Any]:
    """The part of `LayerSize`, and of a profile, that follows from weights."""
    trainable = [v for v in weights if v.trainable]
    return {
        "num_params": sum(map(_count, trainable)),
        "weight_bytes": sum(map(placement.num_bytes, weights)),
        "slot_bytes": sum(map(num_slot_bytes, trainable)),
        "gradient_bytes": sum(map(placement.num_bytes, trainable)),
    }


def _of_rows(spec: Any, rows: int) -> Any:
    """Specs of so many examples, for those of one."""
    return keras.tree.map_structure(
        lambda leaf: (
            keras.KerasTensor(
                (rows * (leaf.shape[0] or 1), *leaf.shape[1:]), leaf.dtype
            )
            if isinstance(leaf, keras.KerasTensor) and leaf.shape
            else leaf
        ),
        spec,
    )


def _line(values: Sequence[float]) -> Bytes:
    """Through what was found for `_ROWS`; never below what is fixed."""
    (a, b), (first, second) = _ROWS, values
    per_row = (second - first) / (b - a)
    return Bytes(max(first - a * per_row, 0.0), per_row)


def _tensors(nest: Any) -> list[Any]:
    return [t for t in keras.tree.flatten(nest) if t is not None]


def _specs(nest: Any) -> str:
    return str([(t.shape, t.dtype) for t in _tensors(nest)])


def _count(variable: keras.Variable) -> int:
    return math.prod(variable.shape)


# Sizes that tell one axis from another.
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def slot_bytes_of(optimizer: Any) -> Callable[[keras.Variable], int]:
    """A function that tells the bytes of a variable's slots.

    A twin of the optimizer is built for a tiny variable of as many axes. Each
    slot's axes are axes of the variable. The optimizer, or None for none, is
    left alone.

    Raises:
        ValueError: If it is no optimizer, or cannot be made again.
    """
    if optimizer is None:
        return lambda _: 0
    try:
        given = keras.optimizers.get(optimizer)
    except Exception as error:  # of many kinds
        raise ValueError(
            "`optimizer` must be what `compile` takes: the name of one, or a "
            "`keras.optimizers.Optimizer`; or None. Received: "
            f"optimizer={optimizer!r}, and this {type(error).__name__}: {error}"
        ) from error
    known: dict[Any, list[tuple[tuple[int, ...], int]]] = {}

    def slot_bytes(variable: keras.Variable) -> int:
        # A matrix (rows, columns) has a twin of shape (2, 3), so that a slot of
        # shape (3,) is one number a column.
        axes = dict(zip(_PRIMES, variable.shape))
        key = len(axes), variable.dtype
        if key not in known:
            known[key] = _slots(given, [*axes], variable.dtype)
        return sum(
            itemsize * math.prod(axes.get(size, size) for size in shape)
            for shape, itemsize in known[key]
        )

    return slot_bytes


def _slots(
    optimizer: Any, shape: Sequence[int], dtype: str
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
        for one in internals.with_inner(twin)
        for slot in internals.slots(one, weight)
    ]


def _twin(optimizer: Any) -> Any:
    """An equal optimizer that is not built."""
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
