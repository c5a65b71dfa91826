"""Tells whether code can tell two layers apart that have equal attributes.

A layer also has a name and an identity, and code can count how often it is
called. So all code is gone through that a class or a function can reach by the
names that it mentions: functions and classes of any module, what decorators
wrapped, and of a class's own methods those that are mentioned, or that replace
some of a base class. `Reading` says whether all of it was understood: it refers
to nothing but attributes, constants, code that is understood, and the packages
known here, and asks for no names, identities or texts of objects.

What is not understood may still compute the same: too careful, never wrong.
Code that can only end in a `raise` is left out: error messages hold names. So
is what runs while a layer is made, the results of which are attributes.
"""

from __future__ import annotations

import builtins
import collections.abc
import enum
import functools
import logging
import re
import types
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe.cells.code_facts import MAKING, codes_of, facts_of, is_known

_BUILTINS = set(
    "abs all any bool callable complex dict divmod enumerate filter float "
    "frozenset getattr hasattr int isinstance issubclass iter len list map max "
    "min next object pow print property range reversed round set slice sorted "
    "staticmethod classmethod sum super tuple type zip NotImplemented Ellipsis "
    "True False None __debug__".split()
)
# Of a class, but no code of its own.
_ABOUT_CLASSES = set(
    "__annotations__ __dataclass_fields__ __dict__ __doc__ __module__ "
    "__qualname__ __slots__ __weakref__ _field_defaults".split()
)
# What holds no code; an identity by which layers could differ neither.
_PLAIN = (
    bool,
    bytes,
    complex,
    float,
    int,
    type(None),
    type(NotImplemented),
    type(Ellipsis),
    np.dtype,
    np.generic,
    range,
    keras.DTypePolicy,
    logging.Logger,
    re.Pattern,
    str,
    tf.DType,
    tf.Tensor,
    tf.TensorShape,
    tf.Variable,
    types.MemberDescriptorType,
)
# What code may change, or takes something else from every time.
_CHANGING = (
    collections.abc.Iterator,
    collections.abc.MutableMapping,
    collections.abc.MutableSequence,
    collections.abc.MutableSet,
    keras.Variable,
    keras.layers.Layer,
    np.ndarray,
)


class Reading:
    """Goes through what classes, functions and values can reach.

    Args:
        roots: Where it begins.

    Attributes:
        reason: What was not understood first, or None.
        mentioned: Attributes that some code reads, and its texts.
    """

    def __init__(self, *roots: Any):
        self.reason: str | None = None
        self.mentioned: set[str] = set()
        self._stored: set[str] = set()
        self._seen: dict[int, Any] = {}
        self._waiting: dict[str, list[Any]] = {}
        for root in roots:
            self._read(root)
        while called := self._waiting.keys() & self.mentioned:
            for name in called:
                self._read_all(self._waiting.pop(name))
        if both := self._stored & self.mentioned:
            self._reject(f"sets and reads {sorted(both)}")

    def _reject(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _read(self, value: Any) -> None:
        if self.reason or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, (tuple, frozenset)):
            self._read_all(value)
        elif isinstance(value, type):
            self._read_class(value)
        elif isinstance(value, types.ModuleType):
            if not is_known(value.__name__):
                self._reject(f"uses the module {value.__name__}")
        elif not isinstance(value, _PLAIN) and not self._read_function(value):
            self._read_object(value)

    def _read_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._read(value)

    def _read_class(self, cls: type) -> None:
        if cls.__module__ == "builtins":
            is_error = issubclass(cls, BaseException)
            if not is_error and cls.__name__ not in _BUILTINS:
                self._reject(f"uses the class {cls.__name__}")
            return
        own_ones = own_classes(cls)
        others = [c for c in cls.__mro__ if c not in own_ones]
        is_enum = issubclass(cls, enum.Enum)
        for own in own_ones:
            self._read(type(own))
            for name, value in vars(own).items():
                if name in _ABOUT_CLASSES or name in MAKING:
                    continue
                if any(hasattr(c, name) for c in others) and not is_enum:
                    self._read(value)  # what Keras may call
                else:
                    self._waiting.setdefault(name, []).append(value)

    def _read_function(self, value: Any) -> bool:
        """Reads what can be called, if it is that."""
        if isinstance(value, types.FunctionType):
            self._read_code(value)
        elif isinstance(value, (classmethod, staticmethod)):
            self._read(value.__func__)
        elif isinstance(value, property):
            self._read_all([value.fget, value.fset, value.fdel])
        elif isinstance(value, functools.cached_property):
            self._read(value.func)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            self._read_all([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, types.MethodType):
            self._read_all([value.__func__, value.__self__])
        elif isinstance(value, types.BuiltinFunctionType):
            self._read_builtin(value)
        elif isinstance(value, np.ufunc):
            if getattr(np, value.__name__, None) is not value:
                self._reject("calls a ufunc")  # maybe one of `np.frompyfunc`
        elif hasattr(value, "python_function"):  # a `tf.function`
            self._read(value.python_function)
        else:
            return False
        return True

    def _read_builtin(self, value: Any) -> None:
        own, module = value.__self__, value.__module__ or ""
        if own is not None and not isinstance(own, types.ModuleType):
            self._read(own)
        elif value.__name__ not in _BUILTINS and not is_known(module):
            self._reject(f"calls {module}.{value.__name__}")

    def _read_object(self, value: Any) -> None:
        """An object of a class that is understood, and what it can call."""
        if isinstance(value, _CHANGING) or not hasattr(value, "__dict__"):
            self._reject(f"uses an object of {type(value).__name__}")
            return
        self._read(type(value))
        self._read(getattr(value, "__wrapped__", None))
        self._read_all(v for v in vars(value).values() if _may_count(v))

    def _read_code(self, function: types.FunctionType) -> None:
        cells = function.__closure__ or ()
        contents = [_content(cell) for cell in cells]
        contents += function.__defaults__ or ()
        contents += (function.__kwdefaults__ or {}).values()
        if is_known(function.__globals__.get("__name__") or ""):
            # A decorator of a known package may hold functions of the user's.
            self._read_all(v for v in contents if _may_count(v))
            return
        self._read_all(contents)
        for code in codes_of(function.__code__):
            facts = facts_of(code)
            self.mentioned |= facts.mentioned
            self._stored |= facts.stored
            if facts.reason:
                self._reject(f"{function.__qualname__} {facts.reason}")
            if facts.rebound & set(function.__code__.co_freevars):
                self._reject(f"{function.__qualname__} rebinds a variable")
            for chain in facts.chains:
                self._read_chain(function, chain)

    def _read_chain(
        self, function: types.FunctionType, chain: tuple[str, ...]
    ) -> None:
        """A global name, and attributes of it as long as it is a module."""
        name, *attributes = chain
        if name in function.__globals__:
            value = function.__globals__[name]
        else:
            value = getattr(builtins, name, _MISSING)
        for attribute in attributes:
            if not isinstance(value, types.ModuleType):
                break
            value = getattr(value, attribute, _MISSING)
        self._read(value)


_MISSING = iter(())  # never understood


def own_classes(cls: type) -> list[type]:
    """The class and its bases, without those of known packages."""
    known = set(keras.layers.Layer.__mro__)
    return [
        c
        for c in cls.__mro__
        if c not in known
        and c.__module__ != "builtins"
        and not is_known(c.__module__)
    ]


def _may_count(value: Any) -> bool:
    """Whether an object is called, or gives something else every time."""
    return callable(value) or isinstance(value, collections.abc.Iterator)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet set
        return _MISSING
