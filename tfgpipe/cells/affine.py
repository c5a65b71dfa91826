"""What an assignment makes of the tensors that it takes, read in the graph.

A random seed moves on by `seed + [0, 1]`, a moving statistic by `old * a +
new * b`. Whether a layer does so is seen in what it assigned: sums, differences
and products with constants are followed back to the tensors in question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpipe import internals

_SAME = {"EnsureShape", "Identity", "StopGradient"}
_PRODUCTS = {"Mul", "MulNoNan"}
_SUMS = {"Add": 1, "AddV2": 1, "Sub": -1}


def factors(tensor: tf.Tensor, sources: Sequence[tf.Tensor]) -> Any:
    """The numbers a and c with tensor = sum of a[i] * sources[i], + c.

    Args:
        tensor: Of a graph.
        sources: Of that graph or of those around it.

    Returns:
        An array of the a[i], and then c; None if it cannot be told.
    """
    places = {source.ref(): i for i, source in enumerate(sources)}
    return _Reader(places).of(tensor)


class _Reader:
    """Reads one formula.

    Args:
        places: By the reference of a source its index.
    """

    def __init__(self, places: dict[Any, int]):
        self._places = places
        self._found: dict[Any, Any] = {}

    def of(self, tensor: tf.Tensor) -> Any:
        """See `factors`."""
        ref = tensor.ref()
        if ref not in self._found:
            self._found[ref] = self._read(tensor)
        return self._found[ref]

    def _read(self, tensor: tf.Tensor) -> Any:
        place = self._places.get(tensor.ref())
        if place is not None:
            return self._unit(place, 1)
        if internals.is_eager(tensor):
            if tensor.dtype == tf.resource:
                return None
            return self._unit(-1, tensor.numpy())
        op = tensor.op
        if op.type == "Const":
            return self._unit(-1, tf.get_static_value(tensor))
        if op.type == "Placeholder":  # of a function inside, or an argument
            for outer, inner in tensor.graph.captures:
                if inner is tensor:
                    return self.of(outer)
            return None
        if op.type in _SAME:
            return self.of(op.inputs[0])
        if op.type == "Cast":
            given = op.inputs[0].dtype
            is_same = given.is_floating == tensor.dtype.is_floating
            return self.of(op.inputs[0]) if is_same else None
        if op.type in _SUMS or op.type in _PRODUCTS:
            a, b = (self.of(t) for t in op.inputs)
            if a is None or b is None:
                return None
            if op.type in _SUMS:
                return [x + _SUMS[op.type] * y for x, y in zip(a, b)]
            if not _is_constant(b):
                a, b = b, a
            return [x * b[-1] for x in a] if _is_constant(b) else None
        return None

    def _unit(self, place: int, value: Any) -> list[Any]:
        """Nothing but one of the numbers."""
        found: list[Any] = [0] * (len(self._places) + 1)
        found[place] = np.asarray(value)
        return found


def _is_constant(numbers: Any) -> bool:
    return not any(np.any(a) for a in numbers[:-1])
