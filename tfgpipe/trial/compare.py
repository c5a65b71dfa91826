"""Differences between a batch and its parts, in words.

outputs      the parts' outputs, one after the other
losses       of the parts, the mean by rows
state        the mean by rows, or else the first part's, see
`state/rules.py`
metrics      run on from part to part
gradients    with respect to inputs one after the other, to weights the sum
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe.graphs import as_tensor, gradient_sums, is_continuous
from tfgpipe.trial.distance import (
    CANCELLED,
    distance,
    largest,
    rounding_of,
)
from tfgpipe.trial.rows import NONE, UNCLEAR, row_axis

_ONE = "pass num_micro_batches=1"

_REGULARIZER = (
    "Keras divides what an `activity_regularizer` returns, which must be a sum"
)


class Outcome(NamedTuple):
    """The results of a unit for some rows.

    Attributes:
        tensors: What it gives.
        inputs: What it has taken.
        losses: What it gave `add_loss`, summed as Keras does.
        state: The new values of what was assigned, by ids.
        dx: Gradients with respect to what it takes.
        dw: Of its weights: the variable, and its gradient.
        rows: Which ones of all rows it has.
        total: How many rows there are of all.
        num_bytes: Of the numbers that it computes in.
    """

    tensors: list[Any]
    inputs: list[Any]
    losses: list[Any]
    state: Mapping[int, tuple[keras.Variable, Any]]
    dx: list[Any]
    dw: Mapping[Hashable, tuple[keras.Variable, Any]]
    rows: slice
    total: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return int(self.rows.stop - self.rows.start)

    @property
    def share(self) -> float:
        """The share that these rows are of all rows, from 0 to 1."""
        return self.num_rows / self.total


def output_distance(whole: Outcome, parts: Sequence[Outcome]) -> float:
    """How far outputs are apart."""
    runs = whole, *parts
    flat = [run.tensors for run in runs]
    counts = [run.num_rows for run in runs]
    # What cancels leaves the rounding of what was taken.
    given = [t for t in whole.inputs if is_continuous(t)]
    noise = max((_rounding(t) for t in given), default=0.0)
    most = {"noise": noise, "num_bytes": whole.num_bytes}
    distances = (_rows_distance(counts, *t, **most) for t in zip(*flat))
    return max(distances, default=0.0)


def is_clearly_apart(
    counts: Sequence[int], values: Sequence[Any], num_bytes: int
) -> bool:
    """Returns whether a tensor has its rows in order, and parts have others."""
    axis = row_axis([tuple(t.shape) for t in values], counts)
    if axis == UNCLEAR:
        return False
    return _rows_distance(counts, *values, num_bytes=num_bytes) > 0


def of_indices(whole: Any, parts: Sequence[Any]) -> tuple[bool, bool]:
    """Returns whether indices are of rows, and whether parts have them all."""
    flat = [tf.reshape(t, (-1,)) for t in parts]
    whole = tf.reshape(whole, (-1,))
    is_of_rows = not distance(whole, tf.concat(flat, 0))
    return is_of_rows, not any(distance(whole, part) for part in flat)


def _rounding(tensor: Any) -> float:
    """By how much numbers of this size may be off."""
    return largest(tensor) * CANCELLED[tensor.dtype.real_dtype.size]


def _rows_distance(
    counts: Sequence[int], whole: Any, *parts: Any, **most: Any
) -> float:
    """Computes how far a tensor is from the parts', side by side."""
    missing = [t is None for t in (whole, *parts)]
    if any(missing):
        return 0.0 if all(missing) else float("inf")
    axis = row_axis([tuple(t.shape) for t in (whole, *parts)], counts)
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


