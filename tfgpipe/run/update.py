"""Applies gradients where the variables are.

Keras names no device for an update, so all of it would run on device 0, with a
copy of every gradient and slot there. Here Keras's `apply_gradients` is traced
once, and what it does is a function for each device, see
`graphs/by_device.py`: compiled where cells are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs import GraphCutter, WholeGraph, run_by_device

# Keras's optimizers whose update of a weight depends on nothing but the
# gradient, the weight, its slots and the optimizer's settings. Others, such as
# Muon, ask for its name.
_ALIKE = {
    optimizer.update_step
    for optimizer in (
        keras.optimizers.Adadelta,
        keras.optimizers.Adafactor,
        keras.optimizers.Adagrad,
        keras.optimizers.Adam,
        keras.optimizers.Adamax,
        keras.optimizers.Ftrl,
        keras.optimizers.Lion,
        keras.optimizers.Nadam,
        keras.optimizers.RMSprop,
        keras.optimizers.SGD,
    )
}

# What a user's subclass may define: nothing that such an update calls.
_OUTSIDE_UPDATES = {
    "__init__",
    "apply",
    "apply_gradients",
    "build",
    "from_config",
    "get_config",
    "update_step",  # which is looked for in _ALIKE
}

_PLAIN = (bool, int, float, str, type(None), np.generic)


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

    alike = [*filter(_is_alike, internals.with_inner(optimizer))]
    with contextlib.ExitStack() as stack:
        stack.enter_context(internals.without_all_reduce(optimizer))
        stack.enter_context(tf.device(None))
        for one in alike:
            shared = _SharedUpdate(one, [v for _, v in pairs])
            stack.enter_context(internals.replaced(one, "update_step", shared))
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


def _is_alike(optimizer: keras.Optimizer) -> bool:
    """Returns whether an optimizer updates weights as Keras wrote it.

    A subclass or an attribute may replace what `update_step` calls, such as
    `assign_sub`, and ask it for more than the values of weights.
    """
    return (
        getattr(type(optimizer), "update_step", None) in _ALIKE
        and internals.overridden(optimizer) <= _OUTSIDE_UPDATES
    )


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
    What it computes for all weights alike is computed once, as long as nothing
    but reads uses the variables that it reads for that.
    """

    def __init__(
        self, optimizer: keras.Optimizer, variables: list[keras.Variable]
    ):
        self._optimizer = optimizer
        self._plain = optimizer.update_step
        self._by_storage = {id(v.value): v for v in variables}
        self._traced: dict[Hashable, _Update] = {}

    def __call__(
        self, gradient: Any, variable: keras.Variable, learning_rate: Any
    ) -> None:
        """Updates a variable, as `keras.Optimizer.update_step` does.

        A sparse gradient changes a few rows of a variable in place.
        """
        own = self._by_storage.get(id(variable))
        if own is None or not isinstance(gradient, tf.Tensor):
            self._plain(gradient, variable, learning_rate)
            return
        changing = [own, *internals.slots(self._optimizer, own)]
        handles = [v.value.handle for v in changing]
        key = (
            *((tuple(v.shape), v.value.dtype) for v in changing),
            *(gradient.shape, gradient.dtype, id(learning_rate)),
            *self._settings(),
        )
        update = self._traced.get(key)
        if update is None or not update.is_as_before:
            update = self._traced[key] = _Update(
                lambda: self._plain(gradient, variable, learning_rate),
                [gradient, *handles],
                learning_rate,
            )
        if update.is_alike:
            update([gradient, *handles])
        else:
            self._plain(gradient, variable, learning_rate)

    def _settings(self) -> Iterator[Any]:
        """Tells what the optimizer says in plain numbers, which may change."""
        for name, value in vars(self._optimizer).items():
            if isinstance(value, _PLAIN):
                yield name, value


class _Update:
    """An update of a weight, in the graph that is traced now.

    Args:
        function: Updates the weight.
        given: What is another for other weights: gradient and handles.
        kept: What must not be forgotten as long as this is known.

    Attributes:
        is_alike: Whether all else is read, and nothing but a number.
    """

    def __init__(self, function: Callable, given: list[tf.Tensor], kept: Any):
        self._kept = kept
        graph = tf.function(function, autograph=False)
        graph = graph.get_concrete_function().graph
        outside = {id(outer): inner for outer, inner in graph.captures}
        self._given = [outside.get(id(t)) for t in given]
        whole = WholeGraph(graph, takes_reads=False)
        known = {t.ref() for t in self._given if t is not None}
        own: set[str] = set()  # what follows from the given
        for op in whole.operations:
            if any(t.ref() in known for t in op.inputs):
                own.add(op.name)
                known |= {t.ref() for t in op.outputs}
        common: dict[Hashable, tf.Tensor] = {
            t.ref(): t
            for op in whole.operations
            if op.name in own
            for t in op.inputs
            if t.ref() not in known and t.op.type != "Const"
        }
        effects = [
            op
            for op in whole.operations
            if internals.is_stateful(op.type) and op.type != "ReadVariableOp"
        ]
        self.is_alike = all(op.name in own for op in effects) and all(
            t.shape.rank == 0 and t.dtype != tf.resource
            for t in common.values()
        )
        self._read = [
            outer
            for outer, inner in graph.captures
            if outer.dtype == tf.resource and inner.ref() not in known
        ]
        self._num_uses = self._uses()
        if self.is_alike:
            cutter = GraphCutter(whole, own, {"autograph": False}, "CPU")
            taken = [t for t in self._given if t is not None]
            self._function = cutter.function(
                [*taken, *common.values()], [], effects
            )
            self._common = _add_common(whole, [*common.values()])

    @property
    def is_as_before(self) -> bool:
        """Returns whether nothing was assigned that the update reads."""
        return self._uses() == self._num_uses

    def __call__(self, given: list[tf.Tensor]) -> None:
        """Adds the update of a weight to the graph."""
        values = {
            t.ref(): value
            for t, value in zip(self._given, given)
            if t is not None
        }
        self._function({**values, **self._common})

    def _uses(self) -> int:
        """How often anything but a read has used the variables."""
        graph = tf.compat.v1.get_default_graph()
        return sum(
            op.type != "ReadVariableOp"
            for handle in self._read
            for op in graph.capture(handle).consumers()
        )


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
