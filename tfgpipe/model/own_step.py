"""Methods of a user's subclass, above all a `train_step`.

Some may be extended, and not replaced. Keras's own examples of a `train_step`
differentiate by a `tf.GradientTape` what `self(x)` returns. In a `GPipe` that
would run layer after layer, without cells and micro-batches, and nobody would
know. So whether a method calls its base's is observed where it runs: while a
step is traced.

A `train_step` may also get gradients by `loss_and_gradients`, and do with them
what it likes. In its graph

* optimizers run on the devices of the variables that they get, with their
  slots there, as in a step of the pipeline's;
* so does whatever else is computed of gradients: each operation on the device
  of its first input, where no other one is asked for;
* if mini-batches are skipped that are not finite, all variables are kept from
  the first pass on, and put back when the step ends.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfgpipe import failures, internals
from tfgpipe.devices import placement
from tfgpipe.model.nonfinite import Guard
from tfgpipe.run import update_on_devices

# Whether a pipeline makes the operations.
in_pipeline = contextvars.ContextVar("in_pipeline", default=False)

_REPLACED = [
    (name, internals.Replaceable(cls, name))
    for name in ("apply", "scale_loss")
    for cls in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
]


class OwnStep:
    """A `train_step` of a subclass, while it runs or is traced.

    Args:
        place_slots: Called with an optimizer and the variables that it gets, or
            None: creates its slots where these are, or moves them there.

    Attributes:
        guard: Undoes all that it does if it is not finite, or None.
        is_unscaled: Whether it has taken gradients, and scaled none of them.
    """

    def __init__(self, place_slots: Callable[[Any, Any], None]):
        self.guard: Guard | None = None
        self.is_unscaled = False
        self._place_slots = place_slots
        self._graph = internals.current_graph()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the step may run."""
        with contextlib.ExitStack() as stack:
            for name, plain in _REPLACED:
                instead = getattr(self, f"_{name}")
                method = functools.partial(instead, plain.original)
                stack.enter_context(plain.by(method))
            if self._graph is not None:
                stack.enter_context(
                    placement.follow_inputs(lambda: not in_pipeline.get())
                )
            yield

    def ended(self, logs: Any) -> Any:
        """Undoes the step if it was not finite; returns what `fit` shows."""
        if self.guard is None:
            return logs
        skipped = self.guard.end()
        return {**logs, **skipped} if isinstance(logs, dict) else logs

    def check_graph(self) -> None:
        """Refuses another graph, such as a branch, which no guard undoes."""
        if self._graph is None or internals.current_graph() is not self._graph:
            raise ValueError(
                "`skip_nonfinite` needs a `train_step` that is one graph. "
                "Received: one that trains in a branch, a loop or eagerly. "
                "Move the call out of it, or leave `skip_nonfinite` out."
            )

    def _apply(
        self,
        plain: Callable,
        optimizer: keras.Optimizer,
        grads: Any,
        trainable_variables: Any = None,
    ) -> None:
        """Replaces the `apply` of all optimizers."""
        variables = trainable_variables
        if in_pipeline.get():
            plain(optimizer, grads, variables)
            return
        grads = list(grads)
        if variables is not None:
            variables = list(variables)
        self._place_slots(optimizer, variables)
        if self.is_unscaled and internals.scales_loss(optimizer):
            failures.warn(
                "Gradients of `loss_and_gradients` must be scaled for an "
                f"optimizer that divides them, as {type(optimizer).__name__}: "
                "apply `optimizer.scale_loss(gradient)`, or compile with "
                "auto_scale_loss=False."
            )
        if self.guard is not None:
            self.check_graph()
            self.guard.keep(internals.slots_of_all(optimizer))
        with failures.setting(in_pipeline, True):  # it may apply another one
            if self._graph is None:
                plain(optimizer, grads, variables)
                return
            pairs = zip(grads, variables or internals.trained_by(optimizer))
            apply = functools.partial(plain, optimizer, grads, variables)
            update_on_devices(optimizer, [*pairs], apply=apply)

    def _scale_loss(
        self, plain: Callable, optimizer: keras.Optimizer, loss: Any
    ) -> Any:
        """Replaces the `scale_loss` of all optimizers."""
        self.is_unscaled &= in_pipeline.get()
        return plain(optimizer, loss)


# ------------------------------------------------------- what must be extended
_EXTENDED = (
    "train_step test_step predict_step make_train_function make_test_function "
    "make_predict_function".split()
)


def base(method: Callable) -> Callable:
    """Marks what overriding methods must call."""

    @functools.wraps(method)
    def noted(self: Any, *args: object, **kwargs: object) -> Any:
        self._notes.base_calls[method.__name__] += 1
        return method(self, *args, **kwargs)

    noted.is_base = True  # type: ignore[attr-defined]
    return noted


class Overrides:
    """Checks that methods of subclasses call those marked with `base`."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in _EXTENDED:
            method = getattr(cls, name, None)
            bases = [vars(parent).get(name) for parent in cls.__mro__]
            has_base = any(getattr(m, "is_base", False) for m in bases)
            if has_base and not hasattr(method, "is_base"):
                setattr(cls, name, _extending(name, method))


def _extending(name: str, method: Any) -> Callable:
    """The method, which fails if it does not call its base's."""

    @functools.wraps(method)
    def checked(self: Any, *args: object, **kwargs: object) -> Any:
        before = self._notes.base_calls[name]
        if name == "train_step":
            result = self.run_own_step(method, *args, **kwargs)
        else:
            result = method(self, *args, **kwargs)
        if self._notes.base_calls[name] == before:
            raise TypeError(
                f"`{name}` of a subclass must call its base. Call "
                f"`super().{name}(...)`. A loss belongs in `compute_loss`; "
                "gradients come from `self.loss_and_gradients`."
            )
        return result

    checked.is_base = False  # type: ignore[attr-defined]
    return checked
