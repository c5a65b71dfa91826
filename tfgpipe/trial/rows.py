"""The rows on which layers are tried: real ones, or drawn ones.

    whole   rows 0 1 2 3 4      as plain Keras has a mini-batch
    parts   rows 0 1 | 2 3 4    as a pipeline has its micro-batches

The parts differ in size, so that a mean of means is no mean. What a layer does
with more rows shows when it has them: as many as a mini-batch, beside those of
its first micro-batch and all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from keras import tree

from tfgpipe.internals import Nest


class Parts(NamedTuple):
    """How many rows each part has."""

    first: int
    other: int

    @property
    def total(self) -> int:
        """The number of rows of both parts together."""
        return self.first + self.other

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """Of all rows those that each run has: all, and each part."""
        end = self.total
        return slice(0, end), slice(0, self.first), slice(self.first, end)


FEW = Parts(2, 3)

# As many as a mini-batch may have, where that is not known.
MANY = Parts(1, 31)

# Of axes whose size is not known: even, odd, single, long.
LENGTHS = (8, 7, 1, 130)


def drawn(
    specs: Nest, length: int, limit: int, seed: int = 0, parts: Parts = FEW
) -> list[Nest]:
    """Three drawn nests of tensors: all rows, the first ones, and the others.

    `specs` is a nest of what has a shape (rows, ...) and a dtype, with None as
    a leaf; sizes that are not known are `length`. Integers are from 0 to below
    `limit`. With seed 0, numbers are around 0; with another, from 0 to 1.
    """
    count = parts.total

    def one(spec: Nest) -> tf.Tensor | None:
        if spec is None:
            return None
        sizes = [size or length for size in tuple(spec.shape)[1:]]
        dtype = tf.as_dtype(spec.dtype)
        shape = (count, *sizes)
        values = tf.random.stateless_normal(shape, (len(sizes), 7 + seed))
        if dtype == tf.bool:
            return values > 0
        if dtype.is_integer:  # such as the index of a word
            whole = tf.random.stateless_uniform(
                shape, (len(sizes), 5 + seed), 0, limit, tf.int32
            )
            return tf.cast(whole, dtype)
        if seed:  # such as pixels
            return tf.cast(tf.math.sigmoid(values), dtype)
        # A maximum over all rows is none of the first ones.
        rising = tf.linspace(-3.0, 3.0, count)
        values += tf.reshape(rising, (-1, *[1 for _ in sizes]))
        return tf.cast(values, dtype)

    return with_parts(tree.map_structure(one, specs), parts)


def num_rows(data: Nest) -> int:
    """Rows of a nest of arrays; 0 if it is something else."""
    flat = [leaf for leaf in tree.flatten(data) if leaf is not None]
    is_array = all(hasattr(leaf, "shape") for leaf in flat)
    if not flat or not is_array or any(tf.is_symbolic_tensor(t) for t in flat):
        return 0
    return min(leaf.shape[0] if len(leaf.shape) else 0 for leaf in flat)


def first_rows(data: Nest, count: int) -> Any:
    """The first rows of a nest of arrays, as tensors; nothing of 0 rows."""
    return count and tree.map_structure(
        lambda t: None if t is None else tf.convert_to_tensor(t[:count]), data
    )


def are_like(nest: Nest, specs: Nest) -> bool:
    """Returns whether tensors have the structure, dtypes and sizes of specs."""
    given, wanted = (dict(tree.flatten_with_path(t)) for t in (nest, specs))
    return given.keys() == wanted.keys() and all(
        t is spec
        if t is None or spec is None
        else t.dtype == tf.as_dtype(spec.dtype)
        and tf.TensorShape(spec.shape)[1:].is_compatible_with(t.shape[1:])
        for t, spec in ((given[path], wanted[path]) for path in given)
    )


def with_parts(whole: Any, parts: Parts) -> list[Nest]:
    """A nest of tensors with a row each, and its parts."""

    def rows_of(rows: slice) -> Any:
        return tree.map_structure(
            lambda t: None if t is None else t[rows], whole
        )

    return [rows_of(rows) for rows in parts.slices]


NONE, UNCLEAR = -1, -2


def row_axis(tensors: Sequence[Any], parts: Parts) -> int:
    """Returns along which axis a tensor has the rows.

    `tensors` are what has a shape: of all rows, and of each part. `NONE` if all
    shapes are the same; `UNCLEAR` if there are several elements for each row,
    or sizes that follow from the rows otherwise.
    """
    shapes = [tuple(t.shape) for t in tensors]
    if len({*map(len, shapes)}) > 1:
        return UNCLEAR
    differ = [
        axis for axis, sizes in enumerate(zip(*shapes)) if len({*sizes}) > 1
    ]
    if not differ:
        return NONE
    axis, *others = differ
    is_rows = [shape[axis] for shape in shapes] == [parts.total, *parts]
    return axis if is_rows and not others else UNCLEAR


def of_each(
    value: tf.Tensor, column: Sequence[Any], parts: Parts
) -> list[tf.Tensor] | None:
    """Returns what all rows and each part have of a tensor of all rows.

    `column` is of such a tensor and of each part. None if it is not known: what
    has several elements for each row has the first row's first. Where parts
    have made other sizes, they get the rows of the whole all the same.
    """
    axis = row_axis(column, parts)
    if axis == NONE:
        return [value] * 3
    if axis >= 0:
        return [
            tf.gather(value, tf.range(rows.start, rows.stop), axis=axis)
            for rows in parts.slices
        ]
    times, rest = divmod(value.shape[0], parts.total) if value.shape else (0, 0)
    if rest or not times:
        return None
    return [value[times * s.start : times * s.stop] for s in parts.slices]
