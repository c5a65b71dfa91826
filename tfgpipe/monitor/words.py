"""Kinds of tasks and times in words."""

from __future__ import annotations


def name(kind: str) -> str:
    """A kind of task, in words."""
    return kind.replace("_", " ")


def seconds(value: float) -> str:
    """A time with its unit.

    Example:

    >>> seconds(0.0123), seconds(1.234), seconds(81.2)
    ('12.3 ms', '1,234 ms', '81.2 s')
    """
    if value >= 10:
        return f"{value:,.1f} s"
    return f"{1000 * value:,.{0 if value >= 0.1 else 1}f} ms"
