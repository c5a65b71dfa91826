"""Differences between a batch and its parts, in words.

outputs      the parts' outputs, one after the other
losses       of the parts, the mean by rows
state        the mean by rows, or else the first part's, see
`state/rules.py`
metrics      run on from part to part
gradients    with respect to inputs one after the other, to weights the sum
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfgpipe.graphs import gradient_sums, is_continuous
from tfgpipe.trial.distance import (
    CANCELLED,
    distance,
    largest,
    rounding_of,
)
from tfgpipe.trial.rows import NONE, UNCLEAR, Parts, row_axis

_ONE = "pass num_micro_batches=1"

_REGULARIZER = (
    "Keras divides what an `activity_regularizer` returns, which must be a sum"
)


# A tensor of all rows, and of each part.
Column: TypeAlias = Sequence[tf.Tensor]


def output_distance(
    columns: Sequence[Column],
    inputs: Sequence[tf.Tensor],
    parts: Parts,
    num_bytes: int,
) -> float:
    """Computes how far outputs are apart, which are made of some inputs."""
    # What cancels leaves the rounding of what was taken.
    given = [t for t in inputs if is_continuous(t)]
    noise = max((_rounding(t) for t in given), default=0.0)
    most = {"noise": noise, "num_bytes": num_bytes}
    distances = (_rows_distance(parts, *column, **most) for column in columns)
    return max(distances, default=0.0)


def is_clearly_apart(column: Column, parts: Parts, num_bytes: int) -> bool:
    """Returns whether a tensor has its rows in order, and parts have others."""
    if row_axis(column, parts) == UNCLEAR:
        return False
    return _rows_distance(parts, *column, num_bytes=num_bytes) > 0


def of_indices(column: Column) -> tuple[bool, bool]:
    """Returns whether indices are of rows, and whether parts have them all."""
    whole, *parts = (tf.reshape(t, (-1,)) for t in column)
    is_of_rows = not distance(whole, tf.concat(parts, 0))
    return is_of_rows, not any(distance(whole, part) for part in parts)


def _rounding(tensor: Any) -> float:
    """By how much numbers of this size may be off."""
    return largest(tensor) * CANCELLED[tensor.dtype.real_dtype.size]


def _rows_distance(
    rows: Parts, whole: tf.Tensor, *parts: tf.Tensor, **most: Any
) -> float:
    """Computes how far a tensor is from the parts', side by side."""
    axis = row_axis([whole, *parts], rows)
    if axis >= 0:
        return distance(whole, tf.concat(parts, axis), **most)
    if axis == NONE:
        if not is_continuous(whole):
            return 0.0
        return max(distance(whole, p, **most) for p in parts)
    if len(whole.shape) == 1 and not is_continuous(whole):
        return 0.0  # such as where the rows of a ragged tensor begin
    # Several elements of each row, in an order that is not known: sorted.
    flat = [tf.reshape(t, (-1,)) for t in (whole, *parts)]
    one, other = flat[0], tf.concat(flat[1:], 0)
    if one.shape != other.shape:
        return float("inf")
    if not one.dtype.is_floating:
        return 0.0
    return distance(tf.sort(one), tf.sort(other), **most)


def by_rows(values: Sequence[Any], parts: Parts) -> Any:
    """Returns the mean of two parts' values, by their rows."""
    return sum(
        v * tf.constant(count / parts.total, v.dtype)
        for v, count in zip(values, parts)
    )


def of_outputs(apart: float) -> str:
    """Says what is wrong with a layer whose outputs differ."""
    return (
        "mixes the rows of a batch, or computes with their number, or with "
        "state that follows from them: it sees only those of a micro-batch, "
        f"and its outputs are others than for the whole mini-batch{_by(apart)}"
        f". Mix rows in the dataset or in the loss, or {_ONE}."
    )


def of_condition() -> str:
    """Returns what to say of a layer that decides for all rows at once."""
    return (
        "ends a loop, or chooses what it does, by a scalar that follows from "
        "rows, such as the largest of all: each micro-batch decides for its "
        "rows, and maybe not as the whole mini-batch would. Decide for each "
        "row by itself, as `keras.ops.where` does, and leave rows as they are "
        f"that are done; or {_ONE}."
    )


def of_known_rows(count: int) -> str:
    """Says what is wrong with code that asks how many rows there are."""
    return (
        f"does something else for {count} rows than for another number, as "
        "code does that asks for `x.shape[0]` while Python runs: Keras gives "
        "it the rows of a mini-batch, tfgpipe those of a micro-batch. Let it "
        f"do the same for any number of rows, or {_ONE}."
    )


def of_losses(
    columns: Sequence[Column], parts: Parts, num_bytes: int
) -> Iterator[str]:
    """Says what is wrong with losses that differ."""
    for loss, *losses in columns:
        most = {"num_bytes": num_bytes}
        apart = distance(loss, by_rows(losses, parts), **most)
        if not apart:
            continue
        means = [n * count for n, count in zip(losses, parts)]
        if not distance(loss, tf.add_n(losses), **most):
            what = "a sum over rows"
            wrong = "comes out that many times too small"
            cure = "Divide it by their number"
        elif not distance(loss * parts.total, by_rows(means, parts), **most):
            what = "a mean over rows that is divided by their number once more"
            wrong = "comes out that many times too large"
            cure = f"Divide it once: {_REGULARIZER}"
        else:
            what = "what is no mean over rows"
            wrong = f"is not the mini-batch's{_by(apart)}"
            cure = f"Give a mean over rows: {_REGULARIZER}"
        yield (
            f"gives `add_loss` {what}. With several micro-batches it must be a "
            f"mean, or it {wrong}. {cure}; or {_ONE}."
        )


