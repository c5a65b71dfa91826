"""The backward pass of a cell, added to the graph of its forward pass.

A graph of layers is differentiated layer by layer. TensorFlow adds up the
gradients of a tensor's uses in the order in which it comes to them, from the
end of all layers. So that they are added in the same order wherever a cell
ends, each layer is differentiated by itself:

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
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.boundary import is_continuous
from tfgpipe.failures import check_interruption
from tfgpipe.graphs.bundle import tensors
from tfgpipe.graphs.gradient_sums import (
    Gradient,
    as_merged,
    as_tensor,
    in_order,
    lookups,
)
from tfgpipe.graphs.trace import Traced


@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
    """A cell's graph with the operations that differentiate it.

    Attributes:
        traced: The graph, with the forward pass.
        dy: Gradients of the output tensors, which a function gets; of a
            tensor's shape each, None where there is none.
        dlosses: Those of the losses, scalars, None where there is none.
        dx: Gradients of the input tensors, None where there are none.
        dw: Those of the flat weights.
        repeated: For each of `dw`, and each lookup if it is sparse, whether
            its indices are the same for all micro-batches.
    """

    traced: Traced
    dy: tuple[Any, ...] = ()
    dlosses: tuple[Any, ...] = ()
    dx: tuple[Any, ...] = ()
    dw: tuple[Gradient, ...] = ()
    repeated: tuple[list[bool], ...] = ()

    @property
    def ends(self) -> Any:
        """What is known of the graph, a nest: see `graph_key`."""
        own = {k: v for k, v in vars(self).items() if k != "traced"}
        return self.traced.ends, own

    @property
    def has_dx(self) -> list[bool]:
        """For each input tensor, whether it has a gradient."""
        return [d is not None for d in self.dx]


def without_backward(traced: Traced) -> Backward:
    """A cell that is never differentiated."""
    inputs = traced.inputs
    num_weights = len(inputs.sources(with_inputs=False))
    return Backward(
        traced,
        dy=(None,) * len(traced.outputs.tensors),
        dx=(None,) * len(inputs.inputs.tensors),
        dw=(Gradient(),) * num_weights,
        repeated=([],) * num_weights,
    )


def add_backward(
    traced: Traced, has_gradient: Sequence[bool], has_losses: Sequence[bool]
) -> Backward:
    """Adds the backward pass to a graph, which must have none yet.

    It is told of each output tensor, and of each loss, whether it will have a
    gradient.
    """
    outputs = traced.outputs
    with traced.graph.as_default(), traced.origin.for_xla():
        dy = [
            tf.compat.v1.placeholder(t.dtype, t.shape) if has else None
            for t, has in zip(outputs.tensors, has_gradient)
        ]
        dlosses = [
            tf.compat.v1.placeholder(loss.dtype, loss.shape) if has else None
            for loss, has in zip(outputs.losses, has_losses)
        ]
        dx, dw = _gradients(traced, dy, dlosses)
    made = Backward(traced, tuple(dy), tuple(dlosses), tuple(dx), tuple(dw))
    return dataclasses.replace(made, repeated=tuple(_repeated(made)))


def _gradients(
    traced: Traced, dy: list[Any], dlosses: list[Any]
) -> tuple[Sequence[Any], Sequence[Gradient]]:
    """Gradients with respect to inputs, and to weights."""
    inputs, outputs = traced.inputs, traced.outputs
    pairs = zip([*outputs.tensors, *outputs.losses], [*dy, *dlosses])
    targets = [t for t, d in pairs if d is not None]
    if not targets:
        nothing = without_backward(traced)
        return nothing.dx, nothing.dw
    found = differentiate(
        traced.operations,
        traced.findings.starts,
        targets,
        tensors([*dy, *dlosses]),
        inputs.sources(with_inputs=True),
    )
    _check_gradients(traced)
    iterator = iter(found)
    dx = [
        as_tensor(next(iterator)) if is_continuous(t) else None
        for t in inputs.inputs.tensors
    ]
    origin = traced.origin
    return dx, [
        _of_lookups(d, variable).in_dtype(origin.gradient_dtype)
        for d, variable in zip(iterator, origin.function.flat_weights)
    ]


def _of_lookups(gradient: Any, variable: Any) -> Gradient:
    """What TensorFlow returns as a gradient, its lookups apart."""
    if not isinstance(gradient, tf.IndexedSlices):
        return as_merged(Gradient(gradient), variable)
    found = lookups(gradient)
    slices = {(i, 0): part for i, part in enumerate(found)}
    return as_merged(Gradient(slices=slices), variable)


def _repeated(made: Backward) -> list[list[bool]]:
    """See `Backward.repeated`: what a trial of the layers has found."""
    found = []
    for known, d in zip(made.traced.origin.function.repeated, made.dw):
        if len(known) != len(d.slices):
            known = [bool(known) and all(known)] * len(d.slices)
        found.append(known)
    return found


def _check_gradients(traced: Traced) -> None:
    """Refuses what TensorFlow can differentiate once at a time."""
    new = traced.graph.get_operations()[len(traced.operations) :]
    if any(op.type == "EagerPyFunc" for op in new):
        raise ValueError(
            "Layers must not need the gradient of `tf.py_function`: it is "
            "that of its last call, which another micro-batch may have "
            "made. Received: a layer with such a call, see the warning "
            "above. Use TensorFlow's operations, or `tf.numpy_function` "
            "in a `tf.custom_gradient`."
        )


def differentiate(
    operations: Sequence[tf.Operation],
    starts: Sequence[int],
    targets: Sequence[tf.Tensor],
    output_gradients: Sequence[tf.Tensor],
    sources: Sequence[tf.Tensor],
) -> list[Any]:
    """Adds operations to the current graph that compute gradients.

    `starts` says for each layer how many of the graph's operations come before
    it, and at last, how many before what follows the layers. No source follows
    from another. For each source a tensor, `tf.IndexedSlices`, or None if no
    target depends on it.
    """
    sections = _sections(operations, starts, sources)
    gradients: dict[Any, list[Any]] = defaultdict(list)
    for target, gradient in zip(targets, output_gradients):
        gradients[target.ref()].append(gradient)
    #     before | layer 0 | layer 1 | after
    #        <- dx      <- dx     <- dx    <- dy      each by itself
    #
    # A tensor's gradients are added up in the order of the layers that take
    # it, which no cut into cells changes.
    for section in reversed(sections):
        check_interruption()
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
            # A source, or made by an earlier section.
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
