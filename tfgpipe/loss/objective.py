"""The loss of one mini-batch, and where its gradients start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import Boundary, dense, is_continuous
from tfgpipe.loss.direct import add_to, regularizers
from tfgpipe.run import Pipeline, Seeds
from tfgpipe.schedules import Schedule


class Objective:
    """The loss of one mini-batch, and where its gradients start.

    Args:
        model: The compiled model.
        data: The mini-batch: x, y and sample_weight.
        streams: Whether the head has computed the loss of micro-batches.
        training: Whether gradients are wanted.
        arrival: See `inputs.arrival`. Nothing is assigned before.

    Attributes:
        total: The loss, a scalar, once `finish` was called.
    """

    def __init__(
        self,
        model: keras.Model,
        data: tuple[Any, Any, Any],
        streams: bool,
        training: bool,
        arrival: Sequence[tf.Operation] = (),
    ):
        self._model = model
        self._arrival = arrival
        self._data = data
        self._streams = streams
        self._training = training
        self._compiled = internals.compiled_loss(model)
        self._regularizers: list[tuple[Any, tf.Tensor, tf.Tensor]] = []
        self._regularizer_seeds: list[Any] = []
        self._by_weights: list[tuple[keras.Variable, Any]] = []
        self._counts: list[tf.Tensor] | None = None
        self.total: tf.Tensor | None = None

    # ----------------------------------------------------- for the pipeline
    def check(self, schedule: Schedule) -> None:
        """Checks that the loss is known when the backward pass needs it."""
        if not self._streams and not schedule.is_forward_first:
            raise ValueError(
                "`schedule` must run all forward tasks first for a loss of "
                "whole mini-batches, which cannot be added up. Received: a "
                "schedule whose backward pass starts earlier. Pass "
                'schedule="gpipe", or a loss class of Keras.'
            )

    def has_gradient(self, run: Pipeline) -> list[bool]:
        """For each output tensor, whether it will have a gradient."""
        if self._streams:
            return [False] * len(run.tasks[-1].outputs.tensors)
        return self._found_gradient(run)

    def start(self, run: Pipeline) -> Seeds:
        """Where the backward pass starts; called before it.

        A loss that is added up needs only the numbers to divide by; any other
        is computed now, from the outputs of the whole mini-batch.
        """
        with (
            tf.control_dependencies(self._arrival),
            tf.device(run.cells[-1].device),
        ):
            if self._streams:
                return self._seeds_of_sums(run)
            return self._from_outputs(run)

    def finish(self, run: Pipeline) -> None:
        """Computes the loss, after all tasks of a `Pipeline`."""
        with tf.device(run.cells[-1].device):
            if self._streams:
                self._total_of_sums(run)
            elif self.total is None:
                self._from_outputs(run)

    def add_direct(self, gradients: dict[int, Any]) -> None:
        """Adds gradients by weights that do not come through the cells.

        Those of the weight regularisers, and of a loss that reads weights.
        """
        found = list(self._by_weights)
        for (variable, _, gradient), seed in zip(
            self._regularizers, self._regularizer_seeds
        ):
            if gradient is None or seed is None:
                continue
            with tf.device(variable.value.device):
                gradient = tf.cast(seed, gradient.dtype) * gradient
            found.append((variable, gradient))
        add_to(gradients, found)

    def _scaled(self, loss: tf.Tensor) -> tf.Tensor:
        optimizer = self._model.optimizer
        return loss if optimizer is None else optimizer.scale_loss(loss)

    def _find_regularizers(self, run: Pipeline) -> None:
        run.state.assign()  # regularisers see the weights that layers assign
        self._regularizers = regularizers(self._model)

    # ------------------------------------------------- a loss that is added up
    def _entries(self, run: Pipeline) -> list[Any]:
        """The losses that the head has computed, as Keras keeps them."""
        has_head = run.tasks[-1].num_head_losses
        return internals.flat_losses(self._compiled) if has_head else []

    def _count(self, run: Pipeline) -> list[tf.Tensor]:
        """By what each loss is divided."""
        if self._counts is None:
            counts = _add_up(run.head_counts(), run.micro_batches)
            self._counts = [
                tf.ones_like(count) if entry.loss.reduction == "sum" else count
                for entry, count in zip(self._entries(run), counts)
            ]
        return self._counts

    def _seeds_of_sums(self, run: Pipeline) -> Seeds:
        counts = self._count(run)
        scale = self._scaled(tf.ones([], self._loss_dtype(run)))
        num_outputs = len(tree.flatten(run.tasks[-1].output_structure))
        return Seeds(
            outputs=[[None] * num_outputs] * run.micro_batches.count,
            head=[
                tf.math.divide_no_nan(tf.cast(scale, c.dtype) * w, c)
                for w, c in zip(_weights(self._entries(run)), counts)
            ],
            extra=[
                [tf.fill(s.shape, tf.cast(scale, s.dtype)) for s in specs]
                for specs in run.results.extra_specs()
            ],
        )

    def _total_of_sums(self, run: Pipeline) -> None:
        self._find_regularizers(run)
        sums = _add_up(run.results.head_sums(), run.micro_batches)
        values = [
            tf.math.divide_no_nan(s, c) for s, c in zip(sums, self._count(run))
        ]
        self._track(values, run.micro_batches.num_rows)
        own = [v for losses in run.results.extra_losses() for v in losses]
        own += [value for _, value, _ in self._regularizers]
        weights = _weights(self._entries(run))
        losses = [sum(w * v for w, v in zip(weights, values))] if sums else []
        losses += [tf.reduce_sum(v) for v in own]
        if not losses:
            raise ValueError(
                "No loss to compute. Provide a `loss` argument in `compile()`."
            )
        self.total = keras.ops.sum(losses) if len(losses) > 1 else losses[0]
        if self._training:
            scale = self._scaled(tf.ones([], self.total.dtype))
            self._regularizer_seeds = [scale] * len(self._regularizers)

    def _loss_dtype(self, run: Pipeline) -> Any:
        dtypes = [c.dtype for c in self._count(run)]
        extra = run.results.extra_specs()
        dtypes += [spec.dtype for own in extra for spec in own]
        return max(dtypes, key=lambda d: d.size, default=tf.float32)

    def _track(self, values: list[tf.Tensor], num_rows: Any) -> None:
        """Updates the metrics in which Keras shows each output's loss."""
        if self._compiled is None:
            return
        for tracker, value in zip(self._compiled.metrics, values):
            tracker.update_state(
                value,
                sample_weight=num_rows if isinstance(num_rows, int) else None,
            )

    # ------------------------------------------------------------- other losses
    def _from_outputs(self, run: Pipeline) -> Seeds:
        """Has Keras compute the loss of the whole mini-batch's outputs."""
        self._find_regularizers(run)
        extra = run.results.extra_losses()
        values = [value for _, value, _ in self._regularizers]
        self.total, dy, dextra, found = self._differentiated(
            self._data, run.results.joined_outputs(), extra, values
        )
        self._regularizer_seeds = found[: len(values)]
        weights = zip(self._model.trainable_variables, found[len(values) :])
        self._by_weights = [(v, d) for v, d in weights if d is not None]
        if not self._training:
            return Seeds([], [], [])
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
            extra=dextra,
        )

    def _differentiated(
        self,
        data: tuple[Any, Any, Any],
        y_pred: Any,
        extra: list[list[tf.Tensor]],
        penalties: list[tf.Tensor],
    ) -> tuple[tf.Tensor, list[Any], list[list[Any]], list[Any]]:
        """The loss and its gradients.

        Args:
            data: x, y and sample_weight.
            y_pred: Outputs of the whole mini-batch.
            extra: The cells' own losses.
            penalties: Values of the weight regularisers.

        Returns:
            The loss; its gradients by the flat outputs, by the cells' own
            losses, and by the regularisers and then the weights, as far as the
            loss itself reads some.
        """
        x, y, sample_weight = data
        flat = tree.flatten(y_pred)
        outputs = [t for t in flat if is_continuous(t)]
        own = [v for losses in extra for v in losses]
        weights = [v.value for v in self._model.trainable_variables]
        sources = [*outputs, *own, *penalties, *weights]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            with self._model.replaced_losses([*own, *penalties]):
                total = internals.compute_loss(
                    self._model, x, y, y_pred, sample_weight, self._training
                )
            scaled = self._scaled(total) if self._training else None
        if not self._training:
            return total, [], [], []
        found = iter(tape.gradient(scaled, sources))
        dy = [dense(next(found)) if is_continuous(t) else None for t in flat]
        dextra = [
            [
                tf.zeros_like(v) if d is None else d
                for v, d in ((v, next(found)) for v in losses)
            ]
            for losses in extra
        ]
        return total, dy, dextra, list(found)

    def _found_gradient(self, run: Pipeline) -> list[bool]:
        """Traces the loss once, for nothing but what it depends on."""
        found: list[bool] = []

        def trace(data: Any, boundary: Boundary, extra: Any) -> None:
            y_pred = boundary.nest(run.tasks[-1].output_structure)
            values = [value for _, value, _ in regularizers(self._model)]
            _, dy, _, _ = self._differentiated(data, y_pred, extra, values)
            found.extend(d is not None for d in dy)

        specs = tree.map_structure(
            lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype),
            self._data,
        )
        results = run.results
        tf.function(trace, autograph=False).get_concrete_function(
            specs, results.output_specs(), results.extra_specs()
        )
        return found


def _weights(entries: list[Any]) -> list[Any]:
    return [1.0 if e.loss_weights is None else e.loss_weights for e in entries]


def _add_up(
    per_micro_batch: list[list[tf.Tensor]], micro_batches: Any
) -> list[tf.Tensor]:
    """Sums over the micro-batches that have rows."""
    select = micro_batches.select
    added = [
        [select(m, t, tf.zeros_like(t)) for m, t in enumerate(tensors)]
        for tensors in zip(*per_micro_batch)
    ]
    return [tf.reduce_sum(tf.stack(tensors), 0) for tensors in added]
