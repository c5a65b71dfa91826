"""Applies gradients where the variables are.

Keras names no device for an update, so all of it would run on device 0, with a
copy of every gradient and slot there. Here Keras's `apply_gradients` is traced
once, and what it does is a function for each device, see
`graphs/by_device.py`: compiled where cells are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs import run_by_device


def update_on_devices(
    optimizer: keras.optimizers.Optimizer,
    pairs: Sequence[tuple[Any, keras.Variable]],
    compiles: bool = False,
    apply: Callable[[], Any] | None = None,
) -> None:
    """Applies gradients, each on the device of its variable.

    Args:
        optimizer: Has its slots.
        pairs: Gradients, or None, and their variables.
        compiles: Whether XLA compiles the update of dense gradients.
        apply: Applies them; None for `apply_gradients` of the optimizer.
    """
    applying = apply or functools.partial(optimizer.apply_gradients, pairs)

    def update() -> None:
        applying()

    with internals.without_all_reduce(optimizer), tf.device(None):
        traced = tf.function(update, autograph=False).get_concrete_function()
    graph = traced.graph
    values = {inner.ref(): outer for outer, inner in graph.captures}
    slices = {
        id(t)
        for gradient, _ in pairs
        if isinstance(gradient, tf.IndexedSlices)
        for t in tf.nest.flatten(gradient, expand_composites=True)
    }
    sparse = [ref for ref, outer in values.items() if id(outer) in slices]
    (first, *_) = optimizer.variables
    run_by_device(graph, values, first.value.device, compiles, sparse)


def updates_slices_alike(optimizer: Any) -> bool:
    """Returns whether sparse gradients give the numbers of dense ones.

    Others of Keras's optimizers leave alone what they keep of rows without a
    slice, or square the slices one by one.
    """
    innermost = internals.with_inner(optimizer)[-1]
    return type(innermost) in (keras.optimizers.SGD, keras.optimizers.Lion)
