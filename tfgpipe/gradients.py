"""Sums of gradients over micro-batches and over uses of a variable.

A dense sum is a tensor. Sparse gradients are kept apart until the end, by
micro-batch, and then stand one after the other in the order of the rows, as
those of the whole mini-batch would: Keras's optimizers do not merge duplicates.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfgpipe import internals


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


def of_variables(
    cells: Iterable[tuple[str, list[Any], list[list[Any]]]],
) -> dict[int, Any]:
    """The gradient of every variable, by its id.

    A variable that several layers share gets the sum of its uses', on its own
    device, in the order of the layers.

    Args:
        cells: For each cell its device, its variables, and their finished
            sums in each replica.
    """
    uses: dict[int, tuple[Any, list[Any]]] = {}
    for device, variables, sums in cells:
        with tf.device(device):
            totals = [
                in_dtype(joined(total), variable.dtype)
                for total, variable in zip(over_replicas(sums), variables)
            ]
        for variable, total in zip(variables, totals):
            entry = uses.setdefault(id(variable), (variable, []))
            if total is not None:
                entry[1].append(total)
    found = {}
    for key, (variable, totals) in uses.items():
        with tf.device(variable.value.device):
            found[key] = add_uses(totals)
    return found


def over_replicas(sums: list[list[Any]]) -> list[Any]:
    """The sums over the replicas of a cell, in the order of the rows.

    One operation adds up all weights of the cell, on the current device. Sparse
    gradients are collected.

    Args:
        sums: Finished sums, a list a replica.
    """
    if len(sums) == 1:
        return sums[0]
    columns = list(zip(*sums))
    dense = [c for c in columns if isinstance(c[0], tf.Tensor)]
    with tf.name_scope("sum_over_replicas"):
        added = iter(_added(dense))
    return [
        next(added)
        if isinstance(column[0], tf.Tensor)
        else column[0] and {m: s for own in column for m, s in own.items()}
        for column in columns
    ]


def _added(columns: list[tuple[tf.Tensor, ...]]) -> list[tf.Tensor]:
    """The sum of each tuple of tensors, all in one operation."""
    if not columns or tf.executing_eagerly():
        return [_in_order(*column) for column in columns]
    count = len(columns[0])
    flat = [t for column in columns for t in column]

    def add(*tensors: tf.Tensor) -> list[tf.Tensor]:
        starts = range(0, len(tensors), count)
        return [_in_order(*tensors[i : i + count]) for i in starts]

    return _as_written(add, flat)


def in_dtype(gradient: Any, dtype: str | None) -> Any:
    """A dense gradient in another dtype; None for as it is."""
    if dtype is None or not isinstance(gradient, tf.Tensor):
        return gradient
    return tf.cast(gradient, dtype)


def add_uses(totals: list[Any]) -> Any:
    """The sum over the layers that use a variable, None for none."""
    if not totals:
        return None
    if all(isinstance(t, tf.IndexedSlices) for t in totals):
        return joined(dict(enumerate(totals)))
    dense = [tf.convert_to_tensor(total) for total in totals]
    if len(dense) < 3 or tf.executing_eagerly():
        return _in_order(*dense)
    return _as_written(_in_order, dense)[0]


def _as_written(function: Callable, tensors: list[tf.Tensor]) -> list[Any]:
    """Calls a function whose sums TensorFlow must not regroup."""
    traced = tf.function(
        function,
        autograph=False,
        experimental_attributes={"_noinline": True},
    ).get_concrete_function(*(tf.TensorSpec(t.shape, t.dtype) for t in tensors))
    return internals.Call(traced, as_written=True)(tensors)


def _in_order(*tensors: tf.Tensor) -> tf.Tensor:
    return functools.reduce(operator.add, tensors)
