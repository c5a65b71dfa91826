"""Checks of what the user gives: counts, numbers, choices, paths.

What Python takes for an index is an integer, NumPy's among them; a boolean, a
float and a text are none. Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard


def as_integer(value: Any) -> int | None:
    """Returns the value as an integer of Python's, or None if it is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, AttributeError):  # the latter of tensors of floats
        return None


def as_count(value: Any) -> int | None:
    """Returns the value as an integer of Python's; None if it is no count."""
    number = as_integer(value)
    return None if number is None or number < 1 else number


def _problem(name: str, value: object, what: str) -> str:
    return f"`{name}` must be {what}. Received: {name}={value!r}."


def checked_counts(**counts: Any) -> list[int]:
    """Returns arguments as integers of Python's.

    Example:

    >>> checked_counts(num_replicas=2, num_partitions=1)
    [2, 1]
    """
    what = "an integer of at least 1"
    bad = [(n, v) for n, v in counts.items() if as_count(v) is None]
    if bad:
        raise ValueError("\n".join(_problem(*item, what) for item in bad))
    return [operator.index(value) for value in counts.values()]


def checked_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Returns one of these texts, or raises a `ValueError` that names them.

    Example:

    >>> checked_choice("mode", "min", ["min", "max"])
    'min'
    """
    if isinstance(value, str) and value in choices:
        return str(value)
    raise ValueError(_problem(name, value, f"one of {list(choices)}"))


def checked_bool(name: str, value: object) -> bool:
    """Returns True or False, or raises a `ValueError`."""
    # NumPy's booleans are no `bool`, and this module does not import it.
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise ValueError(_problem(name, value, "True or False"))


def is_amount(value: object) -> TypeGuard[float]:
    """Returns whether a value is a number from 0 that a float can be."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return 0 <= float(value) < math.inf
    except OverflowError:
        return False


def checked_amount(name: str, value: object, what: str) -> float:
    """Returns a finite number from 0, or raises a `ValueError`.

    Example:

    >>> checked_amount("link", 0, "the time of a transfer")
    0.0
    """
    if is_amount(value):
        return float(value)
    raise ValueError(_problem(name, value, f"a finite number from 0, {what}"))


def checked_positive(name: str, value: object, what: str) -> float:
    """Returns a finite number above 0, or raises a `ValueError`.

    Example:

    >>> checked_positive("seconds", 3, "for how long to measure")
    3.0
    """
    if is_amount(value) and float(value) > 0:
        return float(value)
    raise ValueError(_problem(name, value, f"a finite number above 0, {what}"))


def checked_path(name: str, value: Any) -> pathlib.Path:
    """Returns the path of a file or a folder, or raises a `ValueError`."""
    try:
        text = os.fspath(value)
    except TypeError:
        text = b""
    if isinstance(text, str) and text:
        return pathlib.Path(text)
    what = "a path, as a text or a `pathlib.Path`"
    raise ValueError(_problem(name, value, what))


def checked_sink(name: str, value: object) -> Callable[[str], object]:
    """Returns a function of sentences; for None one that drops them."""
    if value is None:
        return lambda sentence: None
    if callable(value):
        return value
    what = "a function of a sentence, such as `print`, or None for silence"
    raise ValueError(_problem(name, value, what))
