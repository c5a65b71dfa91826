"""A profile as a file of JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from typing import Any

_FORMAT = "tfgpipe.profile 1"


def write_profile(profile: Any, path: Any) -> None:
    """Writes a `Profile`, whole or not at all.

    Args:
        profile: The profile.
        path: Of the file. A link stays one.
    """
    text = json.dumps({"format": _FORMAT, **dataclasses.asdict(profile)})
    target = os.path.realpath(os.fspath(path))
    folder, name = os.path.split(target)
    beside = os.path.join(folder, f".{uuid.uuid4().hex}.{name}")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, target)
    finally:
        if os.path.exists(beside):
            os.remove(beside)


def read_profile(file: Any) -> dict[str, Any]:
    """The values in a file that `write_profile` wrote.

    Raises:
        ValueError: If it is another file.
    """
    values = json.load(file)
    if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
        raise ValueError(f'it has no "format": "{_FORMAT}"')
    return values
