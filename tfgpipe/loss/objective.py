"""The loss of one mini-batch, and where its gradients start.

One interface, two ways:

    SummedLoss           losses whose sums over micro-batches the head of the
                         last cell computes: known piece by piece, in any
                         schedule
    WholeMiniBatchLoss   any other: Keras computes it, and its gradients, from
                         the outputs of the whole mini-batch

Sums over micro-batches are divided once:

    loss = sum over m of sum_m / sum over m of count_m

The backward pass needs only the counts.

Keras computes a user's function, Dice over the whole batch, or an overridden
`compute_loss`: the outputs of all micro-batches are joined on the last device,
and the gradients of the loss with respect to them are split again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import names
from tfgpipe.graphs import as_tensor, gradient_sums, is_continuous
from tfgpipe.inputs import MicroBatches, as_specs
from tfgpipe.loss.row_wise import loss_obstacle
from tfgpipe.run import LossGradients, MiniBatch, Pipeline
from tfgpipe.schedules import Program

# A dense gradient, or a sparse one of a lookup.
GradientTensor: TypeAlias = "tf.Tensor | tf.IndexedSlices"
GradientPairs = list[tuple[keras.Variable, GradientTensor]]


@dataclasses.dataclass(eq=False)
class Objective:
    """The loss of one mini-batch.

    Args:
        model: The compiled model.
        data: x, y and sample_weight, nests.
        training: Whether there is a backward pass.
        scales: Whether the backward pass starts from the loss as the optimizer
            scales it.

    Attributes:
        direct_gradients: Weights, and their gradients that no cell computes;
            known when the loss is.
    """

    model: keras.Model
    data: tuple[Any, Any, Any]
    training: bool
    scales: bool = True
    direct_gradients: GradientPairs = dataclasses.field(default_factory=list)

    def check(self, program: Program) -> None:
        """Checks that the loss is known when the backward pass needs it."""

    def has_gradient(self, batch: MiniBatch) -> tuple[list[bool], list[bool]]:
        """Returns which outputs have gradients, and which losses of layers.

        Attributes of outputs count as outputs, behind them. Of a loss that
        nobody has named, all outputs have.
        """
        self._check_parts(batch)
        traced = batch.traced
        count = len(traced.handed_out) - len(traced.outputs)
        has_outputs = [t is not None for t in traced.outputs]
        has_losses = [True] * len(batch.extra_specs())
        return [*has_outputs, *[False] * count], has_losses

    def start(self, run: Pipeline) -> LossGradients:
        """Returns the gradients of outputs and losses."""
        raise NotImplementedError

    def total(self, run: Pipeline) -> tf.Tensor:
        """Returns the loss, a scalar, when all tasks have run."""
        raise NotImplementedError

    def _check_parts(self, batch: MiniBatch) -> None:
        """Refuses a head in parts that has no loss."""
        count = batch.cells[-1].head_parts
        if count > 1 and not batch.has_parts:
            self._refuse(f"`head_parts` must be 1, not {count},")

    def _refuse(self, expected: str) -> NoReturn:
        """Refuses what a loss of whole mini-batches does not allow."""
        y, sample_weight = map(as_specs, self.data[1:])
        y_pred = self.model.built_for("a step").output_spec
        why = loss_obstacle(self.model, y, y_pred, sample_weight)
        raise ValueError(
            f"{expected} where a loss does not add up over rows. Received: "
            f"{why or 'one that the model or the optimizer changes'}. Pass a "
            "loss class of Keras, or say `is_row_wise = True` in one whose "
            "`call` returns a value for each row."
        )

    def _scaled(self, loss: tf.Tensor) -> tf.Tensor:
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is None or not self.scales:
            return loss
        return optimizer.scale_loss(loss)

    def unscaled(
        self, gradient: GradientTensor | None, variable: keras.Variable
    ) -> GradientTensor | None:
        """Returns the gradient of the loss itself, on its variable's device."""
        if gradient is None:
            return None
        device = variable.value.device
        with tf.device(device):
            real = tf.as_dtype(gradient.dtype).real_dtype
            # A scale may be larger than float16 has numbers.
            one = tf.ones([], tf.float32 if real.size < 4 else real)
            scale = self._scaled(one)
            if scale is not one:
                return tf.nest.map_structure(
                    lambda t: _divided(t, scale) if is_continuous(t) else t,
                    gradient,
                    expand_composites=True,
                )
            if names.same_device(gradient.device, device):
                return gradient
            return tf.identity(gradient)


