"""Calls a function that TensorFlow's graph optimiser leaves as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import tensors


class AsWritten:
    """Calls a function, which TensorFlow's graph optimiser leaves as it is.

    It would take out tasks whose results are not used. The function is not
    inlined into its caller, which the optimiser does change.

    Args:
        function: Takes tensors in nests, and returns a flat list of tensors;
            it captures none.
    """

    def __init__(self, function: Callable):
        self._function = function
        self._concrete: Any = None

    def __call__(self, *arguments: Any) -> list[tf.Tensor]:
        """Calls the function; traces it in the first call."""
        if self._concrete is None:
            self._concrete = self._made(arguments)
        return self._concrete(*tensors(arguments))

    def _made(self, arguments: Any) -> Any:
        specs = tf.nest.map_structure(
            lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype),
            arguments,
        )
        inner = tf.function(
            self._function,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )
        call = internals.Call(
            inner.get_concrete_function(*specs), as_written=True
        )
        outer = tf.function(lambda *flat: call(list(flat)), autograph=False)
        return outer.get_concrete_function(*tensors(specs))