def of_state(
    variable: keras.Variable,
    column: Column,
    inputs: Sequence[tf.Tensor],
    parts: Parts,
    num_bytes: int,
) -> Iterator[str]:
    """Says what is wrong with state that differs."""
    whole, *values = column
    is_mean = is_continuous(whole) and not variable.trainable
    apart = distance(
        whole,
        by_rows(values, parts) if is_mean else values[0],
        noise=rounding_of(inputs),  # of means that are zero but for it
        num_bytes=num_bytes,
    )
    if not apart:
        return
    what, of = (
        ("what is not seen to be a mean over rows", "the mean of what the")
        if is_mean
        else ("what follows from rows, or their number", "what the first")
    )
    yield (
        f"assigns '{variable.name}' {what}. It becomes {of} micro-batch"
        f"{'es assign, weighted by rows' if is_mean else ' assigns'}, and "
        f"not what the whole mini-batch would{_by(apart)}. Assign a mean over "
        "rows; count and add up in a `keras.metrics.Metric` of the layer, "
        f"which runs on from micro-batch to micro-batch; or {_ONE}."
    )


def of_drawn(variable: keras.Variable) -> str:
    """Says what is wrong with state that is drawn, and not for each row."""
    is_mean = is_continuous(variable.value) and not variable.trainable
    of = (
        "the mean of what the micro-batches draw, which deviates less"
        if is_mean
        else "what the first micro-batch draws"
    )
    return (
        f"assigns '{variable.name}' what it draws for a batch as a whole. It "
        f"becomes {of}, and not what the whole mini-batch would draw. Draw in "
        f"a callback, or {_ONE}."
    )


def of_metrics(
    whole: Mapping[str, Any], last: Mapping[str, Any]
) -> Iterator[str]:
    """Says what is wrong with metrics that run on from part to part."""
    for name, result in whole.items():
        apart = distance(result, last.get(name))
        if apart:
            yield (
                f"has a metric, '{name.rsplit('.', 1)[0]}', that comes to "
                f"another result in micro-batches{_by(apart)}: each updates it "
                "by itself. Update it with values of rows and not with a mean "
                "over them, or with a number of rows as `sample_weight`; or "
                f"{_ONE}."
            )


def of_replicas(name: str) -> str:
    """Says what is wrong with a metric that replicas cannot add up."""
    return (
        f"has a metric with '{name}', to which it does not only add: what each "
        "replica has is added up, which is not what the whole mini-batch would "
        "give. Pass the metric to `compile`, or train without replicas."
    )


def of_gradients(
    dx: Sequence[Column],
    dw: Sequence[tuple[keras.Variable, Column]],
    parts: Parts,
    num_bytes: int,
    num_places: int,
) -> Iterator[str]:
    """Says what is wrong with gradients that differ.

    `num_places` is how many vectors the largest tensor of the layer has, such
    as rows by positions.
    """
    # Those that are given are around 1: what cancels leaves their rounding.
    most: dict[str, Any] = {"num_bytes": num_bytes}
    noise = CANCELLED[num_bytes] / 10
    worst = max(
        (_input_distance(parts, *column, noise=noise, **most) for column in dx),
        default=0.0,
    )
    if worst:
        yield (
            "has a gradient with respect to its inputs that mixes rows, or "
            "computes with their number: micro-batches have others than the "
            f"whole mini-batch{_by(worst)}. Compute gradients row by row, or "
            f"{_ONE}."
        )
    # What cancels, as an attention's keys' does, is little but rounding: the
    # parts, and the gradients of other weights, show what was added up.
    sizes = [max(map(largest, column)) for _, column in dw]
    least = 1e-2 * max(sizes, default=0.0)
    for (variable, (whole, *others)), size in zip(dw, sizes):
        is_replaced = gradient_sums.is_replaced(variable)
        total = tf.maximum(*others) if is_replaced else tf.add_n(others)
        # A bias's are added one after the other, each sum rounded.
        num_terms = num_places if len(variable.shape) < 2 else 1
        apart = distance(
            whole, total, max(size, least), num_terms=num_terms, **most
        )
        if apart:
            yield (
                f"has a gradient with respect to '{variable.name}' that is not "
                f"the sum over rows{_by(apart)}: micro-batches have others "
                f"than the whole mini-batch. Compute gradients row by row, or "
                f"{_ONE}."
            )
            return


def _input_distance(
    rows: Parts, whole: tf.Tensor, *parts: tf.Tensor, **most: Any
) -> float:
    """Computes how far a gradient is from the parts'.

    What has no rows, such as positions, is used by all: there it is the sum.
    """
    if len({tuple(t.shape) for t in (whole, *parts)}) == 1:
        return distance(whole, tf.add_n(parts), **most)
    return _rows_distance(rows, whole, *parts, **most)


def of_lookups(variable: keras.Variable) -> str:
    """Says what is wrong with slices that are neither of rows nor repeated."""
    return (
        f"looks up '{variable.name}' by indices that follow from several rows, "
        "as those of `tf.unique`, or from the longest one. Optimizers other "
        "than `SGD` see each lookup by itself, and micro-batches have others "
        "than the whole mini-batch. Look up what each row has, at a length "
        f"that does not follow from the rows, or {_ONE}."
    )


def _by(apart: float) -> str:
    """A number, where there is one."""
    if apart == float("inf"):
        return ""
    return f" ({apart:.2g} of its largest)"
