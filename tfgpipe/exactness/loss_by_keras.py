"""The loss of the whole mini-batch, computed by Keras on the host.

From what the last layer has made on its device: so what differs is the loss
itself, its sum over micro-batches, or where its gradients start.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import as_tensor, is_continuous
from tfgpipe.exactness.difference import of_gradients, of_outputs
from tfgpipe.exactness.parts import (
    HOST,
    first_axes,
    joined,
    joined_gradients,
    summed,
)
from tfgpipe.exactness.recorder import Recorded, shares_of
from tfgpipe.exactness.report import Tally

_WHERE = "the whole mini-batch"


def compare_loss(
    tally: Tally,
    model: Any,
    data: tuple[Any, Any, Any],
    total: tf.Tensor,
    recorded: Recorded,
) -> dict[int, tf.Tensor]:
    """Compares the loss, and where its gradients start, with Keras's.

    Args:
        tally: Takes the comparisons.
        model: The compiled `GPipe`.
        data: The mini-batch: x, y and sample_weight.
        total: The loss as the pipeline has it.
        recorded: The steps and their calls.

    Returns:
        Gradients of weights that do not come through layers, by id: those of
        regularisers, and of a loss that reads weights.
    """
    place, calls = recorded[-1]
    limit = place.limit(calls[0].outputs.tensors)
    variables = model.trainable_variables
    with tf.device(HOST):
        parts = [call.outputs for call in calls]
        outputs = joined(parts, first_axes(parts[0]))
        y_pred = outputs.nest(calls[0].output_structure)
        flat = keras.tree.flatten(y_pred)
        added = _added(recorded)
        weights = [tf.identity(v.value) for v in variables]
        sources = [
            t
            for t in [*flat, *(loss for loss, _ in added), *weights]
            if is_continuous(t)
        ]
        with (
            tf.GradientTape(watch_accessed_variables=False) as tape,
            keras.StatelessScope([*zip(variables, weights)]),
        ):
            tape.watch(sources)
            losses = [loss for loss, _ in added] + _penalties(model)
            own = _loss(model, data, y_pred, losses)
            scaled = model.optimizer.scale_loss(own)
        found = dict(zip(map(id, sources), tape.gradient(scaled, sources)))

        def compared(what: str, pairs: list[tuple[Any, Any]]) -> None:
            """Pairs of what is found, and a source for what is expected."""
            expected = [
                tf.zeros_like(t) if found[id(t)] is None else found[id(t)]
                for _, t in pairs
            ]
            difference = of_gradients([d for d, _ in pairs], expected)
            tally.note("loss", _WHERE, what, difference, limit)

        tally.note("loss", _WHERE, "loss", of_outputs([total], [own]), limit)
        if places := [*calls[0].dy]:
            dy = [joined_gradients([c.dy[i] for c in calls], 0) for i in places]
            pairs = [*zip(dy, (flat[i] for i in places))]
            compared("gradient of the loss with respect to outputs", pairs)
        if pairs := [(d, loss) for loss, d in added if d is not None]:
            compared(
                "gradient of the loss with respect to layers' losses", pairs
            )
        return {
            id(v): as_tensor(found[id(t)])
            for v, t in zip(variables, weights)
            if found.get(id(t)) is not None
        }


def _added(recorded: Recorded) -> list[tuple[tf.Tensor, Any]]:
    """What layers add to the loss, of all rows, with its gradients."""
    shares = shares_of(recorded)
    found = []
    for _, calls in recorded:
        for i in range(len(calls[0].losses)):
            parts = [call.losses[i] for call in calls]
            dtype = parts[0].dtype
            if not dtype.is_floating:
                dtype = tf.as_dtype(keras.config.floatx())
            loss = tf.add_n(
                [
                    tf.constant(share, dtype)
                    * tf.reduce_sum(tf.cast(part, dtype))
                    for share, part in zip(shares, parts)
                ]
            )
            found.append(
                (loss, summed([call.dlosses.get(i) for call in calls]))
            )
    return found


def _penalties(model: Any) -> list[tf.Tensor]:
    """What weight regularisers add to the loss."""
    return [
        tf.reduce_sum(v.regularizer(v))
        for v in model.trainable_weights
        if v.regularizer is not None
    ]


def _loss(
    model: Any, data: tuple[Any, Any, Any], y_pred: Any, losses: list[Any]
) -> tf.Tensor:
    x, y, sample_weight = data
    with model.replaced_losses(losses):
        return internals.compute_loss(
            model, x, y, y_pred, sample_weight, training=True
        )
