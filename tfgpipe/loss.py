"""The mini-batch's loss and metrics, from micro-batches where possible.

A Keras loss of a mini-batch is a sum over rows divided by a number: the rows,
the unmasked positions, or the sum of the weights. `Head` computes sum and
number of each micro-batch inside the last cell, so the cell's outputs (think of
a softmax over 32,000 words) live no longer than the micro-batch. The engine
divides the sum of the sums by the sum of the numbers:

    loss = sum over m of sum_m / sum over m of count_m

That holds for losses and metrics that treat every row by itself, as Keras's own
do, and losses that say `is_row_wise = True`; `streams_loss` and
`streams_metrics` tell. Anything else (a function of the
user's, Dice over the whole batch, an overridden `compute_loss`) is computed by
Keras on the outputs of the whole mini-batch.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.state_scope import InnerScope

_ROWWISE_LOSSES = (
    keras.losses.BinaryCrossentropy,
    keras.losses.BinaryFocalCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.CategoricalFocalCrossentropy,
    keras.losses.CategoricalHinge,
    keras.losses.CosineSimilarity,
    keras.losses.Hinge,
    keras.losses.Huber,
    keras.losses.KLDivergence,
    keras.losses.LogCosh,
    keras.losses.MeanAbsoluteError,
    keras.losses.MeanAbsolutePercentageError,
    keras.losses.MeanSquaredError,
    keras.losses.MeanSquaredLogarithmicError,
    keras.losses.Poisson,
    keras.losses.SparseCategoricalCrossentropy,
    keras.losses.SquaredHinge,
)
_ROWWISE_FUNCTIONS = {
    "binary_crossentropy",
    "categorical_crossentropy",
    "mean_absolute_error",
    "mean_squared_error",
    "sparse_categorical_crossentropy",
}
_REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight")


def streams_loss(model: keras.Model, y_pred: Any) -> bool:
    """Whether a compiled model's loss is a sum over rows.

    Args:
        model: A model whose compiled loss is built.
        y_pred: Specs or tensors of the outputs.
    """
    compiled = internals.compiled_loss(model)
    if type(model).compute_loss is not keras.Model.compute_loss:
        return False
    if compiled is None:
        return True  # only `add_loss` and regularisers
    entries = internals.flat_losses(compiled)
    if len(entries) > 1 and not tree.is_nested(y_pred):
        return False  # of several losses for one tensor Keras may drop some
    return _has_feature_axis(y_pred) and all(
        _is_rowwise_loss(entry.loss) for entry in entries
    )


def streams_metrics(model: keras.Model, y_pred: Any) -> bool:
    """Whether a compiled model's metrics only add up rows."""
    if type(model).compute_metrics is not keras.Model.compute_metrics:
        return False
    compiled = internals.compiled_metrics(model)
    if compiled is None:
        return True
    return _has_feature_axis(y_pred) and all(
        _is_rowwise_metric(metric)
        for metric in internals.flat_metrics(compiled)
    )


def _has_feature_axis(y_pred: Any) -> bool:
    """Losses average the last axis, which must not be the batch."""
    return all(len(t.shape) > 1 for t in tree.flatten(y_pred) if t is not None)


def _is_rowwise_loss(loss: Any) -> bool:
    if internals.has_own_call(loss) or loss.reduction not in _REDUCTIONS:
        return False
    if internals.function_arguments(loss).get("axis", -1) != -1:
        return False
    if type(loss) in _ROWWISE_LOSSES or getattr(loss, "is_row_wise", False):
        return True
    function = getattr(loss, "fn", None)  # compile(loss="mse") wraps it
    name = getattr(function, "__name__", "")
    return internals.is_keras(function) and name in _ROWWISE_FUNCTIONS


def _is_rowwise_metric(metric: Any) -> bool:
    if not internals.is_keras(type(metric)):
        return False
    function = internals.metric_function(metric)
    if function is None:
        return True
    arguments = internals.function_arguments(metric)
    return internals.is_keras(function) and arguments.get("axis", -1) == -1


class Head:
    """Computes loss and metrics of a micro-batch, as part of the last cell.

    Args:
        model: A compiled, built model.
        with_loss: Whether to compute the loss.
        with_metrics: Whether to update the metrics.

    Attributes:
        streams_loss: `with_loss`.
        streams_metrics: `with_metrics`.
        metric_state: The metrics' variables.
    """

    def __init__(self, model: keras.Model, with_loss: bool, with_metrics: bool):
        self.streams_loss = with_loss
        self.streams_metrics = with_metrics
        self._loss = internals.compiled_loss(model) if with_loss else None
        self._metrics = (
            internals.compiled_metrics(model) if with_metrics else None
        )
        self.metric_state: list[keras.Variable] = (
            list(self._metrics.variables) if self._metrics else []
        )

    def __call__(
        self, y_pred: Any, labels: Any, first: bool
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Adds up the loss of each output and updates the metrics.

        Args:
            y_pred: The last cell's outputs.
            labels: Pair of y and sample_weight, nests or None.
            first: False when the cell is recomputed: no metrics then.

        Returns:
            Sums and counts, a scalar each for each output with a loss.
        """
        y, sample_weight = labels
        if self._metrics is not None and first:
            self._metrics.update_state(y, y_pred, sample_weight=sample_weight)
        if self._loss is None:
            return [], []
        return _sums_and_counts(self._loss, y, y_pred, sample_weight)


def _sums_and_counts(
    compiled: Any, y: Any, y_pred: Any, sample_weight: Any
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Has a compiled loss find each output's labels, and adds up instead."""
    sums: list[tf.Tensor] = []
    counts: list[tf.Tensor] = []

    def replace(_: int, loss: Any) -> Any:
        def add_up(y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
            total, count = sum_and_count(loss, y_true, y_pred, sample_weight)
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


def _check_weights(values: tf.Tensor, sample_weight: Any) -> None:
    """Refuses weights that would be applied along the wrong axis.

    Weights of rows for a loss of, say, time steps fail in Keras, unless there
    are as many rows as steps. Where they do not fail, rows would get the
    weights of steps.
    """
    if sample_weight is None:
        return
    rank, weights_rank = len(values.shape), len(sample_weight.shape)
    if weights_rank == rank - 1 and values.shape[-1] == 1:
        return
    if 0 < weights_rank < rank:
        raise ValueError(
            "`sample_weight` must have one weight for each value of the loss. "
            f"Expected {rank} dimensions, as the loss has. Received: shape "
            f"{tuple(sample_weight.shape)} for a loss of shape "
            f"{tuple(values.shape)}. Repeat the weights along the other axes."
        )


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
    values = loss.call(y_true, y_pred)
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
    _check_weights(values, sample_weight)
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
