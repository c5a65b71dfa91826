"""The error for a name that does not exist."""

import difflib
from collections.abc import Iterable


def unknown(
    argument: str, name: str, known: Iterable[str], rest: str | None = None
) -> str:
    """Says that `name` is unknown, and which name is nearest.

    Args:
        argument: What the name was given for.
        name: The name that does not exist.
        known: The names that do.
        rest: Says where all names are; by default they are listed.

    Example:

    >>> unknown("color", "grren", ["green", "red"])
    "`color` must be a known name. Received: color='grren'. \
Did you mean 'green'? Known are green, red."
    """
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    return " ".join(
        [
            f"`{argument}` must be a known name.",
            f"Received: {argument}={name!r}.",
            *(f"Did you mean {near!r}?" for near in nearest),
            rest or f"Known are {', '.join(names)}.",
        ]
    )
