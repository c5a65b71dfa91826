"""A loss that Keras computes from the outputs of the whole mini-batch.

A function of the user's, Dice over the whole batch, an overridden
`compute_loss`: the outputs of all micro-batches are joined on the last device,
and the gradients of the loss with respect to them are taken apart again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.graphs import as_tensor, is_continuous
from tfgpipe.loss.objective import Objective, penalties
from tfgpipe.micro_batches import structure_of
from tfgpipe.run import LossGradients, MiniBatch, Pipeline
from tfgpipe.schedules import Program


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
                "schedule whose backward pass starts earlier. Pass "
                'schedule="gpipe", or a loss class of Keras; or say '
                "`is_row_wise = True` in a class of your own whose `call` "
                "returns a value for each row."
            )

    def has_gradient(self, batch: MiniBatch) -> tuple[list[bool], list[bool]]:
        """Traces the loss once, for nothing but what it depends on."""
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

    def run_eagerly(self, y_pred: Any, added: list[tf.Tensor]) -> None:
        """Computes the loss and its gradients."""
        values = [penalty.value for penalty in penalties(self._model)]
        structure = structure_of(y_pred)

        def nest(outputs: list[Any]) -> Any:
            return tree.map_structure(lambda i: outputs[i], structure)

        flat = tree.flatten(y_pred)
        self._differentiated(self._data, flat, nest, added, values)

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
