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

from tfgpipe.cells import gradients as sums
from tfgpipe.run import LossGradients, Pipeline, TracedBatch
from tfgpipe.schedules import Program


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

    def check(self, program: Program) -> None:
        """Checks that the loss is known when the backward pass needs it."""

    def has_gradient(
        self, batch: TracedBatch
    ) -> tuple[list[bool], list[list[bool]]]:
        """What will have a gradient.

        Returns:
            For each output tensor, whether it will have one; and for each
            cell, whether each of its layers' own losses will.
        """
        extra = [[True] * len(own) for own in batch.results.extra_specs()]
        return [True] * batch.results.num_outputs, extra

    def start(self, run: Pipeline) -> LossGradients:
        """Where the backward pass starts, of what has run before it."""
        raise NotImplementedError

    def total(self, run: Pipeline) -> tf.Tensor:
        """The loss, a scalar, when all tasks have run."""
        raise NotImplementedError

    def direct_gradients(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Gradients of weights that do not come through the cells.

        Known when the loss is.
        """
        raise NotImplementedError

    def look(self, y_pred: Any, added: list[tf.Tensor]) -> None:
        """Has Python compute what the head does not, for the user to look at.

        Args:
            y_pred: Outputs of the whole mini-batch.
            added: What layers add to the loss.
        """

    def _scaled(self, loss: tf.Tensor) -> tf.Tensor:
        optimizer = self._model.optimizer
        return loss if optimizer is None else optimizer.scale_loss(loss)


class Penalty(NamedTuple):
    """A weight regulariser's part of the loss, where the weight is.

    Attributes:
        device: Of the weight.
        value: A scalar.
        gradients: The weights that it reads, its own or others, and its
            gradients with respect to them, or None.
    """

    device: str
    value: tf.Tensor
    gradients: list[tuple[keras.Variable, Any]]

    def times(self, factor: Any) -> list[tuple[keras.Variable, Any]]:
        """The weights and their gradients, by the chain rule; or none.

        Args:
            factor: The gradient of the loss with respect to the value, or
                None.
        """
        if factor is None:
            return []
        with tf.device(self.device):
            return [
                (variable, _scaled(gradient, factor))
                for variable, gradient in self.gradients
                if gradient is not None
            ]


def _scaled(gradient: Any, factor: Any) -> Any:
    """A gradient, dense or sparse, times a scalar."""
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        values = factor * gradient.values
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return factor * gradient


def penalties(model: keras.Model) -> list[Penalty]:
    """Of each regularised weight."""
    trained = {id(v.value): v for v in model.trainable_variables}
    found = []
    for variable in model.trainable_weights:
        if variable.regularizer is None:
            continue
        device = variable.value.device
        with tf.device(device):
            with tf.GradientTape() as tape:
                value = tf.convert_to_tensor(variable.regularizer(variable))
                if value.shape.rank != 0:  # as Keras does
                    value = tf.reduce_sum(value)
            read = [
                trained[id(v)]
                for v in tape.watched_variables()
                if id(v) in trained
            ]
            gradients = tape.gradient(value, [v.value for v in read])
        found.append(Penalty(device, value, [*zip(read, gradients)]))
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
                gradient = sums.in_order([known, gradient])
        gradients[id(variable)] = gradient
