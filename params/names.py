"""The error for a name that does not exist."""

import difflib
from collections.abc import Iterable


def unknown(argument: str, name: str, known: Iterable[str]) -> str:
    """Says that `name` is unknown, and which name is nearest.

    Args:
        argument: What the name was given for.
        name: The name that does not exist.
        known: The names that do.

    Returns:
        Text for an error.

    Example:

    >>> unknown("color", "grren", ["green", "red"])
    "`color` must be one of green, red. Received: color='grren'. \
Did you mean 'green'?"
    """
    names = sorted(known)
    text = (
        f"`{argument}` must be one of {', '.join(names)}. "
        f"Received: {argument}={name!r}."
    )
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"{text} Did you mean {nearest[0]!r}?" if nearest else text
