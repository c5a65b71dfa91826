"""Methods of `GPipe` that a subclass may extend, and not replace.

Keras's own examples of a `train_step` differentiate by a `tf.GradientTape` what
`self(x)` returns. In a `GPipe` that would run layer after layer, without cells
and micro-batches, and nobody would know. So whether a subclass's method calls
that of its base is observed where it runs: while a step is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_CURES = {
    "train_step": "A loss of your own belongs in `compute_loss`.",
    "test_step": "A loss of your own belongs in `compute_loss`.",
    "predict_step": "Then change what that returned.",
    "make_train_function": "Then change `self.train_function`.",
    "make_test_function": "Then change `self.test_function`.",
    "make_predict_function": "Then change `self.predict_function`.",
}


def base(method: Callable) -> Callable:
    """Marks what overriding methods must call."""

    @functools.wraps(method)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._plan.calls[method.__name__] += 1
        return method(self, *args, **kwargs)

    noted.is_base = True  # type: ignore[attr-defined]
    return noted


class Extended:
    """Checks that methods of subclasses call those marked with `base`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _CURES:
            method = getattr(cls, name, None)
            bases = [vars(parent).get(name) for parent in cls.__mro__]
            has_base = any(hasattr(m, "is_base") for m in bases)
            is_known = hasattr(method, "is_base") or hasattr(method, "extends")
            if has_base and not is_known:
                setattr(cls, name, _extending(name, method))


def _extending(name: str, method: Any) -> Callable:
    """The method, which fails if it does not call that of its base."""

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._plan.calls[name]
        result = method(self, *args, **kwargs)
        if self._plan.calls[name] == before:
            raise TypeError(
                f"`{name}` of a subclass of `GPipe` must call that of `GPipe`, "
                "which alone uses the cells. Received: "
                f"{method.__qualname__}, which does not: layers would run one "
                "after the other, without micro-batches. Call "
                f"`super().{name}(...)` in it. {_CURES[name]}"
            )
        return result

    checked.extends = True  # type: ignore[attr-defined]
    return checked
