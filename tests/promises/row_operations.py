"""Operations on rows: some mix them, and some treat each by itself.

All take a tensor of shape (rows, ..., width) and return one like it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import ops

Operation = Callable[[Any], Any]


def flat(x: Any) -> Any:
    """One vector a row."""
    return tf.reshape(x, (tf.shape(x)[0], -1))


def like(found: Any, x: Any) -> Any:
    return tf.reshape(found, tf.shape(x))


def number(x: Any) -> Any:
    """How many rows there are."""
    return tf.cast(tf.shape(x)[0], x.dtype)


def _compared(x: Any) -> Any:
    """Each row by its likeness to all."""
    rows = flat(x)
    likeness = tf.matmul(rows, rows, transpose_b=True)
    return like(tf.matmul(tf.tanh(likeness), rows), x)


def _of_neighbours(x: Any) -> Any:
    """The largest of two neighbours."""
    rows = flat(x)[None]
    return like(tf.nn.max_pool1d(rows, 2, 1, "SAME")[0], x)


MIXING: dict[str, Operation] = {
    "mean": lambda x: x - ops.mean(x, axis=0, keepdims=True),
    "softmax": lambda x: tf.nn.softmax(x, axis=0),
    "sort": lambda x: ops.sort(x, axis=0),
    "cumsum": lambda x: tf.cumsum(x, axis=0),
    "roll": lambda x: tf.roll(x, 1, 0),
    "flip": lambda x: x + 0.5 * tf.reverse(x, [0]),
    "gather": lambda x: x - 0.5 * tf.gather(x, tf.zeros((1,), "int32")),
    "matmul": _compared,
    "largest": lambda x: x - ops.max(x, axis=0, keepdims=True, initial=-9.0),
    "neighbours": _of_neighbours,
    "number": lambda x: x / (1.0 + number(x)),
    "branch of a mean": lambda x: tf.cond(
        tf.reduce_sum(x) > 0, lambda: 2.0 * x, lambda: tf.tanh(x)
    ),
    "scan": lambda x: tf.scan(lambda a, b: 0.5 * a + b, x),
}
# It takes certain numbers to see that they do.
AT_TIMES = {"branch of a mean"}
APART: dict[str, Operation] = {
    "tanh": tf.tanh,
    "scale": lambda x: 0.5 * x + 0.1,
    "centre": lambda x: x - ops.mean(x, axis=-1, keepdims=True),
    "softmax": lambda x: tf.nn.softmax(x, axis=-1),
    "sort": lambda x: ops.sort(x, axis=-1),
    "cumsum": lambda x: tf.cumsum(x, axis=-1),
    "roll": lambda x: tf.roll(x, 1, -1),
    "flip": lambda x: tf.reverse(x, [-1]),
    "gather": lambda x: x - tf.gather(x, [0], axis=-1),
    "matmul": lambda x: x * tf.reduce_sum(x * x, axis=-1, keepdims=True),
    "merged": lambda x: like(
        tf.nn.softmax(tf.reshape(x, (-1, x.shape[-1]))), x
    ),
    "transposed": lambda x: tf.transpose(tf.tanh(tf.transpose(x))),
    "choice": lambda x: tf.where(x > 0, x, 0.1 * x),
    "row by row": lambda x: tf.map_fn(lambda row: row - row[..., :1], x),
    "one at a time": lambda x: tf.vectorized_map(lambda row: 2.0 * row, x),
    "number and back": lambda x: x * number(x) / tf.maximum(number(x), 1.0),
}


# ------------------------------------------------------- where an operation is
def _in_branch(f: Operation, x: Any) -> Any:
    return tf.cond(tf.shape(x)[0] >= 0, lambda: f(x), lambda: x)


def _in_loop(f: Operation, x: Any) -> Any:
    def body(i: Any, h: Any) -> Any:
        return i + 1, tf.ensure_shape(f(h), x.shape)

    return tf.while_loop(lambda i, h: i < 2, body, (0, x))[1]


def _in_map(f: Operation, x: Any) -> Any:
    """Of each column, with one axis more."""
    columns = tf.stack([x, 2.0 * x])
    return tf.reduce_mean(tf.map_fn(f, columns), axis=0)


def _in_function(f: Operation, x: Any) -> Any:
    return tf.function(f)(x)


def _in_branch_of_loop(f: Operation, x: Any) -> Any:
    return _in_loop(lambda h: _in_branch(f, h), x)


PLACES: dict[str, Callable[[Operation, Any], Any]] = {
    "plain": lambda f, x: f(x),
    "branch": _in_branch,
    "loop": _in_loop,
    "map": _in_map,
    "function": _in_function,
    "branch of a loop": _in_branch_of_loop,
}
