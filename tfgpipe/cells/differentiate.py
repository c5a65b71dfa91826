"""Gradients of a graph of layers, layer by layer.

TensorFlow adds up the gradients of a tensor's uses in the order in which it
comes to them, from the end of all layers. So that they are added in the same
order wherever a cell ends, each layer is differentiated by itself:

    layer 0 -----> layer 1 -----> layer 2      h0, h1: what crosses
       |     h0      ^|      h1      ^
       |             |+--------------+         h1 is used twice in layer 2:
    w: one tensor a layer, shared or not       its two gradients are added

    tf.gradients(layer 2, (h1, its w)), then tf.gradients(layer 1, (h0, its w))

With one call for all layers, the bits of the sum for h1 would depend on what
follows in the same cell, and so on K.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells.gradients import in_order
from tfgpipe.ending import may_end


def differentiate(
    operations: Sequence[tf.Operation],
    starts: Sequence[int],
    targets: Sequence[tf.Tensor],
    output_gradients: Sequence[tf.Tensor],
    sources: Sequence[tf.Tensor],
) -> list[Any]:
    """Adds operations to the current graph that compute gradients.

    Args:
        operations: All of the graph, in order.
        starts: For each layer, how many operations there are before it, and
            at last, how many before what follows the layers.
        targets: What to differentiate.
        output_gradients: A gradient for each target.
        sources: By what to differentiate; no one follows from another.

    Returns:
        For each source, a tensor, `tf.IndexedSlices`, or None if no target
        depends on it.
    """
    sections = _sections(operations, starts, sources)
    gradients: dict[Any, list[Any]] = defaultdict(list)
    for target, gradient in zip(targets, output_gradients):
        gradients[target.ref()].append(gradient)
    for section in reversed(sections):
        may_end()
        taken = list(section.taken.values())
        ys = [t for t in section.made if t.ref() in gradients]
        if not ys or not taken:
            continue
        dys = [in_order(gradients[y.ref()]) for y in ys]
        with internals.differentiating_within(section.names):
            found = tf.gradients(ys, taken, dys, stop_gradients=taken)
        for tensor, gradient in zip(taken, found):
            if gradient is not None:
                gradients[tensor.ref()].append(gradient)
    return [
        in_order(gradients[source.ref()]) if source.ref() in gradients else None
        for source in sources
    ]


class _Section(NamedTuple):
    """Operations one after the other that follow from the sources.

    Attributes:
        names: Their names.
        made: The tensors that they make.
        taken: Those that they take, by reference: sources, and tensors that
            an earlier section makes.
    """

    names: set[str]
    made: list[tf.Tensor]
    taken: dict[Any, tf.Tensor]


def _sections(
    operations: Sequence[tf.Operation],
    starts: Sequence[int],
    sources: Sequence[tf.Tensor],
) -> list[_Section]:
    """What is before the layers, each layer, and what is after them."""
    sections = [_Section(set(), [], {}) for _ in range(len(starts) + 1)]
    section_of: dict[Any, _Section | None] = {s.ref(): None for s in sources}
    for place, op in enumerate(operations):
        inputs = {t.ref(): t for t in op.inputs if t.ref() in section_of}
        if not inputs:
            continue
        section = sections[bisect.bisect_right(starts, place)]
        section.names.add(op.name)
        for ref, tensor in inputs.items():
            if section_of[ref] is not section:
                section.taken[ref] = tensor
        for tensor in op.outputs:
            if _may_have_gradient(tensor.dtype):
                section_of[tensor.ref()] = section
                section.made.append(tensor)
    return sections


def _may_have_gradient(dtype: tf.DType) -> bool:
    # A variant: the list of a loop's tensors.
    return dtype.is_floating or dtype.is_complex or dtype == tf.variant
