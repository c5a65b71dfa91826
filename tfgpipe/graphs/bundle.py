r"""Tensors that travel together, as one argument or result of a function.

The function of a task has hundreds of them: weights, what the backward pass
needs, sums of gradients. Each costs time in every call, while TensorFlow makes
the step's graph, prepares it, and runs it. Together they are one tensor, or a
few: a `tf.experimental.Optional`, which refers to them and copies nothing.

    w0, w1, ... w63, w64, ... w99, ids     100 floats of any shape, an integer
     \____________/  \__________/   |
       Optional       Optional      ids    three arguments: two scalars of
                                           dtype variant, and ids itself

Python unpacks them inside the function, where they are tensors again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfgpipe.internals import Nest

# What is known of a micro-batch: values by the references of tensors of the
# model's graph; of a `Bundle`, packed, by the bundle.
Values: TypeAlias = dict[Hashable, Any]

# TensorFlow notes their types with the one, and takes time that grows with the
# square of their number.
_MOST = 64


class Bundle:
    """Some tensors of a graph; a list in the place of one: they are the same.

    With `together`, they are put into one, or few. XLA cannot.

    Attributes:
        slots: The tensors, a list of equal ones each.
        maxima: Of sums, the slots of those that are maxima.
        begins: Of sums, whether what adds to them also begins them: it takes
            one more argument, which says whether there are none so far.
    """

    maxima: Collection[int] = ()
    begins = False

    def __init__(self, tensors: Sequence[Any], together: bool):
        self.slots = [t if isinstance(t, list) else [t] for t in tensors]
        joined = [i for i, t in enumerate(self.tensors) if _may_be_joined(t)]
        if not together or len(joined) < 2:
            joined = []
        self._groups = [
            joined[i : i + _MOST] for i in range(0, len(joined), _MOST)
        ]
        places = set(joined)
        self._alone = [i for i in range(len(self.slots)) if i not in places]

    @property
    def tensors(self) -> list[tf.Tensor]:
        """One tensor of each slot."""
        return [slot[0] for slot in self.slots]

    @property
    def aliases(self) -> list[tf.Tensor]:
        """All tensors of all slots."""
        return [t for slot in self.slots for t in slot]

    @property
    def num_packed(self) -> int:
        """The number of tensors that `pack` returns."""
        return len(self._groups) + len(self._alone)

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """Shapes and dtypes of what `pack` returns."""
        tensors = self.tensors
        return [tf.TensorSpec([], tf.variant)] * len(self._groups) + [
            tf.TensorSpec(tensors[i].shape, tensors[i].dtype)
            for i in self._alone
        ]

    def pack(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Puts a value for each slot together."""
        # a, b, c, d -> (a, c), b, d: the groups, and then those alone.
        if not self._groups:
            return list(values)
        joined = [
            tf.raw_ops.OptionalFromValue(components=[values[i] for i in group])
            for group in self._groups
        ]
        # TensorFlow notes with an Optional the types of all that is in it, see
        # `_MOST`. Behind this operation they are not: `unpack` knows them.
        joined = tf.raw_ops.IdentityN(input=joined)
        return [*joined, *(values[i] for i in self._alone)]

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The values that `pack` was given."""
        found = dict(zip(self._alone, packed[len(self._groups) :]))
        tensors = self.tensors
        for group, one in zip(self._groups, packed):
            values = tf.raw_ops.OptionalGetValue(
                optional=one,
                output_types=[tensors[i].dtype for i in group],
                output_shapes=[tensors[i].shape for i in group],
            )
            found.update(zip(group, values))
        return [found[i] for i in range(len(self.slots))]

    def add(
        self,
        so_far: Sequence[tf.Tensor],
        values: Sequence[tf.Tensor],
        is_first: tf.Tensor | None = None,
    ) -> list[tf.Tensor]:
        """Sums that have grown by a value for each slot.

        If `is_first`, the values themselves, whatever the sums so far are: with
        zeros for those, -0.0 would become 0.0.
        """
        if is_first is not None:
            return [
                tf.raw_ops.SelectV2(condition=is_first, t=value, e=grown)
                for value, grown in zip(values, self.add(so_far, values))
            ]
        return [
            tf.maximum(total, value)
            if i in self.maxima
            else tf.raw_ops.AddV2(x=total, y=value)
            for i, (total, value) in enumerate(zip(so_far, values))
        ]


def as_bundle(one: tf.Tensor | Bundle) -> Bundle:
    """A bundle as it is, a tensor as a bundle of one."""
    return one if isinstance(one, Bundle) else Bundle([one], together=False)


def tensors(nest: Nest) -> list[tf.Tensor]:
    """All tensors of a nest, those in sparse gradients too."""
    flat = tf.nest.flatten(nest, expand_composites=True)
    return [t for t in flat if t is not None]


def by_reference(
    keys: Sequence[Any], values: Sequence[Any]
) -> dict[Hashable, Any]:
    """Values by the references of tensors; None are skipped."""
    return {t.ref(): v for t, v in zip(keys, values) if t is not None}


def _may_be_joined(tensor: tf.Tensor) -> bool:
    # Integers are often in the host's memory: they would be copied.
    dtype = tensor.dtype
    return dtype.is_floating or dtype.is_complex or dtype.is_bool
