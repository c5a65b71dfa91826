"""The loss and metrics of a micro-batch, as a part of the last cell.

A Keras loss of a mini-batch is a sum over rows divided by a count: the rows,
the unmasked positions, or the sum of the weights. `Head` computes sum and count
of each micro-batch inside the last cell, so the cell's outputs (think of a
softmax over 32,000 words) live no longer than the micro-batch. `loss/`
divides the sum of the sums by the sum of the counts.

A mini-batch that is one micro-batch is reduced by Keras: the sum is its loss,
with Keras's bits, and the count 1.

This holds for losses and metrics that treat every row by itself, see
`row_wise.py`. Keras computes any other (a function of the user's, Dice over the
whole batch, an overridden `compute_loss`) on the outputs of the whole
mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.internals import Nest
from tfgpipe.state import InnerScope


class Head:
    """Computes loss and metrics of a micro-batch.

    Args:
        model: The model, compiled and built.
        with_loss: Whether it computes the loss.
        metrics_add_up: Whether the metrics follow from micro-batches.
        updates_metrics: Whether it updates them, if so.
    """

    def __init__(
        self,
        model: keras.Model,
        with_loss: bool,
        metrics_add_up: bool,
        updates_metrics: bool = True,
    ):
        self.metrics_add_up = metrics_add_up
        self._loss = internals.compiled_loss(model) if with_loss else None
        self._metrics = None
        if metrics_add_up and updates_metrics:
            self._metrics = internals.compiled_metrics(model)
        self.metric_state: list[keras.Variable] = []
        if self._metrics:
            self.metric_state = list(self._metrics.variables)

    def __call__(
        self, y_pred: Nest, labels: Nest, is_split: bool
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Adds up the loss of each output and updates the metrics.

        `labels` are y and sample_weight, nests or None; `is_split` says whether
        there are several micro-batches. Returns sums and counts, a scalar each
        for each output with a loss.
        """
        y, sample_weight = labels
        if self._metrics is not None:
            self._metrics.update_state(y, y_pred, sample_weight=sample_weight)
        if self._loss is None:
            return [], []
        compiled = self._loss
        sums: list[tf.Tensor] = []
        counts: list[tf.Tensor] = []

        # Keras calls each loss with the labels that it has found for it.
        def replace(_: int, loss: keras.losses.Loss) -> Callable:
            def add_up(y: Nest, y_pred: Nest, sample_weight: Nest) -> tf.Tensor:
                if is_split:
                    total, count = sum_and_count(loss, y, y_pred, sample_weight)
                else:
                    total = loss(y, y_pred, sample_weight)
                    count = tf.ones([], total.dtype)
                sums.append(tf.cast(total, compiled.dtype))
                counts.append(tf.cast(count, compiled.dtype))
                return total

            return add_up

        with (
            InnerScope(),  # Keras's trackers: `objective.py` updates them
            internals.replaced_losses(compiled, replace),
        ):
            compiled(y, y_pred, sample_weight)
        return sums, counts


def _check_weights(
    values: tf.Tensor, sample_weight: tf.Tensor | None, mask: tf.Tensor | None
) -> None:
    """Refuses weights that would be applied along the wrong axis.

    Weights of rows for a loss of, say, time steps fail in Keras, unless there
    are as many rows as steps: then rows would get the weights of steps. Weights
    of steps for a loss of rows may fit a micro-batch, not its mini-batch.
    """
    # Both must broadcast with their first axes together. Keras adds or removes
    # a last axis of one value.
    shape = tuple(values.shape)
    for name, weight in (
        ("`sample_weight`", sample_weight),
        ("The Keras mask of the outputs", mask),
    ):
        if weight is None or not len(weight.shape):
            continue
        small, large = sorted((shape, tuple(weight.shape)), key=len)
        missing = len(large) - len(small)
        if missing > 1 or (missing == 1 and large[-1] != 1):
            raise ValueError(
                f"{name} must have one weight for each value of the loss. "
                f"Received: shape {tuple(weight.shape)} for a loss of shape "
                f"{shape}. Repeat the weights along the other axes."
            )


def sum_and_count(
    loss: keras.losses.Loss, y_true: Nest, y_pred: Nest, sample_weight: Nest
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the weighted sum of a loss's values, and Keras's divisor.

    `loss(y_true, y_pred, sample_weight)` is the quotient of the two, and over
    parts of a mini-batch both add up.
    """
    dtype = loss.dtype
    in_mask = internals.get_mask(y_pred)
    y_pred = keras.ops.convert_to_tensor(y_pred, dtype=dtype)
    y_true = keras.ops.convert_to_tensor(y_true, dtype=dtype)
    values = loss.call(y_true, y_pred)  # (rows, ...)
    if not len(values.shape):
        raise ValueError(
            "A loss with `is_row_wise = True` must return a value for each "
            f"row from `call`. Received: a scalar from {loss}."
        )
    out_mask = internals.get_mask(values)
    mask = out_mask if in_mask is None else in_mask
    if in_mask is not None and out_mask is not None:
        mask = in_mask & out_mask
    _check_weights(values, sample_weight, mask)
    weighted = internals.reduce_weighted_values(
        values, sample_weight, mask, "none", dtype
    )
    total = tf.reduce_sum(weighted)
    if loss.reduction == "sum":
        return total, tf.ones([], total.dtype)
    if loss.reduction == "mean_with_sample_weight":
        weights = internals.effective_weights(
            values, sample_weight, mask, loss.reduction, dtype
        )
        if weights is not None:
            return total, tf.reduce_sum(weights)
    # Weights may broadcast. How many values the user's own losses have for a
    # row is not known; of others, by the rows of the labels, they are known
    # before any layer runs.
    is_users = getattr(loss, "is_row_wise", False)
    inner = weighted.shape[1:]
    size = tf.size(weighted)
    if not is_users and weighted.shape[0] is None and inner.is_fully_defined():
        size = tf.shape(y_true)[0] * inner.num_elements()
    count = tf.cast(size, total.dtype)
    if mask is None or loss.reduction == "mean_with_sample_weight":
        return total, count
    # As Keras: the count, times the share of positions that are not masked.
    valid = tf.reduce_sum(tf.cast(mask, total.dtype))
    return total, valid * count / tf.cast(tf.size(mask), total.dtype)
