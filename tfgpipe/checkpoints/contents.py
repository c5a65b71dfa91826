"""Which variables a checkpoint has, and what they are called in it."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals


def contents(model: keras.Model) -> dict[str, list[Any]]:
    """The variables of a training, by groups, each in an order of its own.

    The order is that of the layers, wherever they are: the same for a `GPipe`
    of any cells and replicas, and for a plain Keras model of the same layers.

    Args:
        model: A model that is built, whose optimizer is, if it has one.

    Returns:
        "model": weights, state, seeds and metrics of layers; "optimizer": its
        slots, iterations and the like; "skipped", for a `GPipe` that skips.
    """
    optimizer = getattr(model, "optimizer", None)
    skips = getattr(model, "skips", None)
    kept: list[Any] = []
    if optimizer is not None:
        kept = [*optimizer.variables, *internals.unlisted(optimizer)]
    return {
        "model": [*model.variables],
        "optimizer": kept,
        "skipped": [] if skips is None else [skips.total_variable],
    }


def storage(variable: Any) -> tf.Variable:
    """What holds a variable's value."""
    is_keras = isinstance(variable, keras.Variable)
    return variable.value if is_keras else variable


def described(groups: dict[str, list[Any]]) -> dict[str, list[list[Any]]]:
    """For each variable its name, shape and dtype, as JSON can hold them."""
    return {
        group: [
            [
                getattr(v, "path", v.name),
                [int(n) for n in v.shape],
                tf.as_dtype(v.dtype).name,
            ]
            for v in variables
        ]
        for group, variables in groups.items()
    }


def key(group: str, index: int) -> str:
    """What the values of a variable are called in the files."""
    return f"{group}/{index}"
