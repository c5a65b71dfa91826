"""Sums of gradients over micro-batches and over uses of a variable.

A dense sum is a tensor. Sparse gradients are kept apart until the end, by
micro-batch, and then stand one after the other in the order of the rows, as
those of the whole mini-batch would: Keras's optimizers do not merge duplicates.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def add(sums: list[Any], gradients: list[Any], m: int) -> list[Any]:
    """Adds a micro-batch's gradients; sparse ones are only collected."""
    if not sums:
        return collect(sums, gradients, m)
    added = [
        total + gradient if isinstance(gradient, tf.Tensor) else gradient
        for total, gradient in zip(sums, gradients)
    ]
    return collect(sums, added, m)


def collect(sums: list[Any], found: list[Any], m: int) -> list[Any]:
    """New sums of dense sums that are added up already, and sparse gradients.

    Args:
        sums: The sums so far; empty at first.
        found: The new dense sums, and the micro-batch's sparse gradients.
        m: Index of the micro-batch.
    """
    before = sums or [{}] * len(found)
    return [
        {**total, m: new} if isinstance(new, tf.IndexedSlices) else new
        for total, new in zip(before, found)
    ]


def joined(total: Any) -> Any:
    """A finished sum; sparse gradients stand in the order of the rows."""
    if not isinstance(total, dict):
        return total
    slices = [total[m] for m in sorted(total)]
    if len(slices) == 1:
        return slices[0]
    return tf.IndexedSlices(
        tf.concat([s.values for s in slices], 0),
        tf.concat([s.indices for s in slices], 0),
        slices[0].dense_shape,
    )


def add_uses(totals: list[Any]) -> Any:
    """The sum over the layers that use a variable, None for none."""
    if not totals:
        return None
    if all(isinstance(t, tf.IndexedSlices) for t in totals):
        return joined(dict(enumerate(totals)))
    result = tf.convert_to_tensor(totals[0])
    for total in totals[1:]:
        result = result + tf.convert_to_tensor(total)
    return result
