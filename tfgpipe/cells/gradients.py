"""Sums of gradients over micro-batches and over uses of a variable.

A dense sum is a tensor. A sparse gradient is a list, of a part for each lookup.
Parts whose slices are those of rows, see `sparse.py`, are kept apart until the
end, by micro-batch, and then stand one after the other in the order of the
rows, as those of the whole mini-batch would.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
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
    cells: Iterable[tuple[str, list[Any], list[list[Any]]]],
) -> dict[int, Any]:
    """The gradient of every variable, by its id.

    A variable that several layers share gets the sum of its uses', on its own
    device, in the order of the layers.

    Args:
        cells: For each cell its device, its variables, and each replica's
            finished sums.
    """
    uses: dict[int, tuple[Any, list[Any]]] = {}
    for device, variables, replicas in cells:
        owners = [device] * len(variables)
        if len(replicas) > 1:
            owners = [v.value.device for v in variables]
        for owner in dict.fromkeys(owners):
            own = [i for i, name in enumerate(owners) if name == owner]
            with tf.device(owner):
                totals = _over_replicas([[r[i] for i in own] for r in replicas])
                for i, total in zip(own, totals):
                    entry = uses.setdefault(
                        id(variables[i]), (variables[i], [])
                    )
                    if total is not None:
                        dtype = variables[i].dtype
                        entry[1].append(in_dtype(joined(total), dtype))
    found = {}
    for key, (variable, totals) in uses.items():
        with tf.device(variable.value.device):
            found[key] = add_uses(totals)
    return found


def _over_replicas(replicas: list[list[Any]]) -> list[Any]:
    """The sums over replicas, from the last to the first.

    One operation adds all that are dense. Slices of rows are collected, those
    of repeated indices are added up.

    Args:
        replicas: Each one's finished sums.
    """
    columns = [_of_one_kind(column) for column in zip(*replicas)]
    is_dense = [isinstance(column[0], tf.Tensor) for column in columns]
    totals = iter(
        _sums(
            [column[::-1] for column, dense in zip(columns, is_dense) if dense]
        )
    )
    return [
        next(totals) if dense else column[0] and _merged(column)
        for column, dense in zip(columns, is_dense)
    ]


def _of_one_kind(sums: Sequence[Any]) -> list[Any]:
    """Sums of one variable, dense if any of them is."""
    if len(set(map(is_sparse, sums))) > 1:
        return [dense(total) for total in sums]
    return list(sums)


def _sums(columns: list[list[tf.Tensor]]) -> list[tf.Tensor]:
    """The sum of each column, in order.

    TensorFlow would regroup three tensors and more, and round otherwise each
    time.
    """
    count = len(columns[0]) if columns else 1
    flat = [tensor for column in columns for tensor in column]
    if count == 1:
        return flat

    def add(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return [
            in_order(tensors[i : i + count])
            for i in range(0, len(tensors), count)
        ]

    if tf.executing_eagerly():
        return add(*flat)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in flat]
    traced = tf.function(
        add,
        autograph=False,
        experimental_attributes={"_noinline": True},
    ).get_concrete_function(*specs)
    with tf.name_scope("sum_of_gradients"):
        return internals.Call(traced, as_written=True)(flat)


def _merged(
    sums: list[dict[tuple[int, int], tf.IndexedSlices]],
) -> dict[tuple[int, int], tf.IndexedSlices]:
    """The slices of all replicas; what several have is repeated."""
    merged: dict[tuple[int, int], tf.IndexedSlices] = {}
    for own in reversed(sums):
        for key, part in own.items():
            if key in merged:
                values = part.values + merged[key].values
                part = tf.IndexedSlices(values, part.indices, part.dense_shape)
            merged[key] = part
    return merged


def in_dtype(gradient: Any, dtype: str | None) -> Any:
    """A dense gradient in another dtype; None for as it is."""
    if dtype is None or not isinstance(gradient, tf.Tensor):
        return gradient
    return tf.cast(gradient, dtype)


def add_uses(totals: list[Any]) -> Any:
    """The sum over the layers that use a variable, None for none."""
    if not totals:
        return None
    if _all_sparse(totals):
        return in_order(totals)
    tensors = [tf.convert_to_tensor(total) for total in totals]
    return _sums([tensors])[0]


def in_order(gradients: Sequence[Any]) -> Any:
    """The sum of one or more gradients, in order; sparse ones stay sparse."""
    if _all_sparse(gradients):
        return joined(dict(enumerate(gradients)))
    return functools.reduce(
        operator.add, [tf.convert_to_tensor(g) for g in gradients]
    )


def _all_sparse(gradients: Sequence[Any]) -> bool:
    return all(isinstance(g, tf.IndexedSlices) for g in gradients)
