"""Counts that the user gives: integers of at least 1, whatever their type.

What Python takes for an index is an integer, NumPy's among them; a boolean, a
float and a text are none.
"""

from __future__ import annotations

import operator
from typing import Any


def as_integer(value: Any) -> int | None:
    """The value as an integer of Python's, or None if it is no integer."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def as_count(value: Any) -> int | None:
    """The value as an integer of Python's, or None if it is no count."""
    found = as_integer(value)
    return None if found is None or found < 1 else found


def count_problem(name: str, value: Any) -> str:
    """What is wrong with an argument that is no count."""
    return (
        f"`{name}` must be an integer of at least 1. "
        f"Received: {name}={value!r}."
    )


def checked_counts(**counts: Any) -> list[int]:
    """Arguments as integers of Python's.

    Raises:
        ValueError: With all that are no counts.

    Example:

    >>> checked_counts(num_replicas=2, num_partitions=1)
    [2, 1]
    """
    found = {name: as_count(value) for name, value in counts.items()}
    bad = [name for name, count in found.items() if count is None]
    if bad:
        problems = [count_problem(name, counts[name]) for name in bad]
        raise ValueError("\n".join(problems))
    return [count for count in found.values() if count is not None]
