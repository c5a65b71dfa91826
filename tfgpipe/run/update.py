"""Applies gradients where the variables are.

Keras names no device for an update, so all of it would run on device 0, with a
copy of every gradient and slot there. Here Keras's `apply_gradients` is traced
once, and what it does is a function for each device, see
`graphs/by_device.py`: compiled where cells are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs import GraphByDevice, GraphCutter, WholeGraph

# Keras's optimizers whose update of a weight depends on nothing but the
# gradient, the weight, its slots and the optimizer's settings. Others, such as
# Muon, ask for its name.
_ALIKE = {
    getattr(keras.optimizers, name).update_step
    for name in (
        "Adadelta Adafactor Adagrad Adam Adamax Ftrl Lion Nadam RMSprop SGD"
    ).split()
}

# What a user's optimizer may define: nothing that an update calls, nor what
# calls it and might change settings before the next.
_OUTSIDE_UPDATES = {"__init__", "build", "from_config", "get_config"}


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

    every = internals.with_inner(optimizer)
    are_plain = all(
        internals.overridden(one) <= _OUTSIDE_UPDATES for one in every
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(internals.without_all_reduce(optimizer))
        stack.enter_context(tf.device(None))
        for one in every:
            if are_plain and getattr(type(one), "update_step", None) in _ALIKE:
                shared = _SharedUpdate(one, [v for _, v in pairs])
                stack.enter_context(
                    internals.replaced(one, "update_step", shared)
                )
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
    GraphByDevice(graph, values, first.value.device, compiles, sparse).run()


def updates_slices_alike(optimizer: keras.Optimizer) -> bool:
    """Returns whether sparse gradients give the numbers of dense ones.

    Others of Keras's optimizers leave alone what they keep of rows without a
    slice, or square the slices one by one.
    """
    innermost = internals.with_inner(optimizer)[-1]
    return type(innermost) in (keras.optimizers.SGD, keras.optimizers.Lion)


class _SharedUpdate:
    """The `update_step` of an optimizer, traced once for equal weights.

    Only if the trace shows that it assigns nothing but a weight and its slots.
    What it computes for all weights alike, numbers, is computed once.
    """

    def __init__(
        self, optimizer: keras.Optimizer, variables: list[keras.Variable]
    ):
        self._optimizer = optimizer
        self._plain = optimizer.update_step
        self._by_storage = {id(v.value): v for v in variables}
        self._traced: dict[Hashable, tuple[Callable | None, Any]] = {}

    def __call__(
        self, gradient: Any, variable: keras.Variable, learning_rate: Any
    ) -> None:
        """Updates a variable, as `keras.Optimizer.update_step` does.

        A sparse gradient changes a few rows of a variable in place.
        """

        def plain() -> None:
            self._plain(gradient, variable, learning_rate)

        known = self._by_storage.get(id(variable))
        if known is None or not isinstance(gradient, tf.Tensor):
            plain()
            return
        changing = [known, *internals.slots(self._optimizer, known)]
        given = [gradient, *(v.value.handle for v in changing)]
        key = (
            *((tuple(v.shape), v.value.dtype) for v in changing),
            *(gradient.shape, gradient.dtype, id(learning_rate)),
        )
        if key not in self._traced:  # which keeps the rate, so its id is its
            self._traced[key] = _shared(plain, given), learning_rate
        update, _ = self._traced[key]
        if update is None:
            plain()
        else:
            update(given)


def _shared(
    function: Callable[[], None], given: list[tf.Tensor]
) -> Callable[[list[tf.Tensor]], None] | None:
    """Traces an update of a weight for all that are alike.

    `given` is what is another for other weights: gradient and handles. Returns
    None if something else is assigned, or read that is no number.
    """
    graph = tf.function(function, autograph=False)
    graph = graph.get_concrete_function().graph
    outside = {id(outer): inner for outer, inner in graph.captures}
    places = [outside.get(id(t)) for t in given]
    taken = [t for t in places if t is not None]
    whole = WholeGraph(graph, takes_reads=False)
    known = {t.ref() for t in taken}
    following: set[str] = set()  # the names of what follows from the given
    for op in whole.operations:
        if any(t.ref() in known for t in op.inputs):
            following.add(op.name)
            known |= {t.ref() for t in op.outputs}
    common: dict[Hashable, tf.Tensor] = {
        t.ref(): t
        for op in whole.operations
        if op.name in following
        for t in op.inputs
        if t.ref() not in known and t.op.type != "Const"
    }
    effects = [
        op
        for op in whole.operations
        if internals.is_stateful(op.type) and op.type != "ReadVariableOp"
    ]
    if not all(op.name in following for op in effects) or any(
        t.shape.rank != 0 or t.dtype == tf.resource for t in common.values()
    ):
        return None
    cutter = GraphCutter(whole, following, {"autograph": False}, "CPU")
    update = cutter.function([*taken, *common.values()], [], effects)
    numbers = _add_common(whole, [*common.values()])

    def updated(given: list[tf.Tensor]) -> None:
        values = {
            t.ref(): value for t, value in zip(places, given) if t is not None
        }
        update({**values, **numbers})

    return updated


def _add_common(
    whole: WholeGraph, tensors: list[tf.Tensor]
) -> dict[Hashable, tf.Tensor]:
    """Adds what is the same for all weights to the graph."""
    graph = tf.compat.v1.get_default_graph()
    outside = whole.captures
    needed = internals.ancestors(tensors, lambda t: t.ref() in outside)
    given = {
        t.name: graph.capture(outside[t.ref()])
        for op in needed.values()
        for t in op.inputs
        if t.ref() in outside
    }
    computed = [t for t in tensors if t.ref() not in outside]
    part = whole.definition_of(needed)
    for node in part.node:
        node.input[:] = [i for i in node.input if i[0] != "^"]
    added = internals.import_definition(part, given, [t.name for t in computed])
    return {
        **{t.ref(): outside[t.ref()] for t in tensors if t.ref() in outside},
        **{t.ref(): value for t, value in zip(computed, added)},
    }
