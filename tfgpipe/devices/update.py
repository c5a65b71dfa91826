"""Applies gradients where the variables are.

Keras names no device for an update, so all of it would run on device 0, with a
copy of every gradient and slot there. And it traces the arithmetic anew for
every weight: for a deep model, most of the time until the first step.

Here, weights of equal shape share one function of their update, called on the
device of each: one operation a weight, which reads and assigns the variables.
What Keras does besides (decay, clipping, averages) is placed operation by
operation, see `placement.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import names, placement

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
    "apply",
    "apply_gradients",
    "build",
    "from_config",
    "get_config",
    "update_step",  # which is looked for in _ALIKE
}

_PLAIN = (bool, int, float, str, type(None), np.generic)


@contextlib.contextmanager
def update_on_devices(
    optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
    in_branch: bool = False,
) -> Iterator[None]:
    """Inside, an optimizer's arithmetic runs where its variables are."""
    alike = [
        o
        for o in internals.with_inner(optimizer)
        if _is_alike(o)
        # In a branch, what it keeps for all weights can't be handed on.
        and not (
            isinstance(o, keras.optimizers.Nadam)
            and (in_branch or o is not optimizer)
        )
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(internals.without_all_reduce(optimizer))
        for one in alike:
            shared = _SharedUpdate(one, variables)
            stack.enter_context(
                internals.replaced_method(one, "update_step", shared)
            )
        stack.enter_context(
            placement.follow_inputs([*optimizer.variables, *variables])
        )
        yield


def _is_alike(optimizer: Any) -> bool:
    """Whether an optimizer updates weights as Keras wrote it.

    A subclass or an attribute may replace what `update_step` calls, such as
    `assign_sub`, and ask it for more than the values of weights.
    """
    kind = type(optimizer)
    own: set[str] = set()
    for cls in kind.__mro__:
        if internals.is_keras(cls):
            break
        own |= {name for name in vars(cls) if not name.startswith("__")}
    replaced = {
        name for name in vars(optimizer) if callable(getattr(kind, name, None))
    }
    return (
        getattr(kind, "update_step", None) in _ALIKE
        and own <= _OUTSIDE_UPDATES
        and not replaced
    )


def updates_slices_alike(optimizer: Any) -> bool:
    """Whether sparse gradients give the numbers of dense ones.

    Others of Keras's optimizers leave alone what they keep of rows without a
    slice, or square the slices one by one.
    """
    innermost = internals.with_inner(optimizer)[-1]
    return type(innermost) in (keras.optimizers.SGD, keras.optimizers.Lion)


class _SharedUpdate:
    """The `update_step` of an optimizer, traced once for equal weights.

    Only if the trace shows that it reads and assigns nothing but what the
    function gets and returns. Any other update runs as Keras runs it.
    """

    def __init__(self, optimizer: Any, variables: list[keras.Variable]):
        self._optimizer = optimizer
        self._plain = optimizer.update_step
        self._by_storage = {id(v.value): v for v in variables}
        self._functions: dict[Any, Callable | None] = {}
        self._read: dict[Any, list[tf.Tensor]] = {}
        self._rates: list[Any] = []  # kept, as they are known by their ids

    def __call__(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        """Updates a variable, as `keras.Optimizer.update_step` does.

        A sparse gradient changes a few rows of a variable in place.
        """
        own = self._by_storage.get(id(variable))
        if own is None or not isinstance(gradient, tf.Tensor):
            self._plain(gradient, variable, learning_rate)
            return
        changing = [own, *internals.slots(self._optimizer, own)]
        fixed = internals.shared_variables(self._optimizer)
        device = own.value.device
        with tf.device(device):
            is_compiled = names.only_compiles([device])
            tensors = [gradient, *self._values(learning_rate, fixed, device)]
            key = (
                *((tuple(v.shape), v.value.dtype) for v in changing),
                *((t.shape, t.dtype) for t in tensors),
                is_compiled,
                self._settings(),
            )
            if key not in self._functions:
                self._functions[key] = self._trace(
                    tensors, own, changing, fixed, jit_compile=is_compiled
                )
            function = self._functions[key]
            if function is None:
                self._plain(gradient, variable, learning_rate)
                return
            handles = [v.value.handle for v in changing]
            function([*tensors, *handles])

    def _settings(self) -> tuple[Any, ...]:
        """What the optimizer says in plain numbers, which may change."""
        return tuple(
            (name, value)
            for name, value in vars(self._optimizer).items()
            if isinstance(value, _PLAIN)
        )

    def _values(
        self, learning_rate: Any, fixed: list[keras.Variable], device: str
    ) -> list[tf.Tensor]:
        """What is the same for all weights, read once a device.

        And again after anything but a read has used one of the variables, such
        as an assignment.
        """
        graph = tf.compat.v1.get_default_graph()
        rate = learning_rate  # also a `tf.Variable`, as a schedule may return
        if isinstance(rate, keras.Variable):
            rate = rate.value
        uses = [
            sum(
                op.type != "ReadVariableOp"
                for op in graph.capture(v.handle).consumers()
            )
            for v in [rate, *(v.value for v in fixed)]
            if isinstance(v, tf.Variable)
        ]
        place = graph, device, id(rate), *uses
        if place not in self._read:
            self._rates.append(rate)
            self._read[place] = [
                tf.identity(rate),
                *(placement.read_variable(v) for v in fixed),
            ]
        return self._read[place]

    def _trace(
        self,
        tensors: list[tf.Tensor],
        variable: keras.Variable,
        changing: list[keras.Variable],
        fixed: list[keras.Variable],
        jit_compile: bool,
    ) -> Callable | None:
        """The function; None if it would be another one for other weights."""
        known = [*changing, *fixed]
        is_alike = True

        def update(gradient: Any, learning_rate: Any, *others: Any) -> None:
            nonlocal is_alike
            settings, handles = others[: len(fixed)], others[len(fixed) :]
            values = [
                _read(handle, v.value) for handle, v in zip(handles, changing)
            ]
            scope = keras.StatelessScope(list(zip(known, [*values, *settings])))
            before = dict(scope.state_mapping)
            with internals.updating_in_scope(self._optimizer, variable, scope):
                self._plain(gradient, variable, learning_rate)
            assigned = {
                key
                for key, value in scope.state_mapping.items()
                if before.get(key) is not value
            }
            is_alike = assigned <= {id(v) for v in changing}
            for handle, v in zip(handles, changing):
                new = scope.get_current_value(v)
                tf.raw_ops.AssignVariableOp(resource=handle, value=new)

        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
        specs += [tf.TensorSpec((), tf.resource)] * len(changing)
        traced = tf.function(
            update,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes={"_noinline": True},
        )
        with tf.device(None):  # weights on other devices call it, too
            concrete = traced.get_concrete_function(*specs)
        if not is_alike or concrete.captured_inputs:
            return None
        # As Keras runs it.
        return internals.FunctionCall(concrete, as_written=False)


def _read(handle: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
    """The value of a variable like this one, by its handle."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
    value.set_shape(variable.shape)
    return value
