"""Gradients of weights: sums over micro-batches and over uses of a variable.

From the task of a cell to the optimizer a gradient has one type, `Gradient`:
dense, or sparse. A sparse one has `tf.IndexedSlices` for each lookup i of the
weight. Those whose slices are those of rows, see `trial/`, are kept apart
until the end, by micro-batch m, and then stand one after the other in the order
of the rows, as the whole mini-batch's would:

    micro-batch 0   {(0, 0): slices of its rows, (1, 0): slices of positions}
    micro-batch 1   {(0, 1): slices of its rows, (1, 0): slices of positions}
    sum             {(0, 0): ..., (0, 1): ...,   (1, 0): added up}
    finished        tf.IndexedSlices, of (0, 0), (0, 1), (1, 0)

A mini-batch has each index of `tf.unique` once: slices of the same index are
added up in the end.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe import internals


class Piece(NamedTuple):
    """Some columns of a weight: what one of several devices has of it.

    Attributes:
        axis: The axis along which they are consecutive, from 0.
        start: The first column.
        stop: Behind the last one.
    """

    axis: int
    start: int
    stop: int

    def columns_of(self, value: tf.Tensor) -> tf.Tensor:
        """Returns these columns of a whole value."""
        whole = (slice(None),) * self.axis
        return value[(*whole, slice(self.start, self.stop))]

    def in_whole(self, value: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """Returns a whole that has these columns, and is 0 elsewhere."""
        sides = [(0, 0)] * len(shape)
        sides[self.axis] = (self.start, shape[self.axis] - self.stop)
        return tf.pad(value, sides)

    def shape(self, shape: Sequence[int]) -> list[int]:
        """Returns their shape, from the shape of the whole."""
        sizes = [*shape]
        sizes[self.axis] = self.stop - self.start
        return sizes


def pieces_of(axis: int, size: int, count: int) -> list[Piece]:
    """Returns as many pieces of about equal sizes.

    Example:

    >>> [(piece.start, piece.stop) for piece in pieces_of(1, 5, 2)]
    [(0, 2), (2, 5)]
    """
    ends = [size * i // count for i in range(count + 1)]
    return [Piece(axis, a, b) for a, b in itertools.pairwise(ends)]


class Indices(enum.IntEnum):
    """How the indices of a lookup differ between micro-batches."""

    OF_ROWS = 0  # each looks up for its rows
    REPEATED = 1  # all have the same
    DISTINCT = 2  # each has some, and none twice


class Gradient(NamedTuple):
    """The gradient of a weight, by one micro-batch or the sum of several.

    Where both attributes are empty, nothing depends on the weight.

    Attributes:
        dense: Tensor of the weight's shape, or None.
        slices: By lookup and micro-batch (i, m) `tf.IndexedSlices` of values
            of shape (slices, ...), as the weight has except its first axis.
            For lookups with the same indices in all micro-batches, m is 0.
            Those with distinct ones are (i, m, `Indices.DISTINCT`).
    """

    dense: tf.Tensor | None = None
    slices: Mapping[tuple[int, ...], tf.IndexedSlices] = {}

    def of_micro_batch(self, m: int, indices: Sequence[Indices]) -> Gradient:
        """The gradient of micro-batch m, to be added to others'.

        `indices` has an entry for each lookup.
        """
        parts = zip(self.slices.values(), indices, strict=True)
        slices: dict[tuple[int, ...], tf.IndexedSlices] = {}
        for i, (part, kind) in enumerate(parts):
            if kind == Indices.DISTINCT:
                slices[i, m, kind] = part
            else:
                slices[i, 0 if kind == Indices.REPEATED else m] = part
        return self._replace(slices=slices)

    def plus(self, other: Gradient) -> Gradient:
        """The sum; dense if one of the two is."""
        if self.dense is not None and other.dense is not None:
            is_maximum = isinstance(self, Replacement)
            add = tf.maximum if is_maximum else operator.add
            return self._replace(dense=add(self.dense, other.dense))
        if self.dense is not None and other.slices:
            return self.plus(other.as_dense())
        if self.slices and other.dense is not None:
            return self.as_dense().plus(other)
        merged = dict(self.slices)
        for key, part in other.slices.items():
            if key in merged:
                # Never broadcast: a length that varies must be an error.
                values = tf.add_n([merged[key].values, part.values])
                part = tf.IndexedSlices(values, part.indices, part.dense_shape)
            merged[key] = part
        dense = other.dense if self.dense is None else self.dense
        return self._replace(dense=dense, slices=merged)

    def as_dense(self) -> Gradient:
        """The same with no slices."""
        return self._replace(dense=as_tensor(self.finished()), slices={})

    def finished(self) -> Any:
        """As an optimizer takes it: a tensor, `tf.IndexedSlices`, or None."""
        if not self.slices:
            return self.dense
        every: list[tf.IndexedSlices] = []
        keys = sorted(self.slices)
        for (_, *kind), group in itertools.groupby(
            keys, lambda key: (key[0], *key[2:])
        ):
            parts = [self.slices[key] for key in group]
            every += [_merged(parts)] if kind and len(parts) > 1 else parts
        return _joined(every)


class Replacement(Gradient):
    """What a weight with `overwrite_with_gradient` becomes, as float8 scales.

    As Keras does where it accumulates gradients, the maximum over micro-batches
    is taken: of the largest numbers of each, that is the one of all.
    """


def is_replaced(variable: keras.Variable) -> bool:
    """Returns whether its gradient is what a weight becomes."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def of_tape(
    gradient: tf.Tensor | tf.IndexedSlices | None,
    variable: keras.Variable,
    dtype: str | None,
) -> Gradient:
    """Returns a tape's gradient of a variable, in a dtype if it is dense."""
    if is_replaced(variable):
        return Replacement(as_tensor(gradient))
    if isinstance(gradient, tf.IndexedSlices):
        parts = enumerate(_lookups(gradient))
        return Gradient(slices={(i, 0): part for i, part in parts})
    if gradient is None or dtype is None:
        return Gradient(gradient)
    return Gradient(tf.cast(gradient, dtype))


