"""Sums of gradients over micro-batches and over uses of a variable.

A dense sum is a tensor. A sparse gradient is a list, of a part for each lookup.
Parts whose slices are those of rows, see `sparse.py`, are kept apart until the
end, by micro-batch, and then stand one after the other in the order of the
rows, as those of the whole mini-batch would.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals


def add(
    sums: list[Any],
    gradients: list[Any],
    m: int,
    repeated: Sequence[Sequence[bool]],
) -> list[Any]:
    """Adds a micro-batch's gradients; sparse ones are only collected.

    A gradient that is sparse for some micro-batches alone becomes dense.
    """
    if not sums:
        return collect(sums, gradients, m, repeated)
    pairs = [
        (total, gradient)
        if is_sparse(total) == is_sparse(gradient)
        else (dense(total), dense(gradient))
        for total, gradient in zip(sums, gradients)
    ]
    added = [
        total + gradient if isinstance(gradient, tf.Tensor) else gradient
        for total, gradient in pairs
    ]
    return collect([total for total, _ in pairs], added, m, repeated)


def is_sparse(gradient: Any) -> bool:
    """Whether a gradient or a sum is sparse."""
    return isinstance(gradient, (dict, list))


def dense(gradient: Any) -> tf.Tensor | None:
    """A gradient or a sum as a tensor."""
    if gradient is None:
        return None
    if isinstance(gradient, list):
        gradient = in_order(gradient)
    return tf.convert_to_tensor(joined(gradient))


def collect(
    sums: list[Any],
    found: list[Any],
    m: int,
    repeated: Sequence[Sequence[bool]],
) -> list[Any]:
    """New sums of dense sums that are added up already, and sparse gradients.

    Args:
        sums: The sums so far; empty at first.
        found: The new dense sums, and the micro-batch's sparse gradients.
        m: Index of the micro-batch.
        repeated: For each part of each sparse gradient, whether its indices
            are the same for all micro-batches.
    """
    before = sums or [{}] * len(found)
    return [
        _with_parts(total, new, m, same) if isinstance(new, list) else new
        for total, new, same in zip(before, found, repeated, strict=True)
    ]


def _with_parts(
    total: dict[tuple[int, int], tf.IndexedSlices],
    parts: list[tf.IndexedSlices],
    m: int,
    repeated: Sequence[bool],
) -> dict[tuple[int, int], tf.IndexedSlices]:
    """The slices by part and, unless they are added up, by micro-batch."""
    result = dict(total)
    for i, (part, is_same) in enumerate(zip(parts, repeated, strict=True)):
        key = i, 0 if is_same else m
        if is_same and key in total:
            values = total[key].values + part.values
            part = tf.IndexedSlices(values, part.indices, part.dense_shape)
        result[key] = part
    return result


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
    Slices of rows are collected, those of repeated indices are added up.

    Args:
        sums: For each replica its device, and its finished sums.
    """
    (_, found), *others = reversed(sums)
    adder: Callable | None = None
    for device, own in others:
        with tf.name_scope("sum_over_replicas"), tf.device(device):
            pairs: list[tuple[Any, Any]] = [
                (a, b) if is_sparse(a) == is_sparse(b) else (dense(a), dense(b))
                for a, b in zip(own, found)
            ]
            tensors = [p for p in pairs if isinstance(p[0], tf.Tensor)]
            flat = [t for both in zip(*tensors) for t in both]
            adder = adder or _adder(flat)
            added = iter(adder(flat))
            found = [
                next(added) if isinstance(a, tf.Tensor) else a and _merged(a, b)
                for a, b in pairs
            ]
    return found


def _merged(
    own: dict[tuple[int, int], tf.IndexedSlices],
    others: dict[tuple[int, int], tf.IndexedSlices],
) -> dict[tuple[int, int], tf.IndexedSlices]:
    """The slices of two replicas; what both have is repeated."""
    merged = {**others, **own}
    for key in own.keys() & others.keys():
        values = own[key].values + others[key].values
        merged[key] = tf.IndexedSlices(
            values, own[key].indices, own[key].dense_shape
        )
    return merged


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
    if len(totals) < 3 or tf.executing_eagerly() or _all_sparse(totals):
        return in_order(totals)
    tensors = [tf.convert_to_tensor(total) for total in totals]
    return _as_written(lambda *tensors: in_order(tensors), tensors)(tensors)[0]


def _as_written(function: Callable, tensors: list[tf.Tensor]) -> Callable:
    """A traced function whose sums TensorFlow does not regroup."""
    traced = tf.function(
        function,
        autograph=False,
        experimental_attributes={"_noinline": True},
    ).get_concrete_function(*(tf.TensorSpec(t.shape, t.dtype) for t in tensors))
    return internals.Call(traced, as_written=True)


def in_order(gradients: Sequence[Any]) -> Any:
    """The sum of one or more gradients, in order; sparse ones stay sparse."""
    if _all_sparse(gradients):
        return joined(dict(enumerate(gradients)))
    return functools.reduce(
        operator.add, [tf.convert_to_tensor(g) for g in gradients]
    )


def _all_sparse(gradients: Sequence[Any]) -> bool:
    return all(isinstance(g, tf.IndexedSlices) for g in gradients)