def _divided(tensor: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """A quotient in the dtype of the tensor."""
    if tensor.dtype.is_complex:
        return tensor / tf.cast(scale, tensor.dtype)
    return tf.cast(tf.cast(tensor, scale.dtype) / scale, tensor.dtype)


class _Penalty(NamedTuple):
    """A weight regulariser's part of the loss.

    Attributes:
        value: A scalar, on the weight's device.
        tape: What recorded it.
        read: The trained weights that it reads, this one or others.
    """

    value: tf.Tensor
    tape: tf.GradientTape
    read: list[keras.Variable]

    def gradients(self, factor: tf.Tensor | None) -> GradientPairs:
        """Returns the weights and their gradients, by the chain rule.

        `factor` is the gradient of the loss with respect to the value, or None.
        """
        if factor is None:
            return []
        with tf.device(self.value.device):
            factor = tf.cast(factor, self.value.dtype)
            sources = [v.value for v in self.read]
            gradients = self.tape.gradient(self.value, sources, factor)
        return [(v, d) for v, d in zip(self.read, gradients) if d is not None]


def _penalties(model: keras.Model) -> list[_Penalty]:
    """Returns the penalty of each regularised weight of a model."""
    trained = {id(v.value): v for v in model.trainable_variables}
    each: list[_Penalty] = []
    for variable in model.trainable_weights:
        if variable.regularizer is None:
            continue
        with tf.device(variable.value.device), tf.GradientTape() as tape:
            value = tf.convert_to_tensor(variable.regularizer(variable))
            if value.shape.rank != 0:  # as Keras does
                value = tf.reduce_sum(value)
            value = tf.identity(value)
        watched = [id(v) for v in tape.watched_variables()]
        read = [trained[key] for key in watched if key in trained]
        each.append(_Penalty(value, tape, read))
    return each


def add_direct(
    gradients: dict[int, Any],
    direct: Iterable[tuple[keras.Variable, GradientTensor]],
) -> None:
    """Adds gradients to the sums of cells, by the ids of variables."""
    for variable, gradient in direct:
        known = gradients.get(id(variable))
        if known is not None:
            with tf.device(variable.value.device):
                gradient = gradient_sums.in_order([known, gradient])
        gradients[id(variable)] = gradient


class SummedLoss(Objective):
    """The loss of one mini-batch, from the head's sums and counts."""

    _counted: list[tuple[Any, tf.Tensor]] | None = None

    def has_gradient(self, batch: MiniBatch) -> tuple[list[bool], list[bool]]:
        """See `Objective`: the head has the loss of outputs."""
        has_outputs, has_losses = super().has_gradient(batch)
        return [False for _ in has_outputs], has_losses

    def start(self, run: Pipeline) -> LossGradients:
        """See `Objective`."""
        batch, extra = run.batch, run.batch.extra_specs()
        none = [None] * len(batch.traced.handed_out)  # the head has the loss
        with tf.device(batch.device):
            # loss = sum of w * total / count: by a total it is w / count.
            counts = self._counts(run)
            dtypes = [t.dtype for t in [*(c for _, c in counts), *extra]]
            widest = max(dtypes, key=lambda d: d.size, default=tf.float32)
            scale = self._scaled(tf.ones([], widest))
            return LossGradients(
                outputs=[none] * batch.micro_batches.count,
                head=[
                    tf.math.divide_no_nan(tf.cast(scale, c.dtype) * w, c)
                    for w, c in counts
                ],
                extra=[
                    tf.fill(s.shape, tf.cast(scale, s.dtype)) for s in extra
                ],
            )

    def total(self, run: Pipeline) -> tf.Tensor:
        """See `Objective`; updates Keras's metrics of each output's loss."""
        with tf.device(run.batch.device):
            of_weights = _penalties(self.model)
            batch, traced = run.batch, run.batch.traced
            of_head = traced.losses[: traced.num_head_losses]
            sums = _add_up(batch.values_of(of_head), batch.micro_batches)
            counts = self._counts(run)
            values = [
                tf.math.divide_no_nan(s, c) for s, (_, c) in zip(sums, counts)
            ]
            # Keras's metrics of each output's loss.
            compiled = internals.compiled_loss(self.model)
            rows = batch.micro_batches.num_rows
            trackers = [] if compiled is None else compiled.metrics
            for tracker, value in zip(trackers, values):
                weight = rows if isinstance(rows, int) else None
                tracker.update_state(value, sample_weight=weight)
            others = batch.extra_losses()
            others += [penalty.value for penalty in of_weights]
            weighted = [w * v for (w, _), v in zip(counts, values)]
            losses = [sum(weighted)] if sums else []
            losses += [tf.reduce_sum(v) for v in others]
            if not losses:
                raise ValueError(
                    "No loss to compute. Provide a `loss` argument in "
                    "`compile()`."
                )
            total = keras.ops.sum(losses) if len(losses) > 1 else losses[0]
            scale = self._scaled(tf.ones([], total.dtype))
        if self.training:
            for penalty in of_weights:
                self.direct_gradients += penalty.gradients(scale)
        return total

    def _counts(self, run: Pipeline) -> list[tuple[Any, tf.Tensor]]:
        """Returns for each loss its weight, and by what it is divided."""
        if self._counted is None:
            counts = _add_up(run.counts(), run.batch.micro_batches)
            compiled = internals.compiled_loss(self.model)
            # Keras's entries of the losses that the head has computed.
            entries = internals.flat_losses(compiled) if counts else []
            self._counted = [
                (
                    1.0 if entry.loss_weights is None else entry.loss_weights,
                    tf.ones_like(count)
                    if entry.loss.reduction == "sum"
                    else count,
                )
                for entry, count in zip(entries, counts)
            ]
        return self._counted


def _add_up(
    per_micro_batch: Sequence[Sequence[tf.Tensor]], micro_batches: MicroBatches
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
    """A loss and its gradients, each as its source or None.

    Attributes:
        total: The loss, a scalar.
        outputs: Gradients with respect to outputs and their attributes.
        extra: Gradients with respect to the losses of layers.
    """

    total: tf.Tensor
    outputs: Sequence[tf.Tensor | None] = ()
    extra: Sequence[tf.Tensor | None] = ()


class WholeMiniBatchLoss(Objective):
    """The loss of one mini-batch, from its outputs."""

    _total: tf.Tensor | None = None

    def check(self, program: Program) -> None:
        """Refuses a backward pass that begins before all outputs are known."""
        if not program.is_forward_first:
            self._refuse('`schedule` must be "gpipe"')

    def has_gradient(self, batch: MiniBatch) -> tuple[list[bool], list[bool]]:
        """See `Objective`; traces the loss once, only for this."""
        self._check_parts(batch)
        losses: list[_Loss] = []

        def trace(handed_out: Any, extra: Any) -> None:
            losses.append(self._differentiated(batch, handed_out, extra)[0])

        tf.function(trace, autograph=False).get_concrete_function(
            batch.specs(), batch.extra_specs()
        )
        return (
            [d is not None for d in losses[0].outputs],
            [d is not None for d in losses[0].extra],
        )

    def start(self, run: Pipeline) -> LossGradients:
        """See `Objective`; computes the loss."""
        batch, micro_batches = run.batch, run.batch.micro_batches
        with tf.device(batch.device):
            loss, self.direct_gradients = self._differentiated(
                batch, batch.joined(), batch.extra_losses()
            )
            self._total = loss.total
            # Gradients of outputs: (batch, ...) -> M x (batch / M, ...).
            select = micro_batches.select
            outputs = [
                [d if d is None else select(m, d, tf.zeros_like(d)) for d in ds]
                for m, ds in enumerate(micro_batches.split(loss.outputs))
            ]
            return LossGradients(outputs, head=[], extra=loss.extra)

    def total(self, run: Pipeline) -> tf.Tensor:
        """See `Objective`; computes it if there was no backward pass."""
        if self._total is None:
            self.start(run)
        return self._total

    def _differentiated(
        self,
        batch: MiniBatch,
        handed_out: Sequence[tf.Tensor | None],
        extra: list[tf.Tensor],
    ) -> tuple[_Loss, GradientPairs]:
        """Computes the loss and its gradients, and those of weights.

        `handed_out` are outputs of the whole mini-batch and their attributes,
        `extra` the losses of layers.
        """
        x, y, weight = self.data
        # One that is there twice has a gradient of its own for each place.
        handed_out = [None if t is None else tf.identity(t) for t in handed_out]
        outputs = [t for t in handed_out if is_continuous(t)]
        of_weights = _penalties(self.model)
        values = [penalty.value for penalty in of_weights]
        variables = self.model.trainable_variables
        trained = [v for v in variables if internals.is_trained(v)]
        # Gradients come in this order, and are read in it below.
        sources = [*outputs, *extra, *values, *(v.value for v in trained)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            with (
                self.model.replaced_losses([*extra, *values]),
                internals.refusing_added_losses(self.model, _refuse_losses),
            ):
                data = x, y, batch.nest(handed_out), weight
                total = internals.compute_loss(
                    self.model, *data, training=self.training
                )
            scaled = self._scaled(total) if self.training else None
        if not self.training:
            return _Loss(total), []
        left = iter(tape.gradient(scaled, sources))
        of_outputs = [
            as_tensor(next(left)) if is_continuous(t) else None
            for t in handed_out
        ]
        of_extra = [next(left) for _ in extra]
        of_values = [penalty.gradients(next(left)) for penalty in of_weights]
        pairs = [(v, d) for v, d in zip(trained, left) if d is not None]
        return _Loss(total, of_outputs, of_extra), sum(of_values, pairs)


def _refuse_losses(layer: keras.layers.Layer) -> None:
    """Refuses a read of the losses of one layer, which a cell returned."""
    raise ValueError(
        "`compute_loss` must take what layers add to the loss from the "
        f"model's `self.losses`. Received: losses of layer '{layer.name}'."
    )
