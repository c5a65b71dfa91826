"""The rows on which layers are tried: real ones, or drawn ones.

    whole   rows 0 1 2 3 4      as plain Keras has a mini-batch
    parts   rows 0 1 | 2 3 4    as a pipeline has its micro-batches

The parts differ in size, so that a mean of means is no mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from tfgpipe.cells import Boundary, structure_of

PARTS = (2, 3)
ROWS = sum(PARTS)
# Of all rows those that each run has.
SLICES = (slice(0, ROWS), slice(0, PARTS[0]), slice(PARTS[0], ROWS))
# Of axes whose size is not known: even, odd, single, long.
LENGTHS = (8, 7, 1, 130)


def has_unknown_sizes(specs: Any) -> bool:
    """Whether an axis other than that of the rows may have any length."""
    flat = [spec for spec in tree.flatten(specs) if spec is not None]
    return any(None in tuple(spec.shape)[1:] for spec in flat)


def drawn(specs: Any, length: int, limit: int, seed: int = 0) -> list[Any]:
    """Drawn rows, as a whole and in parts.

    Args:
        specs: Nest of what has a shape (rows, ...) and a dtype; None as a leaf.
        length: For sizes that are not known.
        limit: Integers are smaller, and at least 0.
        seed: Numbers around 0 are drawn with 0, such from 0 to 1 with another.

    Returns:
        Three nests of tensors: of all rows, of the first ones, of the others.
    """

    def one(spec: Any) -> Any:
        if spec is None:
            return None
        sizes = [size or length for size in tuple(spec.shape)[1:]]
        dtype = tf.as_dtype(spec.dtype)
        if dtype == tf.string:  # the last one is the longest
            texts = [["a " * (row + 1)] for row in range(ROWS)]
            found = tf.repeat(tf.constant(texts), math.prod(sizes), axis=1)
            return tf.reshape(found, (ROWS, *sizes))
        shape = (ROWS, *sizes)
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
        rising = tf.linspace(-3.0, 3.0, ROWS)
        values += tf.reshape(rising, (-1, *[1 for _ in sizes]))
        return tf.cast(values, dtype)

    return with_parts(tree.map_structure(one, specs))


def first_rows(data: Any) -> Any:
    """The first rows of a nest of arrays, or None if there are too few."""
    flat = [leaf for leaf in tree.flatten(data) if leaf is not None]
    is_array = all(hasattr(leaf, "shape") for leaf in flat)
    if not flat or not is_array or any(tf.is_symbolic_tensor(t) for t in flat):
        return None
    if any(len(leaf.shape) == 0 or leaf.shape[0] < ROWS for leaf in flat):
        return None

    return tree.map_structure(
        lambda t: None if t is None else tf.convert_to_tensor(t[:ROWS]), data
    )


def with_parts(whole: Any) -> list[Any]:
    """A nest of tensors with a row each, and its parts."""
    found = [whole]
    for rows in SLICES[1:]:
        own = [
            [None if t is None else t[rows] for t in flat]
            for flat in Boundary.of(whole)
        ]
        found.append(Boundary(*own).nest(structure_of(whole)))
    return found


def have_rows(nest: Any) -> bool:
    """Whether all tensors have a row each of the whole."""
    flat = [t for t in tree.flatten(nest) if t is not None]
    return all(t.shape.rank and t.shape[0] == ROWS for t in flat)


NONE, UNCLEAR = -1, -2


def row_axis(shapes: Sequence[tuple[int, ...]]) -> int:
    """Along which axis a tensor has the rows.

    Args:
        shapes: Of the tensor of all rows, and of those of each part.

    Returns:
        The axis; `NONE` if all have the same; `UNCLEAR` if there are several
        elements for each row, or sizes that follow from the rows otherwise.
    """
    if len({*map(len, shapes)}) > 1:
        return UNCLEAR
    differ = [axis for axis, own in enumerate(zip(*shapes)) if len({*own}) > 1]
    if not differ:
        return NONE
    axis, *others = differ
    is_rows = tuple(shape[axis] for shape in shapes) == (ROWS, *PARTS)
    return axis if is_rows and not others else UNCLEAR


def cotangent(place: int, tensor: Any, axis: int, rows: slice) -> Any:
    """What the gradient of an output begins with: drawn numbers.

    Args:
        place: Of the output, among all.
        tensor: The output, of some rows.
        axis: That of the rows, see `row_axis`.
        rows: Which ones of all.

    Returns:
        A tensor like it, in which a row has the same numbers in each run.
    """
    sizes = [*tensor.shape]
    if axis != NONE:
        sizes[axis] = ROWS
    found = tf.random.stateless_normal(sizes, (place, 3))
    if axis != NONE:
        found = tf.gather(found, tf.range(rows.start, rows.stop), axis=axis)
    return tf.cast(found, tensor.dtype)
