"""The mini-batch's loss and metrics, from micro-batches where possible.

A Keras loss of a mini-batch is a sum over rows divided by a number: the rows,
the unmasked positions, or the sum of the weights. `Head` computes sum and
number of each micro-batch inside the last cell, so the cell's outputs (think of
a softmax over 32,000 words) live no longer than the micro-batch. The engine
divides the sum of the sums by the sum of the numbers:

    loss = sum over m of sum_m / sum over m of count_m

That holds for losses and metrics that treat every row by itself, as Keras's own
do; `streams_loss` and `streams_metrics` tell. Anything else (a function of the
user's, Dice over the whole batch, an overridden `compute_loss`) is computed by
Keras on the outputs of the whole mini-batch.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.pipeline import Seeds

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
    return _has_feature_axis(y_pred) and all(
        _is_rowwise_loss(entry.loss)
        for entry in internals.flat_losses(compiled)
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
    if type(loss) in _ROWWISE_LOSSES:
        return True
    function = getattr(loss, "fn", None)  # compile(loss="mse") wraps it
    is_keras = internals.is_keras(function)
    return is_keras and function.__name__ in _ROWWISE_FUNCTIONS


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
        streams_metrics: `with_metrics`.
        metric_state: The metrics' variables.
    """

    def __init__(
        self, model: keras.Model, with_loss: bool, with_metrics: bool
    ):
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
        sums: list[tf.Tensor] = []
        counts: list[tf.Tensor] = []
        if self._loss is not None:

            def replace(index: int, loss: Any) -> Any:
                def run(y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
                    total, count = sum_and_count(
                        loss, y_true, y_pred, sample_weight
                    )
                    sums.append(tf.cast(total, self._loss.dtype))
                    counts.append(tf.cast(count, self._loss.dtype))
                    return total

                return run

            with (
                keras.StatelessScope(),  # Keras's trackers: see Objective
                internals.replaced_losses(self._loss, replace),
            ):
                self._loss(y, y_pred, sample_weight)
        if self._metrics is not None and first:
            self._metrics.update_state(y, y_pred, sample_weight=sample_weight)
        return sums, counts


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
    out_mask = internals.get_mask(values)
    mask = out_mask if in_mask is None else in_mask
    if in_mask is not None and out_mask is not None:
        mask = in_mask & out_mask
    total = internals.reduce_weighted_values(
        values, sample_weight, mask, "sum", dtype
    )
    if loss.reduction == "sum":
        return total, tf.ones([], total.dtype)
    if loss.reduction == "mean_with_sample_weight":
        weights = internals.effective_weights(
            values, sample_weight, mask, loss.reduction, dtype
        )
        if weights is not None:
            return total, tf.reduce_sum(weights)
    count = tf.cast(tf.size(values), total.dtype)
    if mask is None or loss.reduction == "mean_with_sample_weight":
        return total, count
    valid = tf.reduce_sum(tf.cast(mask, total.dtype))
    return total, valid * count / tf.cast(tf.size(mask), total.dtype)


class Objective:
    """The loss of one mini-batch, and where its gradients start.

    Args:
        model: The compiled model.
        data: The mini-batch: x, y and sample_weight.
        streams: Whether the head has computed the loss of micro-batches.
        training: Whether gradients are wanted.

    Attributes:
        total: The loss, a scalar, once `start` was called.
    """

    def __init__(
        self,
        model: keras.Model,
        data: tuple[Any, Any, Any],
        streams: bool,
        training: bool,
    ):
        self._model = model
        self._data = data
        self._streams = streams
        self._training = training
        self._compiled = internals.compiled_loss(model)
        self._regularizers: list[tuple[Any, tf.Tensor, tf.Tensor]] = []
        self._regularizer_seeds: list[tf.Tensor] = []
        self.total: tf.Tensor | None = None

    def start(self, run: Any) -> Seeds:
        """Computes the loss, after all forward tasks of a `Pipeline`."""
        run.assign_state()  # regularisers see the weights that layers assign
        self._regularizers = _regularizers(self._model)
        with tf.device(run.cells[-1].device):
            if self._streams:
                return self._from_sums(run)
            return self._from_outputs(run)

    def add_regularizers(self, gradients: dict[int, Any]) -> None:
        """Adds the weight regularisers' gradients to those of the loss."""
        for (variable, _, gradient), seed in zip(
            self._regularizers, self._regularizer_seeds
        ):
            if gradient is None or seed is None:
                continue
            with tf.device(variable.value.device):
                gradient = tf.cast(seed, gradient.dtype) * gradient
                known = gradients.get(id(variable))
                if known is not None:
                    gradient = tf.convert_to_tensor(known) + gradient
            gradients[id(variable)] = gradient

    def _scaled(self, loss: tf.Tensor) -> tf.Tensor:
        optimizer = self._model.optimizer
        return loss if optimizer is None else optimizer.scale_loss(loss)

    def _from_sums(self, run: Any) -> Seeds:
        """Puts the head's sums and counts together."""
        sums, counts = (
            _add_up(values, run.micro_batches) for values in run.head_results()
        )
        entries = internals.flat_losses(self._compiled) if sums else []
        counts = [
            tf.ones_like(count) if entry.loss.reduction == "sum" else count
            for entry, count in zip(entries, counts)
        ]
        weights = [
            1.0 if e.loss_weights is None else e.loss_weights for e in entries
        ]
        values = [tf.math.divide_no_nan(s, c) for s, c in zip(sums, counts)]
        self._track(values, run.micro_batches.num_rows)
        extra = run.extra_losses()
        own = [v for losses in extra for v in losses]
        own += [value for _, value, _ in self._regularizers]
        losses = [sum(w * v for w, v in zip(weights, values))] if sums else []
        losses += [tf.reduce_sum(v) for v in own]
        if not losses:
            raise ValueError(
                "No loss to compute. Provide a `loss` argument in `compile()`."
            )
        self.total = keras.ops.sum(losses) if len(losses) > 1 else losses[0]
        scale = self._scaled(tf.ones([], self.total.dtype))
        self._regularizer_seeds = [scale] * len(self._regularizers)
        last = run.functions[-1]
        num_outputs = len(tree.flatten(last.output_structure))
        return Seeds(
            outputs=[[None] * num_outputs] * run.micro_batches.count,
            head=[
                tf.math.divide_no_nan(tf.cast(scale, c.dtype) * w, c)
                for w, c in zip(weights, counts)
            ],
            extra=[
                [tf.cast(scale, v.dtype) for v in losses] for losses in extra
            ],
        )

    def _track(self, values: list[tf.Tensor], num_rows: Any) -> None:
        """Updates the metrics in which Keras shows each output's loss."""
        if self._compiled is None:
            return
        for tracker, value in zip(self._compiled.metrics, values):
            tracker.update_state(
                value,
                sample_weight=num_rows if isinstance(num_rows, int) else None,
            )

    def _from_outputs(self, run: Any) -> Seeds:
        """Has Keras compute the loss of the whole mini-batch's outputs."""
        x, y, sample_weight = self._data
        y_pred = run.joined_outputs()
        outputs = [
            t for t in tree.flatten(y_pred) if t is not None and _is_float(t)
        ]
        extra = run.extra_losses()
        own = [v for losses in extra for v in losses]
        regularizers = [value for _, value, _ in self._regularizers]
        sources = [*outputs, *own, *regularizers]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            with self._model.replaced_losses([*own, *regularizers]):
                self.total = internals.compute_loss(
                    self._model, x, y, y_pred, sample_weight, self._training
                )
            scaled = self._scaled(self.total) if self._training else None
        if not self._training:
            return Seeds([], [], [])
        found = tape.gradient(scaled, sources)
        by_output = iter(found[: len(outputs)])
        by_loss = iter(found[len(outputs) : len(outputs) + len(own)])
        self._regularizer_seeds = found[len(outputs) + len(own) :]
        dy = [
            next(by_output) if t is not None and _is_float(t) else None
            for t in tree.flatten(y_pred)
        ]
        return Seeds(
            outputs=[
                [
                    None
                    if d is None
                    else run.micro_batches.select(m, d, tf.zeros_like(d))
                    for d in part
                ]
                for m, part in enumerate(run.micro_batches.split(dy))
            ],
            head=[],
            extra=[
                [
                    tf.zeros_like(v) if d is None else d
                    for v, d in ((v, next(by_loss)) for v in losses)
                ]
                for losses in extra
            ],
        )


def _is_float(tensor: Any) -> bool:
    return tensor.dtype.is_floating


def _add_up(
    per_micro_batch: list[list[tf.Tensor]], micro_batches: Any
) -> list[tf.Tensor]:
    """Sums over the micro-batches that have rows."""
    return [
        tf.add_n(
            [
                micro_batches.select(m, t, tf.zeros_like(t))
                for m, t in enumerate(tensors)
            ]
        )
        for tensors in zip(*per_micro_batch)
    ]


def _regularizers(
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
