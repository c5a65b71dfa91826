"""Computes on the host what a layer has computed on its device.

Given the very inputs, values of variables and gradients that the layer got
there, a difference is that layer's own: nothing of it propagates. Keras's layer
runs as it is; what it assigns is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import (
    Boundary,
    StateScope,
    as_number,
    as_tensor,
    is_continuous,
)
from tfgpipe.exactness.parts import HOST
from tfgpipe.exactness.recorder import Place


class Given(NamedTuple):
    """What a step is computed from.

    Attributes:
        inputs: What comes in.
        structure: A nest like it.
        values: Values of variables, by id.
        dy: Given what goes out, returns the gradients with respect to it, by
            position.
        dlosses: Gradients with respect to what the layer adds to the loss.
        with_dx: The positions of what comes in whose gradients are wanted.
    """

    inputs: Boundary
    structure: Any
    values: Mapping[int, Any]
    dy: Callable[[Boundary], Mapping[int, Any]]
    dlosses: Mapping[int, Any]
    with_dx: Sequence[int]


class Replay(NamedTuple):
    """What a step comes to on the host.

    Attributes:
        outputs: What goes out.
        losses: What the layer adds to the loss, numbers.
        assigned: New values of variables, by id.
        dx: The gradients that were wanted, dense, by position.
        dw: Gradients by the trainable variables, dense, by id.
    """

    outputs: Boundary
    losses: list[tf.Tensor]
    assigned: dict[int, tf.Tensor]
    dx: dict[int, tf.Tensor]
    dw: dict[int, tf.Tensor]


def replayed(place: Place, given: Given) -> Replay:
    """Runs a step on the host, forward and backward."""
    weights, state = place.weights, place.state
    with tf.device(HOST), place.cell.naming(place.layer):
        inputs = [_copied(t) for t in given.inputs.tensors]
        masks = [_copied(t) for t in given.inputs.masks]
        values = [_copied(given.values[id(v)]) for v in weights]
        scope = StateScope(
            [(v, _copied(given.values[id(v)])) for v in state],
            place.cell.seeds,
        )
        sources = [t for t in [*inputs, *values] if is_continuous(t)]
        with (
            tf.GradientTape(watch_accessed_variables=False) as tape,
            scope,
            internals.tracing_anew(),
        ):
            tape.watch(sources)
            scope.use_weights(0, zip(weights, values, [None] * len(weights)))
            nest = Boundary(inputs, masks).nest(given.structure)
            made = place.step(nest, training=True)
            outputs = Boundary.of(made)
            losses = [as_number(loss) for loss in scope.losses]
        wanted = [inputs[i] for i in given.with_dx]
        found = _gradients(tape, outputs, losses, given, [*wanted, *values])
        assigned = {
            id(v): value
            for v, value in zip(
                [*weights, *state], scope.new_values([*weights, *state])
            )
            if value is not None
        }
        return Replay(
            outputs,
            losses,
            assigned,
            dict(zip(given.with_dx, found)),
            {id(v): d for v, d in zip(weights, found[len(wanted) :])},
        )


def _copied(tensor: Any) -> Any:
    """The tensor in the host's memory."""
    return None if tensor is None else tf.identity(tensor)


def _gradients(
    tape: tf.GradientTape,
    outputs: Boundary,
    losses: list[tf.Tensor],
    given: Given,
    sources: list[tf.Tensor],
) -> list[Any]:
    """Gradients with respect to the sources, dense; zeros where none is."""
    pairs = [(outputs.tensors[i], d) for i, d in given.dy(outputs).items()]
    pairs += [(losses[i], d) for i, d in given.dlosses.items()]
    if not pairs:
        return [tf.zeros_like(t) for t in sources]
    found = tape.gradient(
        [t for t, _ in pairs],
        sources,
        [_copied(as_tensor(d)) for _, d in pairs],
    )
    return [
        tf.zeros_like(t) if d is None else as_tensor(d)
        for t, d in zip(sources, found)
    ]
