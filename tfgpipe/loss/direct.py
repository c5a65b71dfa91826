"""Gradients by weights that do not come through the cells.

Those of weight regularisers, and of a loss that reads weights itself. They are
computed on the device of each weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf


def regularizers(
    model: keras.Model,
) -> list[tuple[keras.Variable, tf.Tensor, tf.Tensor]]:
    """Each regularised weight with its penalty and the penalty's gradient."""
    found = []
    for variable in model.trainable_weights:
        if variable.regularizer is None:
            continue
        with tf.device(variable.value.device), tf.GradientTape() as tape:
            value = variable.regularizer(variable)
            gradient = tape.gradient(value, variable.value)
        found.append((variable, value, gradient))
    return found


def add_to(
    gradients: dict[int, Any], found: Iterable[tuple[keras.Variable, Any]]
) -> None:
    """Adds gradients to those that came through the cells.

    Args:
        gradients: Those, by the id of the variable; None where there is none.
        found: Variables and more of their gradients.
    """
    for variable, gradient in found:
        known = gradients.get(id(variable))
        if known is not None:
            with tf.device(variable.value.device):
                terms = map(tf.convert_to_tensor, (known, gradient))
                gradient = tf.add(*terms)
        gradients[id(variable)] = gradient
