"""The backward pass of a cell, added to the graph of its forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells.bundle import tensors
from tfgpipe.cells.differentiate import differentiate
from tfgpipe.cells.gradients import Gradient, as_merged, as_tensor, lookups
from tfgpipe.cells.trace import Traced
from tfgpipe.cells.values import is_continuous


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

    Args:
        traced: The graph.
        has_gradient: For each output tensor, whether it will have a gradient.
        has_losses: For each loss, whether it will.
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
        of_lookups(d, variable).in_dtype(origin.gradient_dtype)
        for d, variable in zip(iterator, origin.function.flat_weights)
    ]


def of_lookups(gradient: Any, variable: Any) -> Gradient:
    """What TensorFlow returns as a gradient, its lookups apart.

    Args:
        gradient: A tensor, `tf.IndexedSlices`, or None.
        variable: That of the weight.
    """
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
