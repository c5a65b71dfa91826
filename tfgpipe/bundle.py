"""Tensors that travel together, as one argument or result of a function.

The function of a task has hundreds of them: weights, what the backward pass
needs, sums of gradients. Each costs time in every call, while TensorFlow makes
the step's graph, prepares it, and runs it. Together they are one tensor, a
`tf.experimental.Optional`, which refers to them and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class Bundle:
    """Some tensors of a graph.

    Args:
        tensors: The tensors. A list in the place of one: they are the same.
        together: Whether to put them into one. XLA cannot.
    """

    def __init__(self, tensors: Sequence[Any], together: bool):
        self.slots = [t if isinstance(t, list) else [t] for t in tensors]
        joined = [i for i, t in enumerate(self.tensors) if _may_be_joined(t)]
        self._joined = joined if together and len(joined) > 1 else []

    @property
    def tensors(self) -> list[tf.Tensor]:
        """One tensor of each slot."""
        return [slot[0] for slot in self.slots]

    @property
    def aliases(self) -> list[tf.Tensor]:
        """All tensors of all slots."""
        return [t for slot in self.slots for t in slot]

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Shapes and dtypes of what `pack` returns."""
        alone = [tf.TensorSpec(t.shape, t.dtype) for t in self._alone()]
        return [tf.TensorSpec([], tf.variant)] * bool(self._joined) + alone

    def pack(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Puts a value for each slot together."""
        if not self._joined:
            return list(values)
        first = tf.raw_ops.OptionalFromValue(
            components=[values[i] for i in self._joined]
        )
        return [first, *self._alone(values)]

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The values that `pack` was given."""
        if not self._joined:
            return list(packed)
        joined = [self.tensors[i] for i in self._joined]
        first, *alone = packed
        found = iter(
            tf.raw_ops.OptionalGetValue(
                optional=first,
                output_types=[t.dtype for t in joined],
                output_shapes=[t.shape for t in joined],
            )
        )
        others, places = iter(alone), set(self._joined)
        return [
            next(found if i in places else others)
            for i in range(len(self.slots))
        ]

    def _alone(self, values: Sequence[Any] | None = None) -> list[Any]:
        values = self.tensors if values is None else values
        places = set(self._joined)
        return [v for i, v in enumerate(values) if i not in places]


def as_bundle(one: tf.Tensor | Bundle) -> Bundle:
    """A bundle as it is, a tensor as a bundle of one."""
    return one if isinstance(one, Bundle) else Bundle([one], together=False)


def tensors(nest: Any) -> list[tf.Tensor]:
    """All tensors of a nest, those in sparse gradients too."""
    flat = tf.nest.flatten(nest, expand_composites=True)
    return [t for t in flat if t is not None]


def by_reference(keys: Sequence[Any], values: Sequence[Any]) -> dict[Any, Any]:
    """Values by the references of tensors; None are skipped."""
    return {t.ref(): v for t, v in zip(keys, values) if t is not None}


def _may_be_joined(tensor: tf.Tensor) -> bool:
    # Integers are often in the host's memory: they would be copied.
    dtype = tensor.dtype
    return dtype.is_floating or dtype.is_complex or dtype.is_bool
