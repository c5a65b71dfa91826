"""What an optimizer keeps for a weight."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals

# Sizes that tell one axis from another.
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def slot_bytes_of(optimizer: Any) -> Callable[[keras.Variable], int]:
    """A function that tells the bytes of a variable's slots.

    A twin of the optimizer is built for a tiny variable of as many axes. Each
    slot's axes are axes of the variable.

    Args:
        optimizer: As `compile` takes it; None for none. It is left alone.

    Raises:
        ValueError: If it is none, or cannot be made again of its configuration.
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
