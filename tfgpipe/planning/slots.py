"""What an optimizer keeps for a weight."""

from __future__ import annotations

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
        optimizer: As `compile` takes it. It is left alone.
    """
    config = keras.optimizers.serialize(keras.optimizers.get(optimizer))
    known: dict[Any, list[tuple[tuple[int, ...], int]]] = {}

    def slot_bytes(variable: keras.Variable) -> int:
        axes = dict(zip(_PRIMES, variable.shape))
        key = len(axes), variable.dtype
        if key not in known:
            known[key] = _slots(config, [*axes], variable.dtype)
        return sum(
            itemsize * math.prod(axes.get(size, size) for size in shape)
            for shape, itemsize in known[key]
        )

    return slot_bytes


def _slots(
    config: Any, shape: Sequence[int], dtype: str
) -> list[tuple[tuple[int, ...], int]]:
    """Shapes, and bytes of a number, of the slots of a tiny variable."""
    twin = keras.optimizers.deserialize(config)
    with tf.init_scope(), tf.device("CPU:0"), internals.names_kept():
        weight = keras.Variable("zeros", shape=shape, dtype=dtype)
        twin.build([weight])
    return [
        (tuple(slot.shape), tf.as_dtype(slot.dtype).size)
        for slot in internals.slots(twin, weight)
    ]