def by_rows(values: Sequence[Any], parts: Sequence[Outcome]) -> Any:
    """The mean of two parts' values, by their rows."""
    return sum(
        v * tf.constant(part.share, v.dtype) for v, part in zip(values, parts)
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


def of_losses(whole: Outcome, parts: Sequence[Outcome]) -> Iterator[str]:
    """Says what is wrong with losses that differ."""
    if any(len(part.losses) != len(whole.losses) for part in parts):
        yield (
            "gives `add_loss` other losses for other numbers of rows. With "
            f"several micro-batches they must be the same. Give one, or {_ONE}."
        )
        return
    for loss, *losses in zip(whole.losses, *(p.losses for p in parts)):
        most = {"num_bytes": whole.num_bytes}
        apart = distance(loss, by_rows(losses, parts), **most)
        if not apart:
            continue
        means = [n * part.num_rows for n, part in zip(losses, parts)]
        if not distance(loss, tf.add_n(losses), **most):
            what = "a sum over rows"
            wrong = "comes out that many times too small"
            cure = "Divide it by their number"
        elif not distance(loss * whole.num_rows, by_rows(means, parts), **most):
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
    whole: tf.Tensor,
    inputs: Sequence[tf.Tensor],
    parts: Sequence[Outcome],
) -> Iterator[str]:
    """Says what is wrong with state that differs."""
    values = [part.state.get(id(variable), (None, None))[1] for part in parts]
    is_mean = is_continuous(whole) and not variable.trainable
    if any(value is None for value in values):
        apart = float("inf")
    else:
        expected = by_rows(values, parts) if is_mean else values[0]
        noise = rounding_of(inputs)  # of means that are zero but for it
        num_bytes = parts[0].num_bytes
        apart = distance(whole, expected, noise=noise, num_bytes=num_bytes)
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


def of_gradients(whole: Outcome, parts: Sequence[Outcome]) -> Iterator[str]:
    """Says what is wrong with gradients that differ."""
    columns = zip(whole.dx, *(part.dx for part in parts))
    counts = [run.num_rows for run in (whole, *parts)]
    # Those that are given are around 1: what cancels leaves their rounding.
    most = {"num_bytes": whole.num_bytes}
    noise = CANCELLED[whole.num_bytes] / 10
    distances = [
        _input_distance(counts, *map(as_tensor, column), noise=noise, **most)
        for column in columns
    ]
    worst = max(distances, default=0.0)
    if worst:
        yield (
            "has a gradient with respect to its inputs that mixes rows, or "
            "computes with their number: micro-batches have others than the "
            f"whole mini-batch{_by(worst)}. Compute gradients row by row, or "
            f"{_ONE}."
        )
    # What cancels, as an attention's keys' does, is little but rounding: the
    # parts, and the gradients of other weights, show what was added up.
    sizes = {
        key: max(largest(run.dw[key][1]) for run in (whole, *parts))
        for key in whole.dw
    }
    least = 1e-2 * max(sizes.values(), default=0.0)
    for key, (variable, d) in whole.dw.items():
        total = [as_tensor(part.dw[key][1]) for part in parts]
        if all(t is None for t in total):
            apart = 0.0 if d is None else float("inf")
        else:
            there = [t for t in total if t is not None]
            added = _sum_of(variable, there)
            # A bias's are added one after the other, each sum rounded.
            is_bias = len(variable.shape) < 2
            most["num_terms"] = _num_places(whole) if is_bias else 1
            size = max(sizes[key], least)
            apart = distance(as_tensor(d), added, size, **most)
        if apart:
            yield (
                f"has a gradient with respect to '{variable.name}' that is not "
                f"the sum over rows{_by(apart)}: micro-batches have others "
                f"than the whole mini-batch. Compute gradients row by row, or "
                f"{_ONE}."
            )
            return


def _num_places(made: Outcome) -> int:
    """How many vectors the largest tensor has, such as rows by positions."""
    tensors = [t for t in (*made.inputs, *made.tensors) if t is not None]
    return max((math.prod(t.shape[:-1]) for t in tensors), default=1)


def _sum_of(variable: keras.Variable, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds up the gradients of micro-batches, see `of_variables`."""
    if gradient_sums.is_replaced(variable):
        return functools.reduce(tf.maximum, parts)
    return tf.add_n(parts)


def _input_distance(
    counts: Sequence[int], whole: Any, *parts: Any, **most: Any
) -> float:
    """Computes how far a gradient is from the parts'.

    What has no rows, such as positions, is used by all: there it is the sum.
    """
    there = [p for p in parts if p is not None]
    if whole is not None and len(there) == len(parts):
        shapes = {tuple(t.shape) for t in (whole, *parts)}
        if len(shapes) == 1:
            return distance(whole, tf.add_n(there), **most)
    return _rows_distance(counts, whole, *parts, **most)


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
