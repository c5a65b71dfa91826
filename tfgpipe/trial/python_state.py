"""What calls of layers leave behind in Python, where others may find it.

A layer may keep a tensor, a number or its phase in an attribute, in an object
that it shares with other layers, in a list, in a global variable:

    def call(self, x):
        self.context.balance = ops.mean(x)    another layer adds it to the loss

No scope of Keras's tells. So all that the code of a layer can reach by name is
looked at before and after a call.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals

# More is not looked at: tables of words may be large.
_MOST = 10_000

_WITHOUT_PARTS = (int, float, str, type(None), keras.Variable, tf.Tensor)

# Whose objects are not looked into, beside those of Python's own library.
_LIBRARIES = {"keras", "numpy", "tensorflow", "tfgpipe"} | set(
    sys.stdlib_module_names
)


def python_state(operations: Iterable[Any]) -> dict[Any, Any]:
    """What layers, those inside, and operations can reach in Python.

    By the id of what holds it, and its place there.
    """
    found: dict[Any, Any] = {}
    pending = [*operations]
    known = set()
    while pending and len(found) < _MOST:
        holder = pending.pop()
        if id(holder) in known:
            continue
        known.add(id(holder))
        for place, value in _parts(holder):
            found[id(holder), place] = value
            if not isinstance(value, _WITHOUT_PARTS):
                pending.append(value)
    return found


def is_changed(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    """Whether anything is another object, but for equal numbers and words."""
    return before.keys() != after.keys() or any(
        after[place] is not value and not _are_equal(after[place], value)
        for place, value in before.items()
    )


def _are_equal(a: Any, b: Any) -> bool:
    return isinstance(a, (int, float, str)) and type(a) is type(b) and a == b


def _parts(holder: Any) -> list[tuple[Any, Any]]:
    """What something holds, each with its place."""
    if isinstance(holder, keras.Operation):
        own = internals.own_attributes(holder)
        found = [(k, v) for k, v in own.items() if k not in _notes()]
        return [*found, ("class", type(holder))]
    if isinstance(holder, dict):
        return [*holder.items()]
    if isinstance(holder, (list, tuple)):
        return [*enumerate(holder)]
    if isinstance(holder, (set, frozenset)):
        return [(value, value) for value in holder]
    if isinstance(holder, types.MethodType):
        return [("function", holder.__func__), ("self", holder.__self__)]
    if isinstance(holder, types.ModuleType) or _is_of_library(holder):
        return []
    if isinstance(holder, types.FunctionType):
        return _of_function(holder)
    own = dict(getattr(holder, "__dict__", {}))
    if not isinstance(holder, type):
        own["class"] = type(holder)
    return [*own.items()]


@functools.cache
def _notes() -> set[str]:
    """The private attributes of every layer, which Keras may change."""
    return {
        k for k in vars(keras.layers.Layer(name="any")) if k.startswith("_")
    }


def _of_function(function: Any) -> list[tuple[Any, Any]]:
    """The variables of other scopes that a function names."""
    code, scope = function.__code__, function.__globals__
    found = [(name, scope[name]) for name in _names(code) if name in scope]
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # it has no value yet
            continue
    return [*found, ("defaults", function.__defaults__)]


def _names(code: types.CodeType) -> set[str]:
    """What code names that is not its own, also in functions inside."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _is_of_library(thing: Any) -> bool:
    of = thing if hasattr(thing, "__module__") else type(thing)
    module = getattr(of, "__module__", None) or "builtins"
    return module.split(".")[0] in _LIBRARIES
