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
import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs import run_by_device

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

    The operations of the first one are copied for the others, if the trace
    shows that they assign nothing but a weight and its slots. What they compute
    for all weights alike is computed once, as long as nothing but reads uses
    the variables that they read for that.
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
        weight = self._by_storage.get(id(variable))
        if weight is None or not isinstance(gradient, tf.Tensor):
            self._plain(gradient, variable, learning_rate)
            return
        graph = tf.compat.v1.get_default_graph()
        changing = [weight, *internals.slots(self._optimizer, weight)]
        given = [gradient, *(v.value.handle for v in changing)]
        given = [graph.capture(tensor) for tensor in given]
        # What the optimizer says in plain numbers may change.
        key = (
            *((tuple(v.shape), v.value.dtype) for v in changing),
            *(gradient.shape, gradient.dtype, id(learning_rate), id(graph)),
            *(p for p in vars(self._optimizer).items() if _is_plain(p[1])),
        )
        update = self._traced.get(key)
        if update is not None and update.is_alike and update.is_as_before:
            update.copy(given)
            return
        start = len(graph.get_operations())
        self._plain(gradient, variable, learning_rate)
        if update is None or update.is_alike:
            made = graph.get_operations()[start:]
            self._traced[key] = _Update(made, given, (graph, learning_rate))


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, type(None), np.generic))


class _Update:
    """The operations that update a weight in the graph that is traced now.

    `given` are what is another for other weights: gradient and handles. It
    `is_alike` if all else is read, and nothing but a number.
    """

    def __init__(
        self,
        operations: Sequence[tf.Operation],
        given: Sequence[tf.Tensor],
        kept: Any,
    ):
        self._given = given
        self._kept = kept
        known = {t.ref() for t in given}
        names: set[str] = set()  # of what follows from the given
        for op in operations:
            if any(t.ref() in known for t in op.inputs):
                names.add(op.name)
                known |= {t.ref() for t in op.outputs}
        updating = [op for op in operations if op.name in names]
        others = [op for op in operations if op.name not in names]
        taken = [t for op in updating for t in op.inputs]
        self._common = {t.name: t for t in taken if t.ref() not in known}
        self._taken = {t.name for t in taken}
        reads = [op for op in others if op.type == "ReadVariableOp"]
        self._read = [op.inputs[0] for op in reads]
        self._num_uses = self._uses()
        self.is_alike = (
            not any(internals.takes_functions(op.type) for op in updating)
            and all(
                op.type == "ReadVariableOp"
                or not internals.is_stateful(op.type)
                for op in others
            )
            and all(
                t.op.type == "Const"
                or (t.shape.rank == 0 and t.dtype != tf.resource)
                for t in self._common.values()
            )
        )
        self._definition = tf.compat.v1.GraphDef(
            versions=given[0].graph.graph_def_versions,
            node=[op.node_def for op in updating],
        )
        for node in self._definition.node:
            node.device = ""
            node.attr.pop("_class", None)
            node.input[:] = [
                i for i in node.input if i[0] != "^" or i[1:] in names
            ]

    @property
    def is_as_before(self) -> bool:
        """Returns whether nothing was assigned that the update reads."""
        return self._uses() == self._num_uses

    def copy(self, given: Sequence[tf.Tensor]) -> None:
        """Adds the update of another weight to the graph."""
        new = {
            t.name: value
            for t, value in zip(self._given, given)
            if t.name in self._taken  # an average, say, is updated elsewhere
        }
        internals.import_definition(self._definition, {**self._common, **new})

    def _uses(self) -> int:
        """How often anything but a read has used the variables."""
        return sum(
            op.type != "ReadVariableOp"
            for handle in self._read
            for op in handle.consumers()
        )
