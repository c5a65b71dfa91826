"""The loss of one mini-batch, and where its gradients start.

One interface, two ways:

    SummedLoss   losses whose sums over micro-batches the head computes, see
                 `head.py`: known piece by piece, in any schedule
    WholeLoss    any other: Keras computes it, and its gradients, from the
                 outputs of the whole mini-batch
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe.run import LossGradients, Pipeline
from tfgpipe.schedules import Schedule


class Objective:
    """The loss of one mini-batch.

    Args:
        model: The compiled model.
        data: The mini-batch: x, y and sample_weight.
        training: Whether gradients are wanted.
    """

    def __init__(
        self, model: keras.Model, data: tuple[Any, Any, Any], training: bool
    ):
        self._model = model
        self._data = data
        self._training = training

    def check(self, schedules: Iterable[Schedule]) -> None:
        """Checks that the loss is known when the backward pass needs it."""

    def has_gradient(self, run: Pipeline) -> list[bool]:
        """For each output tensor, whether it will have a gradient."""
        raise NotImplementedError

    def start(self, run: Pipeline) -> LossGradients:
        """Where the backward pass starts, of what has run before it."""
        raise NotImplementedError

    def total(self, run: Pipeline) -> tf.Tensor:
        """The loss, a scalar, when all tasks have run."""
        raise NotImplementedError

    def direct_gradients(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Gradients by weights that do not come through the cells.

        Known when the loss is.
        """
        raise NotImplementedError

    def _scaled(self, loss: tf.Tensor) -> tf.Tensor:
        optimizer = self._model.optimizer
        return loss if optimizer is None else optimizer.scale_loss(loss)


class Penalty(NamedTuple):
    """A weight regulariser's part of the loss, where the weight is.

    Attributes:
        variable: The weight.
        value: A scalar.
        gradient: Its gradient by the weight, or None.
    """

    variable: keras.Variable
    value: tf.Tensor
    gradient: Any

    def times(self, factor: Any) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The weight and its gradient, by the chain rule; or none.

        Args:
            factor: The gradient of the loss by the value, or None.
        """
        if self.gradient is None or factor is None:
            return []
        with tf.device(self.variable.value.device):
            factor = tf.cast(factor, self.gradient.dtype)
            return [(self.variable, factor * self.gradient)]


def penalties(model: keras.Model) -> list[Penalty]:
    """Of each regularised weight."""
    found = []
    for variable in model.trainable_weights:
        if variable.regularizer is None:
            continue
        with tf.device(variable.value.device), tf.GradientTape() as tape:
            value = variable.regularizer(variable)
            gradient = tape.gradient(value, variable.value)
        found.append(Penalty(variable, value, gradient))
    return found


def add_direct(
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
