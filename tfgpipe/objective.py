"""The loss of one mini-batch, and where its gradients start."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.pipeline import Pipeline, Seeds


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

    def start(self, run: Pipeline) -> Seeds:
        """Computes the loss, after all forward tasks of a `Pipeline`."""
        run.state.assign()  # regularisers see the weights that layers assign
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

    def _from_sums(self, run: Pipeline) -> Seeds:
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

    def _from_outputs(self, run: Pipeline) -> Seeds:
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
