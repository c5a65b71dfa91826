"""The loss of one mini-batch, and where its gradients start.

One interface, two ways:

    SummedLoss           losses whose sums over micro-batches the head
                         computes, see `head.py`: known piece by piece, in any
                         schedule
    WholeMiniBatchLoss   any other: Keras computes it, and its gradients, from
                         the outputs of the whole mini-batch

What is added up over micro-batches is divided once:

    loss = sum over m of sum_m / sum over m of count_m

The backward pass needs nothing but the numbers to divide by.

What Keras computes is a function of the user's, Dice over the whole batch, an
overridden `compute_loss`: the outputs of all micro-batches are joined on the
last device, and the gradients of the loss with respect to them are taken apart
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.devices import names
from tfgpipe.graphs import as_tensor, is_continuous
from tfgpipe.graphs import gradient_sums as sums
from tfgpipe.loss.row_wise import refusals
from tfgpipe.micro_batches import as_specs
from tfgpipe.run import LossGradients, MiniBatch, Pipeline
from tfgpipe.schedules import Program


class Objective:
    """The loss of one mini-batch.

    `scales` is whether the backward pass starts from the loss as the optimizer
    scales it.
    """

    def __init__(
        self,
        model: keras.Model,
        data: tuple[Any, Any, Any],
        training: bool,
        scales: bool = True,
    ):
        self._model = model
        self._data = data
        self._training = training
        self._scales = scales

    def check(self, program: Program) -> None:
        """Checks that the loss is known when the backward pass needs it."""

    def has_gradient(self, batch: MiniBatch) -> tuple[list[bool], list[bool]]:
        """For each output tensor, whether it will have a gradient.

        So for what hangs on them, and for each of the layers' own losses.
        """
        self._check_parts(batch)
        traced = batch.traced
        count = len(traced.handed_out) - len(traced.outputs)
        has_outputs = [t is not None for t in traced.outputs]
        return (
            [*has_outputs, *[False] * count],
            [True] * len(batch.results.extra_specs()),
        )

    def _check_parts(self, batch: MiniBatch) -> None:
        """Refuses parts of a head that has no loss."""
        count = batch.cells[-1].head_parts
        if count > 1 and not batch.has_parts:
            raise ValueError(
                "`head_parts` must be 1 where the loss needs the outputs of "
                f"the whole mini-batch. Received: head_parts={count} and a "
                "loss that does not add up over rows: "
                + self._words_of_loss(
                    "a function of your own, a loss over the batch, or a "
                    "`compute_loss` of the model"
                )
                + "; or leave `head_parts` out."
            )

    def _words_of_loss(self, otherwise: str) -> str:
        """What the loss of whole mini-batches is, and what may be done."""
        y, sample_weight = map(as_specs, self._data[1:])
        y_pred = self._model.built_for("a step").output_spec
        found = refusals(self._model, y, y_pred, sample_weight)
        if found:
            return (
                f"{' and '.join(found)}, so that `is_row_wise = True` cannot "
                "be. Change that, or pass a loss class of Keras"
            )
        return (
            f"{otherwise}. Pass a loss class of Keras; or say "
            "`is_row_wise = True` in a class of your own whose `call` returns "
            "a value for each row"
        )

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

    def _scaled(self, loss: tf.Tensor) -> tf.Tensor:
        optimizer = getattr(self._model, "optimizer", None)
        if optimizer is None or not self._scales:
            return loss
        return optimizer.scale_loss(loss)

    def unscaled(self, gradient: Any, variable: keras.Variable) -> Any:
        """A gradient of the loss itself, or None, where its variable is."""
        if gradient is None:
            return None
        device = variable.value.device
        with tf.device(device):
            real = tf.as_dtype(gradient.dtype).real_dtype
            # A scale may be larger than float16 has numbers.
            one = tf.ones([], tf.float32 if real.size < 4 else real)
            scale = self._scaled(one)
            if scale is not one:
                if gradient.dtype.is_complex:
                    scale = tf.cast(scale, gradient.dtype)
                return _with_values(
                    gradient,
                    lambda values: tf.cast(values, scale.dtype) / scale,
                )
            if names.same_device(gradient.device, device):
                return gradient
            return tf.identity(gradient)


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

        `factor` is the gradient of the loss with respect to the value, or None.
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
    return _with_values(gradient, lambda values: factor * values)


def _with_values(gradient: Any, change: Callable[[tf.Tensor], Any]) -> Any:
    """A gradient, dense or sparse, whose numbers are changed; of its dtype."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(change(gradient), gradient.dtype)
    values = tf.cast(change(gradient.values), gradient.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def penalties(model: keras.Model) -> list[Penalty]:
    """The penalty of each regularised weight of a model."""
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
    """Adds gradients to those that came through cells, by variables' ids."""
    for variable, gradient in found:
        known = gradients.get(id(variable))
        if known is not None:
            with tf.device(variable.value.device):
                gradient = sums.in_order([known, gradient])
        gradients[id(variable)] = gradient


class SummedLoss(Objective):
    """The loss of one mini-batch, from what the head has computed."""

    _counted: list[tf.Tensor] | None = None
    _direct: list[tuple[keras.Variable, tf.Tensor]]

    def has_gradient(self, batch: MiniBatch) -> tuple[list[bool], list[bool]]:
        """All but outputs: the head has their loss."""
        _, extra = super().has_gradient(batch)
        return [False] * batch.results.num_handed_out, extra

    def start(self, run: Pipeline) -> LossGradients:
        """Where the backward pass starts."""
        results = run.results
        none = [None] * results.num_handed_out  # the head has the loss
        with tf.device(results.device):
            # loss = sum of w * total / count: by a total it is w / count.
            counts = self._counts(run)
            scale = self._scaled(tf.ones([], self._dtype(run)))
            return LossGradients(
                outputs=[none] * run.micro_batches.count,
                head=[
                    tf.math.divide_no_nan(tf.cast(scale, c.dtype) * w, c)
                    for w, c in zip(self._weights(run), counts)
                ],
                extra=[
                    tf.fill(s.shape, tf.cast(scale, s.dtype))
                    for s in results.extra_specs()
                ],
            )

    def total(self, run: Pipeline) -> tf.Tensor:
        """The loss; updates the metrics in which Keras shows its parts."""
        with tf.device(run.results.device):
            found = penalties(self._model)
            total = self._sum(run, found)
            scale = self._scaled(tf.ones([], total.dtype))
        if self._training:
            self._direct = [
                pair for penalty in found for pair in penalty.times(scale)
            ]
        return total

    def direct_gradients(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The gradients of weight regularisers."""
        return self._direct

    def _sum(self, run: Pipeline, found: list[Penalty]) -> tf.Tensor:
        """The sum of all losses."""
        sums = _add_up(run.results.head_sums(), run.micro_batches)
        values = [
            tf.math.divide_no_nan(s, c) for s, c in zip(sums, self._counts(run))
        ]
        self._track(values, run.micro_batches.num_rows)
        own = run.results.extra_losses()
        own += [penalty.value for penalty in found]
        weighted = [w * v for w, v in zip(self._weights(run), values)]
        losses = [sum(weighted)] if sums else []
        losses += [tf.reduce_sum(v) for v in own]
        if not losses:
            raise ValueError(
                "No loss to compute. Provide a `loss` argument in `compile()`."
            )
        return keras.ops.sum(losses) if len(losses) > 1 else losses[0]

    def _entries(self, run: Pipeline) -> list[Any]:
        """The losses that the head has computed, as Keras keeps them."""
        if not run.results.num_head_losses:
            return []
        return internals.flat_losses(internals.compiled_loss(self._model))

    def _weights(self, run: Pipeline) -> list[Any]:
        return [
            1.0 if entry.loss_weights is None else entry.loss_weights
            for entry in self._entries(run)
        ]

    def _counts(self, run: Pipeline) -> list[tf.Tensor]:
        """By what each loss is divided."""
        if self._counted is None:
            counts = _add_up(run.counts(), run.micro_batches)
            self._counted = [
                tf.ones_like(count) if entry.loss.reduction == "sum" else count
                for entry, count in zip(self._entries(run), counts)
            ]
        return self._counted

    def _dtype(self, run: Pipeline) -> Any:
        """The widest of all losses."""
        dtypes = [count.dtype for count in self._counts(run)]
        dtypes += [spec.dtype for spec in run.results.extra_specs()]
        return max(dtypes, key=lambda d: d.size, default=tf.float32)

    def _track(self, values: list[tf.Tensor], num_rows: Any) -> None:
        """Updates the metrics in which Keras shows each output's loss."""
        compiled = internals.compiled_loss(self._model)
        if compiled is None:
            return
        for tracker, value in zip(compiled.metrics, values):
            tracker.update_state(
                value,
                sample_weight=num_rows if isinstance(num_rows, int) else None,
            )


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


# ----------------------------------------------- a loss of the whole mini-batch
class _Loss(NamedTuple):
    """A loss and its gradients; without training, no gradients.

    Attributes:
        total: The loss, a scalar.
        outputs: Gradients with respect to what is handed out, of the same
            shapes, or None.
        extra: By the layers' own losses, scalars or None.
        penalties: By the values of the weight regularisers, scalars or None.
        weights: By the weights, as far as the loss itself reads some.
    """

    total: tf.Tensor
    outputs: list[Any]
    extra: list[Any]
    penalties: list[Any]
    weights: list[Any]


class WholeMiniBatchLoss(Objective):
    """The loss of one mini-batch, from its outputs."""

    _total: tf.Tensor | None = None
    _direct: list[tuple[keras.Variable, tf.Tensor]]

    def check(self, program: Program) -> None:
        """Refuses to begin to go backward before all is known."""
        if not program.is_forward_first:
            raise ValueError(
                "`schedule` must run all forward tasks first for a loss of "
                "whole mini-batches, which cannot be added up. Received: a "
                "schedule whose backward pass starts earlier, and "
                + self._words_of_loss("such a loss")
                + '; or pass schedule="gpipe".'
            )

    def has_gradient(self, batch: MiniBatch) -> tuple[list[bool], list[bool]]:
        """Traces the loss once, for nothing but what it depends on."""
        self._check_parts(batch)
        found: list[_Loss] = []
        results = batch.results

        def trace(data: Any, handed_out: Any, extra: Any) -> None:
            values = [penalty.value for penalty in penalties(self._model)]
            found.append(
                self._differentiated(
                    data, handed_out, results.nest, extra, values
                )
            )

        specs = tree.map_structure(
            lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype),
            self._data,
        )
        tf.function(trace, autograph=False).get_concrete_function(
            specs, results.specs(), results.extra_specs()
        )
        return (
            [d is not None for d in found[0].outputs],
            [d is not None for d in found[0].extra],
        )

    def start(self, run: Pipeline) -> LossGradients:
        """Computes the loss, and where the backward pass starts."""
        results, micro_batches = run.results, run.micro_batches
        with tf.device(results.device):
            found = penalties(self._model)
            loss = self._differentiated(
                self._data,
                results.joined(),
                results.nest,
                results.extra_losses(),
                [penalty.value for penalty in found],
            )
            self._total = loss.total
            self._direct = [
                (v, d)
                for v, d in zip(self._trained(), loss.weights)
                if d is not None
            ]
            for penalty, factor in zip(found, loss.penalties):
                self._direct += penalty.times(factor)
            # Gradients of outputs: (batch, ...) -> M x (batch / M, ...).
            return LossGradients(
                outputs=[
                    [
                        None
                        if d is None
                        else micro_batches.select(m, d, tf.zeros_like(d))
                        for d in part
                    ]
                    for m, part in enumerate(micro_batches.split(loss.outputs))
                ],
                head=[],
                extra=loss.extra,
            )

    def total(self, run: Pipeline) -> tf.Tensor:
        """The loss, computed now if there was no backward pass."""
        if self._total is None:
            self.start(run)
        return self._total

    def direct_gradients(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The gradients of a loss that reads weights, and of regularisers."""
        return self._direct

    def _trained(self) -> list[keras.Variable]:
        variables = self._model.trainable_variables
        return [v for v in variables if internals.is_trained(v)]

    def _differentiated(
        self,
        data: tuple[Any, Any, Any],
        handed_out: list[Any],
        nest: Callable[[list[Any]], Any],
        extra: list[tf.Tensor],
        values: list[tf.Tensor],
    ) -> _Loss:
        """The loss of (x, y, sample_weight) and its gradients.

        `handed_out` are flat outputs of the whole mini-batch, with what hangs
        on them, of which `nest` makes what the model returns. `extra` are the
        layers' own losses, `values` those of the weight regularisers.
        """
        x, y, sample_weight = data
        outputs = [t for t in handed_out if is_continuous(t)]
        weights = [v.value for v in self._trained()]
        # Gradients come in this order: `found` is read in it below.
        sources = [*outputs, *extra, *values, *weights]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            with (
                self._model.replaced_losses([*extra, *values]),
                internals.refusing_added_losses(self._model, _refuse_losses),
            ):
                total = internals.compute_loss(
                    self._model,
                    x,
                    y,
                    nest(handed_out),
                    sample_weight,
                    self._training,
                )
            scaled = self._scaled(total) if self._training else None
        if not self._training:
            return _Loss(total, [], [], [], [])
        found = iter(tape.gradient(scaled, sources))
        return _Loss(
            total,
            [
                as_tensor(next(found)) if is_continuous(t) else None
                for t in handed_out
            ],
            [next(found) for _ in extra],
            [next(found) for _ in values],
            list(found),
        )


def _refuse_losses(layer: keras.layers.Layer) -> None:
    """Refuses a read of what one layer has added, which a cell returned."""
    raise ValueError(
        "`compute_loss` must take what layers add to the loss from "
        "`self.losses` of the model, which are those of the mini-batch. "
        f"Received: a read of the losses of layer '{layer.name}', which adds "
        "some by `add_loss` or an `activity_regularizer`. Use `self.losses`."
    )
