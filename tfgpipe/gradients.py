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
    cells: Iterable[tuple[str, list[Any], list[tuple[str, list[Any]]]]],
) -> dict[int, Any]:
    """The gradient of every variable, by its id.

    A variable that several layers share gets the sum of its uses', on its own
    device, in the order of the layers.

    Args:
        cells: For each cell its device, its variables, and for each replica
            its device and finished sums.
    """
    uses: dict[int, tuple[Any, list[Any]]] = {}
    for device, variables, replicas in cells:
        sums = over_replicas(replicas)
        with tf.device(device):
            totals = [
                in_dtype(joined(total), variable.dtype)
                for total, variable in zip(sums, variables)
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


def over_replicas(sums: list[tuple[str, list[Any]]]) -> list[Any]:
    """The sums over the replicas of a cell, on the first one's device.

    The sum goes from the last replica to the first, and each adds its own: a
    device holds no more than two. One operation adds all weights of the cell.
    Sparse gradients are collected, in the order of the rows.

    Args:
        sums: For each replica its device, and its finished sums.
    """
    (_, found), *others = reversed(sums)
    add: Callable | None = None
    for device, own in others:
        is_dense = [isinstance(s, tf.Tensor) for s in own]
        pair = [
            s
            for both in (own, found)
            for s, dense in zip(both, is_dense)
            if dense
        ]
        with tf.name_scope("sum_over_replicas"), tf.device(device):
            add = add or _adder(pair)
            dense = iter(add(pair))
        found = [
            next(dense)
            if isinstance(mine, tf.Tensor)
            else mine and {**mine, **other}
            for mine, other in zip(own, found)
        ]
    return found


def _adder(pair: list[tf.Tensor]) -> Callable:
    """What adds the second half of some tensors to the first."""

    def add(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        half = len(tensors) // 2
        return [a + b for a, b in zip(tensors[:half], tensors[half:])]

    if not pair or tf.executing_eagerly():
        return add
    return _as_written(lambda *tensors: add(list(tensors)), pair)


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
    return _as_written(_in_order, dense)(dense)[0]


def _as_written(function: Callable, tensors: list[tf.Tensor]) -> Callable:
    """A traced function whose sums TensorFlow does not regroup."""
    traced = tf.function(
        function,
        autograph=False,
        experimental_attributes={"_noinline": True},
    ).get_concrete_function(*(tf.TensorSpec(t.shape, t.dtype) for t in tensors))
    return internals.Call(traced, as_written=True)


def _in_order(*tensors: tf.Tensor) -> tf.Tensor:
    return functools.reduce(operator.add, tensors)
