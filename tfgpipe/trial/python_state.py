"""What calls of layers leave behind in Python, where others may find it.

A layer may keep a tensor, a number or its phase in an attribute, in an object
that it shares with other layers, in a list, in a global variable:

    def call(self, x):
        self.context.balance = ops.mean(x)    another layer adds it to the loss

No scope of Keras's tells. So all that the code of a layer can reach by name is
looked at before and after a call.
"""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import internals

# Of what has more parts, as a table of words, only their number is looked at.
_MOST_PARTS = 1000

_MOST = 200_000

# What is compared by its value.
_VALUES = (
    *(int, float, str, bytes, type(None)),
    *(np.generic, tf.TensorShape, tf.DType),
)

_WITHOUT_PARTS = (*_VALUES, keras.Variable, tf.Tensor)

# Whose objects are not looked into, beside those of Python's own library.
_LIBRARIES = {"keras", "numpy", "tensorflow", "tfgpipe"} | set(
    sys.stdlib_module_names
)


def python_state(operations: Iterable[Any]) -> dict[Any, Any]:
    """What layers, those inside, and operations can reach in Python.

    By the id of what holds it, and its place there.
    """
    found: dict[Any, Any] = {}
    pending = collections.deque(operations)
    known = set()
    while pending and len(found) < _MOST:
        holder = pending.popleft()
        if id(holder) in known:
            continue
        known.add(id(holder))
        for place, value in _few_parts(holder):
            found[id(holder), place] = value
            if not isinstance(value, _WITHOUT_PARTS):
                pending.append(value)
    return found


def is_changed(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    """Whether anything is another object, but for equal values."""
    return before.keys() != after.keys() or any(
        after[place] is not value and not _are_equal(after[place], value)
        for place, value in before.items()
    )


def _are_equal(a: Any, b: Any) -> bool:
    return isinstance(a, _VALUES) and type(a) is type(b) and bool(a == b)


def _few_parts(holder: Any) -> list[tuple[Any, Any]]:
    """What something holds, each with its place; of many, their number.

    Lists and tuples are looked at where they are held: an equal one may be
    another object.
    """
    try:
        found = [*itertools.islice(_parts(holder), _MOST_PARTS + 1)]
        if len(found) > _MOST_PARTS:
            return [("length", len(holder))]
    except Exception:  # a user's objects may raise anything
        return []
    parts, known = [], set()
    while found:
        place, value = found.pop()
        is_list = type(value) in (list, tuple) and len(value) <= _MOST_PARTS
        if is_list and id(value) not in known:
            known.add(id(value))
            found += [((place, i), part) for i, part in enumerate(value)]
        else:
            parts.append((place, value))
    return parts


def _parts(holder: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(holder, keras.Operation):
        own = internals.own_attributes(holder)
        yield from ((k, v) for k, v in own.items() if k not in _private_names())
        yield "class", type(holder)
    elif isinstance(holder, dict):
        yield from holder.items()
    elif isinstance(holder, (list, tuple, collections.deque)):
        yield from enumerate(holder)
    elif isinstance(holder, (set, frozenset)):
        yield from ((value, value) for value in holder)
    elif isinstance(holder, np.ndarray) and holder.size <= _MOST_PARTS:
        yield "values", holder.tobytes()
    elif isinstance(holder, types.FunctionType):
        yield from _of_function(holder)
    elif isinstance(holder, functools.partial):
        yield "function", (holder.func, holder.args, holder.keywords)
    elif isinstance(holder, property):
        yield "functions", (holder.fget, holder.fset)
    elif isinstance(holder, (types.MethodType, staticmethod, classmethod)):
        yield "function", holder.__func__
        yield "self", getattr(holder, "__self__", None)
    elif isinstance(holder, types.SimpleNamespace):
        yield from vars(holder).items()
    elif isinstance(holder, types.ModuleType) or _is_of_library(holder):
        return
    elif isinstance(holder, type):
        yield from vars(holder).items()
        yield "bases", holder.__bases__
    else:
        yield from getattr(holder, "__dict__", {}).items()
        for name in _slots(type(holder)):
            yield name, getattr(holder, name, None)
        yield "class", type(holder)


@functools.cache
def _private_names() -> set[str]:
    """The private attributes of every layer, which Keras may change."""
    return {
        k for k in vars(keras.layers.Layer(name="any")) if k.startswith("_")
    }


def _of_function(function: Any) -> Iterator[tuple[Any, Any]]:
    """The variables of other scopes that a function names."""
    if not _is_of_library(function):
        code, scope = function.__code__, function.__globals__
        yield from ((k, scope[k]) for k in _names(code) if k in scope)
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    yield "defaults", (function.__defaults__, function.__kwdefaults__)
    yield "attributes", vars(function)


def _names(code: types.CodeType) -> set[str]:
    """What code names that is not its own, also in functions inside."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _slots(cls: type) -> list[str]:
    found = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    flat = [[own] if isinstance(own, str) else own for own in found]
    names = itertools.chain(*flat)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _is_of_library(thing: Any) -> bool:
    is_code = isinstance(thing, (type, types.FunctionType))
    module = (thing if is_code else type(thing)).__module__
    return str(module).split(".")[0] in _LIBRARIES