def _lookups(gradient: tf.IndexedSlices) -> list[tf.IndexedSlices]:
    """The gradients of the single lookups, which TensorFlow has joined."""
    values, indices = gradient.values.op, gradient.indices.op
    joins = values.type == indices.type == "ConcatV2"
    if not joins or len(values.inputs) != len(indices.inputs):
        return [gradient]
    *pairs, _ = zip(values.inputs, indices.inputs)  # the last is the axis
    return [
        part
        for value, index in pairs
        for part in _lookups(
            tf.IndexedSlices(value, index, gradient.dense_shape)
        )
    ]


def is_continuous(tensor: tf.Tensor) -> bool:
    """Returns whether something is a tensor that may have a gradient."""
    return tensor is not None and (
        tensor.dtype.is_floating or tensor.dtype.is_complex
    )


def as_tensor(gradient: Any) -> tf.Tensor | None:
    """A tensor or `tf.IndexedSlices` as a tensor; None as None."""
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _joined(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """The slices of one, and then of the other."""
    if len(slices) == 1:
        return slices[0]
    indices = [s.indices for s in slices]
    if len({t.dtype for t in indices}) > 1:  # int32 ids, int64 positions
        indices = [tf.cast(t, tf.int64) for t in indices]
    return tf.IndexedSlices(
        tf.concat([s.values for s in slices], 0),
        tf.concat(indices, 0),
        slices[0].dense_shape,
    )


def _merged(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """The sums of the slices of each index."""
    joined = _joined(slices)
    indices, places = tf.unique(joined.indices)
    values = tf.math.unsorted_segment_sum(
        joined.values, places, tf.size(indices)
    )
    return tf.IndexedSlices(values, indices, joined.dense_shape)


def are_distinct(indices: tf.Tensor) -> bool:
    """Returns whether the graph shows that no index is there twice."""
    while indices.op.type in ("Cast", "Identity", "Reshape", "SelectV2"):
        # `keras.ops.take` counts those below 0 from the end: the last choice is
        # that they are not.
        is_choice = indices.op.type == "SelectV2"
        indices = indices.op.inputs[2 if is_choice else 0]
    is_unique = indices.op.type in ("Unique", "UniqueV2")
    return is_unique and indices is indices.op.outputs[0]


def in_order(gradients: Sequence[Any]) -> Any:
    """The sum of one or more gradients, in order; sparse ones stay sparse."""
    if _all_sparse(gradients):
        return _joined(gradients)
    return functools.reduce(
        operator.add, [tf.convert_to_tensor(g) for g in gradients]
    )


def _all_sparse(gradients: Sequence[Any]) -> bool:
    return all(isinstance(g, tf.IndexedSlices) for g in gradients)


# ------------------------------------------------------ from tasks to variables
def of_variables(
    cells: Iterable[tuple[str, list[Any], list[list[Gradient]]]],
) -> dict[int, Any]:
    """The gradient of every variable, by its id, as optimizers take it.

    A variable that several layers share gets the sum of its uses', on its own
    device, in the order of the layers. Those of pieces are joined first. Each
    cell comes as its device, its uses, and the sums of each replica.
    """
    by_variable: dict[int, tuple[Any, list[Any]]] = {}
    for device, uses, replicas in cells:
        owners = [device] * len(uses)
        if len(replicas) > 1:
            owners = [use.variable.value.device for use in uses]
        for owner in dict.fromkeys(owners):
            here = [i for i, name in enumerate(owners) if name == owner]
            with tf.device(owner):
                sums = [[r[i] for i in here] for r in replicas]
                for i, total in zip(here, _over_replicas(sums)):
                    variable = uses[i].variable
                    _, known = by_variable.setdefault(
                        id(variable), (variable, [])
                    )
                    gradient = total.finished()
                    if _is_dense_sum(total):
                        gradient = tf.cast(gradient, variable.dtype)
                    if gradient is not None:
                        known.append((uses[i].piece, gradient))
    gradients = {}
    for key, (variable, known) in by_variable.items():
        with tf.device(variable.value.device):
            gradients[key] = add_uses(_whole(known, variable))
    return gradients


def _whole(
    uses: Sequence[tuple[Any, Any]], variable: keras.Variable
) -> list[Any]:
    """The gradients of uses, where some are of pieces, one after the other.

    Pieces that are not all there, in order, are each put into a whole.
    """
    gradients: list[Any] = []
    run: list[tuple[Piece, Any]] = []
    for piece, gradient in uses:
        if piece is None:
            gradients.append(gradient)
            continue
        run.append((piece, gradient))
        ends = [0, *(before.stop for before, _ in run)]
        is_whole = ends[-1] == variable.shape[piece.axis]
        if is_whole and [one.start for one, _ in run] == ends[:-1]:
            parts = [part for _, part in run]
            gradients.append(_joined_columns(parts, piece.axis, variable))
            run = []
    return gradients + [
        piece.in_whole(tf.convert_to_tensor(part), variable.shape)
        for piece, part in run
    ]


def _joined_columns(
    parts: list[Any], axis: int, variable: keras.Variable
) -> Any:
    """The gradients of all pieces as one; of the same rows, if sparse."""
    if not _all_sparse(parts):
        return tf.concat([tf.convert_to_tensor(part) for part in parts], axis)
    values = tf.concat([part.values for part in parts], axis)
    shape = tf.constant([*variable.shape])
    return tf.IndexedSlices(values, parts[0].indices, shape)


def _over_replicas(replicas: list[list[Gradient]]) -> list[Gradient]:
    """The sums over replicas, from the last to the first.

    One operation adds all that are dense. Slices of rows are collected, those
    of repeated indices are added up. It needs nothing but the last backward
    tasks of one cell, so it is done while earlier cells still drain:

        last cell    B2 B1 B0 s            s: the sum, and then the update
        cell before     B2 B1 B0 s
        first cell         B2 B1 B0 s
    """
    columns = [column[::-1] for column in zip(*replicas)]
    for i, column in enumerate(columns):
        if any(g.dense is not None for g in column):
            columns[i] = tuple(g.as_dense() for g in column)
    dense = [
        [g.dense for g in column]
        for column in columns
        if all(map(_is_dense_sum, column))
    ]
    totals = iter(_sums(dense))
    return [
        Gradient(next(totals))
        if all(map(_is_dense_sum, column))
        else functools.reduce(lambda a, b: a.plus(b), column)
        for column in columns
    ]


def _is_dense_sum(gradient: Gradient) -> bool:
    is_sum = not isinstance(gradient, Replacement)
    return is_sum and gradient.dense is not None


def _sums(columns: list[list[tf.Tensor]]) -> list[tf.Tensor]:
    """The sum of each column, in order.

    TensorFlow would regroup three tensors and more, and round otherwise each
    time.
    """
    # Column after column: [a0, a1, b0, b1] -> [a0 + a1, b0 + b1], of two.
    count = len(columns[0]) if columns else 1
    flat = [tensor for column in columns for tensor in column]
    if count == 1:
        return flat

    def add(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return [
            in_order(tensors[i : i + count])
            for i in range(0, len(tensors), count)
        ]

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in flat]
    traced = tf.function(
        add, autograph=False, experimental_attributes={"_noinline": True}
    ).get_concrete_function(*specs)
    with tf.name_scope("sum_of_gradients"):
        return internals.FunctionCall(traced)(flat)


def add_uses(totals: list[Any]) -> Any:
    """The sum over the layers that use a variable, None for none."""
    if not totals:
        return None
    if _all_sparse(totals):
        return in_order(totals)
    tensors = [tf.convert_to_tensor(total) for total in totals]
    return _sums([tensors])[0]


class GradientSums(NamedTuple):
    """The gradients of a cell's weights, summed so far.

    Attributes:
        dense: Those of `CellFunctions.sums`, packed.
        sparse: For each weight, the slices of its gradient.
    """

    dense: list[tf.Tensor]
    sparse: list[Gradient]
