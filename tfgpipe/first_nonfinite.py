"""Finds where values of a mini-batch are not finite first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfgpipe.cells import Cell, is_continuous
from tfgpipe.nonfinite import all_finite


def first_nonfinite(model: Any, data: Any) -> str:
    """Where values of a mini-batch are not finite first, as a sentence.

    The mini-batch is run again, layer by layer; the model stays as it is. What
    comes first is told by its order in a training step: inputs, outputs of
    layers from the first to the last, the loss, and gradients from the last
    layer to the first.

    Args:
        model: A compiled `GPipe` that has seen data.
        data: A mini-batch: x, or a tuple of x, y and sample_weight.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    if not _are_finite(x):
        return "The inputs of the mini-batch are not finite."
    step = model.by_layers(
        lambda call: _Finite(_all(call.outputs.tensors), _all(call.dx))
    )
    total, gradients, calls = step(data)
    *cells, _ = step.cells
    for cell, own in zip(cells, calls):
        if not all(call.outputs for call in own):
            return (
                f"The outputs of {_place(cell)} are not finite, and its inputs "
                "are."
            )
    if not _are_finite(total):
        return (
            "The loss is not finite, and the outputs of all layers are: look "
            "at the labels, or at what the loss does with such outputs."
        )
    bad = [
        v
        for d, v in zip(gradients, model.trainable_weights)
        if d is not None and not _are_finite(d)
    ]
    return _first_gradient(cells, calls, bad)


class _Finite(NamedTuple):
    """Whether something is finite of a layer's call: scalars.

    Attributes:
        outputs: What went out.
        dx: The gradients with respect to what came in.
    """

    outputs: tf.Tensor
    dx: tf.Tensor


def _first_gradient(
    cells: list[Cell], calls: list[list[_Finite]], bad: list[keras.Variable]
) -> str:
    """What is not finite in the backward pass.

    Args:
        cells: Each layer.
        calls: Those of each layer, and of the head.
        bad: The weights whose gradients are not finite.
    """
    *has_dx, has_loss = [all(call.dx for call in own) for own in calls]
    if not has_loss:
        return (
            "The gradient of the loss with respect to the outputs of the last "
            "layer is not finite, and the loss is."
        )
    for cell, is_finite in reversed([*zip(cells, has_dx)]):
        if not is_finite:
            return (
                f"The gradient with respect to the inputs of {_place(cell)} is "
                "not finite, and that with respect to its outputs is."
            )
        for weight in bad:
            if any(v is weight for v in cell.sequence[0].variables):
                return (
                    f"The gradient of the weight '{weight.path}' of "
                    f"{_place(cell)} is not finite, and those of later layers "
                    "are."
                )
    return (
        "Run again, layer by layer, all its values are finite: what is not "
        "comes from rounding, or from XLA."
    )


def _all(tensors: Iterable[Any]) -> tf.Tensor:
    """Whether all are finite, a scalar; where they are."""
    found = [t for t in tensors if t is not None and is_continuous(t)]
    return all_finite(found[0], found[1:]) if found else tf.constant(True)


def _are_finite(nest: Any) -> bool:
    """Whether all numbers of a nest of tensors are."""
    return all(
        bool(np.isfinite(tf.cast(tf.abs(t), "float64").numpy()).all())
        for t in tree.flatten(nest)
        if is_continuous(getattr(t, "values", t))
    )


def _place(cell: Cell) -> str:
    """A layer, its cell and its device, in words."""
    return cell.describe(cell.sequence[0])
