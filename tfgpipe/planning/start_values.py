"""The values of variables that may have none yet."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import placement


def start_values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """The values of variables; what they would start with, if they have none.

    On the current device, without a draw from what others draw from.
    """
    waiting = [v for v in variables if not internals.is_created(v)]
    drawn: dict[int, tf.Tensor] = {}
    if waiting:

        def draw() -> list[tf.Tensor]:
            return [internals.initial_value(v) for v in waiting]

        results = tf.function(draw, autograph=False).get_concrete_function()()
        drawn = {id(v): value for v, value in zip(waiting, results)}
    return [
        drawn[id(v)] if id(v) in drawn else placement.read_variable(v)
        for v in variables
    ]
