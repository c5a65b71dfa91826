"""The mini-batch's loss and metrics, from micro-batches where possible.

A Keras loss of a mini-batch is a sum over rows divided by a number: the rows,
the unmasked positions, or the sum of the weights. `Head` computes sum and
number of each micro-batch inside the last cell, so the cell's outputs (think of
a softmax over 32,000 words) live no longer than the micro-batch. The engine
divides the sum of the sums by the sum of the numbers:

    loss = sum over m of sum_m / sum over m of count_m

A mini-batch that is one micro-batch is reduced by Keras: the sum is its loss,
with Keras's bits, and the number 1.

That holds for losses and metrics that treat every row by itself, see
`row_wise.py`. Anything else (a function of the user's, Dice over the whole
batch, an overridden `compute_loss`) is computed by Keras on the outputs of the
whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.state import InnerScope


class Head:
    """Computes loss and metrics of a micro-batch, as part of the last cell.

    The model is compiled and built.

    Attributes:
        metrics_add_up: Whether no metrics are left for who has all outputs.
        metric_state: The variables of the metrics that it updates.
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
        with_metrics = metrics_add_up and updates_metrics
        self._metrics = (
            internals.compiled_metrics(model) if with_metrics else None
        )
        self.metric_state: list[keras.Variable] = (
            list(self._metrics.variables) if self._metrics else []
        )

    def __call__(
        self, y_pred: Any, labels: Any, is_split: bool
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
        reduced = sum_and_count if is_split else _reduced
        return _sums_and_counts(self._loss, y, y_pred, sample_weight, reduced)


def _sums_and_counts(
    compiled: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    reduced: Callable[..., tuple[tf.Tensor, tf.Tensor]],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Adds up each output's loss; the compiled loss finds the labels."""
    sums: list[tf.Tensor] = []
    counts: list[tf.Tensor] = []

    # Keras calls each loss with the labels it has found for it: sums are
    # taken in that place.
    def replace(_: int, loss: Any) -> Any:
        def add_up(y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
            total, count = reduced(loss, y_true, y_pred, sample_weight)
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


def _reduced(
    loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """The loss of a whole mini-batch, and 1, by which it is divided."""
    total = loss(y_true, y_pred, sample_weight)
    return total, tf.ones([], total.dtype)


def _check_weights(values: tf.Tensor, sample_weight: Any, mask: Any) -> None:
    """Refuses weights that would be applied along the wrong axis.

    Weights of rows for a loss of, say, time steps fail in Keras, unless there
    are as many rows as steps. Where they do not fail, rows would get the
    weights of steps. So it is with weights of steps for a loss of rows, which
    may fit a micro-batch and not its mini-batch.
    """
    shape = tuple(values.shape)
    for name, weight in (
        ("`sample_weight`", sample_weight),
        ("The Keras mask of the outputs", mask),
    ):
        if weight is None or not len(weight.shape):
            continue
        if not _have_rows_together(shape, tuple(weight.shape)):
            raise ValueError(
                f"{name} must have one weight for each value of the loss. "
                f"Expected {len(shape)} dimensions, as the loss has. "
                f"Received: shape {tuple(weight.shape)} for a loss of shape "
                f"{shape}. Repeat the weights along the other axes."
            )


def _have_rows_together(a: tuple, b: tuple) -> bool:
    """Whether two shapes broadcast with their first axes together.

    Keras adds or removes a last axis of one value.
    """
    small, large = sorted((a, b), key=len)
    same = len(small) == len(large)
    return same or (len(small) == len(large) - 1 and large[-1] == 1)


def sum_and_count(
    loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """The weighted sum of a loss's values, and what Keras divides it by.

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
            "row from `call`, of shape (batch, ...). Received: a scalar from "
            f"{loss}. Leave the mean over rows to Keras."
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
    # row is not known.
    is_own = getattr(loss, "is_row_wise", False)
    size = tf.size(weighted) if is_own else _size(weighted, y_true)
    count = tf.cast(size, total.dtype)
    if mask is None or loss.reduction == "mean_with_sample_weight":
        return total, count
    # As Keras: the count, times the share of positions that are not masked.
    valid = tf.reduce_sum(tf.cast(mask, total.dtype))
    return total, valid * count / tf.cast(tf.size(mask), total.dtype)


def _size(values: tf.Tensor, rows: tf.Tensor) -> Any:
    """How many values there are, of as many rows as there are of labels.

    The labels are there before any layer runs.
    """
    inner = values.shape[1:]
    if values.shape[0] is None and inner.is_fully_defined():
        return tf.shape(rows)[0] * inner.num_elements()
    return tf.size(values)
