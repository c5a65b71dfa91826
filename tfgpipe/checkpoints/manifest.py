"""What a checkpoint says of itself: a file beside those of the values.

    {"content": {"format": 1, "position": ..., "variables": ...,
                 "files": {"values.index": {"bytes": ..., "sha256": ...}, ...},
                 "monitored": ..., "versions": ...},
     "sha256": of the content}

A checkpoint is whole if its manifest is, and every file in it is what the
manifest says. Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FORMAT = 1
NAME = "manifest.json"
_BLOCK = 1 << 20


class Position(NamedTuple):
    """Where in its data a training is.

    Attributes:
        step: Mini-batches that it has seen, skipped ones too.
        epoch: Index of the epoch that the next mini-batch belongs to.
        batch: Mini-batches of that epoch that it has seen.
    """

    step: int
    epoch: int
    batch: int


class Manifest(NamedTuple):
    """What a checkpoint says of itself.

    Attributes:
        position: Where in its data the training was.
        variables: For each group of variables, such as "model", a list of
            [name, shape, dtype], in their order.
        files: For each file, its "bytes" and its "sha256".
        monitored: A metric's "name" and "value", by which it may be the best
            one; or None.
        optimizer: Names of the classes of the optimizer, and of those in it.
        versions: Of the libraries that wrote it, by name.
    """

    position: Position
    variables: Mapping[str, Sequence[Sequence[Any]]]
    files: Mapping[str, Mapping[str, Any]]
    monitored: Mapping[str, Any] | None
    optimizer: Sequence[str]
    versions: Mapping[str, str]

    def write(self, folder: pathlib.Path) -> None:
        """Writes it into the folder of the checkpoint, to the disk."""
        content = {
            "format": FORMAT,
            **self._asdict(),
            "position": self.position._asdict(),
        }
        text = json.dumps({"content": content, "sha256": _digest(content)})
        path = folder / NAME
        path.write_text(text, "utf-8")
        to_disk(path)


class Damaged(Exception):
    """Why a checkpoint cannot be used, in words."""


def read(folder: pathlib.Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        Damaged: If there is none, or it is not whole.
    """
    try:
        found = json.loads((folder / NAME).read_text("utf-8"))
        content = found["content"]
        is_whole = found["sha256"] == _digest(content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Damaged(
            f"{NAME} cannot be read ({type(error).__name__})"
        ) from error
    if not is_whole:
        raise Damaged(f"{NAME} is not as it was written")
    if content.pop("format") != FORMAT:
        raise Damaged(f"{NAME} is of a newer version of tfgpipe")
    position = Position(**content.pop("position"))
    return Manifest(position, **content)


def check_files(folder: pathlib.Path, manifest: Manifest) -> None:
    """Compares all files of a checkpoint with its manifest.

    Raises:
        Damaged: At the first one that is missing or differs.
    """
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise Damaged(
                f"{name} has {path.stat().st_size:,} bytes instead of "
                f"{expected['bytes']:,}"
            )
        try:
            found = described(path)
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error}") from error
        if found != expected:
            raise Damaged(f"{name} is not as it was written")


def described(path: pathlib.Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def to_disk(path: pathlib.Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
