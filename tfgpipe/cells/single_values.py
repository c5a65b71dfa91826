"""Warns of batch normalisations that normalise one value by itself.

Where a micro-batch has one row, and each row one value of a channel, the
variance is 0: the output is `beta` whatever the input, and no gradient goes
back. Plain Keras does that, too, with one row; but here the rows are those of a
micro-batch, not those that the user sees. How many values there are is often
known only when a step runs; then the step itself warns.

Limits: masks are not looked at, nor axes whose length is unknown while tracing.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells.micro_batch import MicroBatches

_warned: weakref.WeakSet[keras.layers.Layer] = weakref.WeakSet()


def count_of_few(layer: Any, inputs: tf.Tensor) -> tf.Tensor | None:
    """How many values of each channel there are, or None if surely several.

    Args:
        layer: A batch normalisation.
        inputs: What it is called on.
    """
    channels = layer.axis % inputs.shape.rank
    rows, *others = [n for i, n in enumerate(inputs.shape) if i != channels]
    if rows not in (None, 1) or any(n != 1 for n in others):
        return None
    return tf.shape(inputs)[0]


class SingleValues:
    """Finds batch normalisations of single values in one mini-batch.

    Args:
        micro_batches: How the rows fall into micro-batches.
    """

    def __init__(self, micro_batches: MicroBatches):
        self._micro_batches = micro_batches
        self._layers: list[Any] = []
        self._found: list[tf.Tensor] = []

    def look(
        self, layer: Any, counts: list[list[Any]], groups: Sequence[list[int]]
    ) -> None:
        """Looks at a layer.

        Args:
            layer: A batch normalisation.
            counts: For each micro-batch what `count_of_few` returned, call by
                call.
            groups: The micro-batches that it takes moments of together.
        """
        select = self._micro_batches.select
        found = []
        for own in groups:
            for call in zip(*(counts[m] for m in own)):
                if None not in call:
                    here = [select(m, n, 0) for m, n in zip(own, call)]
                    found.append(tf.equal(tf.add_n(here), 1))
        if found and self._micro_batches.count > 1 and layer not in _warned:
            self._layers.append(layer)
            self._found.append(tf.reduce_any(tf.stack(found)))

    def warn(self) -> None:
        """Warns of what was found, of each layer once."""
        if not self._layers:
            return
        rows = self._micro_batches.num_rows
        with tf.device(None):  # Python runs here
            values = [tf.stack(self._found), tf.convert_to_tensor(rows)]
            op = tf.numpy_function(self._warn, values, [])
            internals.run_independently(op)

    def _warn(self, found: Any, rows: Any) -> None:
        if rows == 1:  # as in plain Keras
            return
        count = min(rows, self._micro_batches.count)
        for layer, is_single in zip(self._layers, found):
            if is_single and layer not in _warned:
                _warned.add(layer)
                warnings.warn(
                    f"Layer '{layer.name}' normalises single values: a mini-"
                    f"batch of {rows} rows in {count} micro-batches has "
                    "micro-batches of one row. Its output for them is `beta`, "
                    "whatever its input, and they do not train the layers "
                    "before it. Pass a smaller `num_micro_batches`, or make "
                    "mini-batches larger, of at least two rows a micro-batch; "
                    "if only the last one of an epoch is smaller, drop it.",
                    stacklevel=1,
                )
