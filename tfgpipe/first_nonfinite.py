"""Finds where values of a mini-batch are not finite first."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfgpipe.cells import is_continuous, with_gradients_told


def first_nonfinite(model: Any, data: Any) -> str:
    """Where values of a mini-batch are not finite first, as a sentence.

    The mini-batch is run again, eagerly; the model stays as it is. What comes
    first is told by its order in a training step: inputs, outputs of layers
    from the first to the last, the loss, and gradients from the last layer to
    the first.

    Args:
        model: A compiled `GPipe` that has seen data.
        data: A mini-batch: x, or a tuple of x, y and sample_weight.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    if not _are_finite(x):
        return "The inputs of the mini-batch are not finite."
    watch = _Watch()
    loss, pairs, _ = model.rehearse(data, watch)
    if watch.outputs is not None:
        return (
            f"The outputs of {_place(model, watch.outputs)} are not finite, "
            "and its inputs are."
        )
    if not _are_finite(loss):
        return (
            "The loss is not finite, and the outputs of all layers are: look "
            "at the labels, or at what the loss does with such outputs."
        )
    return _first_gradient(model, watch, pairs)


def _first_gradient(model: Any, watch: _Watch, pairs: Any) -> str:
    """What is not finite in the backward pass."""
    layers = model.sequence
    bad = [v for d, v in pairs if d is not None and not _are_finite(d)]
    owner, weight = max(
        (
            (max(i for i, layer in enumerate(layers) if _has(layer, v)), v)
            for v in bad
            if any(_has(layer, v) for layer in layers)
        ),
        key=lambda pair: pair[0],
        default=(-1, None),
    )
    if watch.from_loss:
        return (
            "The gradient of the loss with respect to the outputs of the last "
            "layer is not finite, and the loss is."
        )
    if watch.gradient is not None and layers.index(watch.gradient) >= owner:
        return (
            "The gradient with respect to the inputs of "
            f"{_place(model, watch.gradient)} is not finite, and that with "
            "respect to its outputs is."
        )
    if weight is not None:
        return (
            f"The gradient of the weight '{weight.path}' of "
            f"{_place(model, layers[owner])} is not finite, and those of later "
            "layers are."
        )
    return (
        "Run again, eagerly, all its values are finite: what is not comes from "
        "rounding, or from XLA."
    )


class _Watch:
    """Runs steps, and notes the first one of which something is not finite.

    Attributes:
        outputs: The first layer whose outputs are not finite, or None.
        gradient: The first in the backward pass, which is the last, whose
            inputs have a gradient that is not finite, or None.
        from_loss: Whether the gradient with respect to its outputs was not
            finite.
    """

    def __init__(self) -> None:
        self.outputs: Any = None
        self.gradient: Any = None
        self.from_loss = False

    def __call__(self, cell: Any, i: int, inputs: Any, training: bool) -> Any:
        step = cell.steps[i]
        if not tf.executing_eagerly():
            return step(inputs, training)
        seen: list[bool] = []

        def of_inputs() -> None:
            if self.gradient is None:
                self.gradient, self.from_loss = step.layer, any(seen)

        outputs = step(_watched(inputs, of_inputs), training)
        if self.outputs is None and not _are_finite(outputs):
            self.outputs = step.layer
        return _watched(outputs, lambda: seen.append(True))


def _watched(nest: Any, note: Any) -> Any:
    """The nest; `note` is called when its gradient is not finite."""
    return with_gradients_told(
        nest, lambda _, dy: None if _are_finite(dy) else note()
    )


def _are_finite(nest: Any) -> bool:
    """Whether all numbers of a nest of tensors are."""
    return all(
        bool(np.isfinite(tf.cast(tf.abs(t), "float64").numpy()).all())
        for t in tree.flatten(nest)
        if is_continuous(getattr(t, "values", t))
    )


def _has(layer: keras.layers.Layer, variable: keras.Variable) -> bool:
    return any(v is variable for v in layer.variables)


def _place(model: Any, layer: keras.layers.Layer) -> str:
    """A layer, its cell and its device, in words."""
    for cell in model.cells():
        if layer.name in cell.layers:
            return f"layer '{layer.name}' of cell {cell.index} on {cell.device}"
    return f"layer '{layer.name}'"
