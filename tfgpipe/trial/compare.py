"""Differences between a batch and its parts, in words.

outputs      the parts' outputs, one after the other
losses       of the parts, the mean by rows
state        the mean by rows, or else the first part's, see
`state/flow.py`
metrics      run on from part to part
gradients    with respect to inputs one after the other, to weights the sum
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from tfgpipe.graphs import gradient_sums, is_continuous
from tfgpipe.trial.distance import CANCELLED, distance, largest
from tfgpipe.trial.rows import NONE, UNCLEAR, Parts, row_axis

# What is said of a layer, by what it is about; `by` is how much.
_WORDS = {
    "condition": (
        "ends a loop, or chooses what it does, by a scalar that follows from "
        "rows: each micro-batch decides for its own. Decide for each row, as "
        "`keras.ops.where` does, and leave rows as they are that are done"
    ),
    "gradients": (
        "has a gradient with respect to '{name}' that mixes rows, or is no sum "
        "over rows: micro-batches have another than the whole mini-batch{by}. "
        "Compute gradients row by row"
    ),
    "losses": (
        "gives `add_loss` what is no mean over rows: with several "
        "micro-batches it is another number{by}, such as a sum that many times "
        "too small. Divide a sum by the number of rows, once: Keras divides "
        "what an `activity_regularizer` returns, which must be a sum"
    ),
    "lookup": (
        "looks up '{name}' by indices that follow from several rows, such as "
        "the longest: optimizers other than `SGD` see each lookup by itself. "
        "Look up what each row has, at a length that does not follow from rows"
    ),
    "metrics": (
        "has a metric, '{name}', that comes to another result in micro-batches"
        "{by}, or over replicas. Update it with values of rows, not with a "
        "mean over them, or with a number of rows as `sample_weight`; pass it "
        "to `compile`"
    ),
    "outputs": (
        "mixes the rows of a batch, or computes with their number or with "
        "state that follows from them: of a micro-batch it makes something "
        "else{by}. Mix rows in the dataset or in the loss"
    ),
    "rows": (
        "does something else for {name} than for other numbers, as code does "
        "that asks for `x.shape[0]`: Keras gives it the rows of a mini-batch, "
        "tfgpipe those of a micro-batch. Let it do the same for any number"
    ),
    "state": (
        "assigns '{name}' what is not seen to be a mean over rows{by}. It "
        "becomes the mean of what the micro-batches assign, or, if it is no "
        "floating point, what the first assigns. Assign a mean over rows; "
        "count and add up in a `keras.metrics.Metric` of the layer, which runs "
        "on from micro-batch to micro-batch"
    ),
    "untried": (
        "was not tried: {name}. Whether it treats a mini-batch as its "
        "micro-batches is not known. Look through its `call`"
    ),
}

# A tensor of all rows, and of each part.
Column: TypeAlias = Sequence[tf.Tensor]


def words(about: str, apart: float, name: str = "") -> str:
    """Says what is wrong with a layer, and the cure."""
    by = "" if apart == float("inf") else f" ({apart:.2g} of its largest)"
    text = _WORDS[about].format(name=name, by=by)
    return f"{text}, or pass num_micro_batches=1."


def rounding_of(inputs: Sequence[tf.Tensor]) -> float:
    """Returns what is left of inputs where they cancel."""
    numbers = [*filter(is_continuous, inputs)]
    left = [largest(t) * CANCELLED[t.dtype.real_dtype.size] for t in numbers]
    return max(left, default=0.0)


def of_indices(column: Column) -> tuple[bool, bool]:
    """Returns whether indices are of rows, and whether parts have them all."""
    whole, *parts = (tf.reshape(t, (-1,)) for t in column)
    is_of_rows = not distance(whole, tf.concat(parts, 0))
    return is_of_rows, not any(distance(whole, part) for part in parts)


def of_outputs(
    column: Column, parts: Parts, noise: float, num_bytes: int
) -> float:
    """Computes how far a tensor is from the parts', side by side."""
    whole, *others = column
    axis = row_axis(column, parts)
    pairs = []
    if axis >= 0:
        pairs = [(whole, tf.concat(others, axis))]
    elif axis == NONE and is_continuous(whole):
        pairs = [(whole, other) for other in others]
    elif axis == UNCLEAR and (len(whole.shape) != 1 or is_continuous(whole)):
        # Several elements of each row, in an order that is not known: sorted.
        # Else, such as where the rows of a ragged tensor begin.
        one, *flat = (tf.reshape(t, (-1,)) for t in column)
        other = tf.concat(flat, 0)
        if one.shape != other.shape:
            return float("inf")
        if one.dtype.is_floating:
            pairs = [(tf.sort(one), tf.sort(other))]
    return max(
        (distance(a, b, noise=noise, num_bytes=num_bytes) for a, b in pairs),
        default=0.0,
    )


def of_gradient(
    variable: keras.Variable | None,
    column: Column,
    size: float,
    parts: Parts,
    num_bytes: int,
) -> float:
    """Computes how far a gradient by a weight, or inputs, is from the parts'.

    `size` is the largest of the gradients of all weights of the layer. What
    cancels, as an attention's keys' does, is little but rounding.
    """
    whole, *others = column
    if variable is not None:
        is_replaced = gradient_sums.is_replaced(variable)
        total = tf.maximum(*others) if is_replaced else tf.add_n(others)
        return distance(whole, total, 1e-2 * size, num_bytes=num_bytes)
    noise = CANCELLED[num_bytes] / 10  # those that are given are around 1
    if row_axis(column, parts) == NONE:  # as of positions, used by all
        total = tf.add_n(others)
        return distance(whole, total, noise=noise, num_bytes=num_bytes)
    return of_outputs(column, parts, noise, num_bytes)


def by_rows(values: Sequence[tf.Tensor], parts: Parts) -> tf.Tensor:
    """Returns the mean of two parts' values, by their rows."""
    return tf.add_n(
        [
            v * tf.constant(count / parts.total, v.dtype)
            for v, count in zip(values, parts)
        ]
    )
