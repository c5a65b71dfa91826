"""The checkpoints of a folder, and what each says of itself.

    folder/step-0000000100/manifest.json, values.index, values.data-...
    folder/step-0000000200/...
    folder/.unfinished-...      being written or deleted, or left by a kill

A checkpoint gets its name when it is whole and on the disk, and loses it before
any of its files is deleted. So whatever ends the process, all that has a name
is whole. One of the same step is named step-0000000200.1, and then takes the
place of the first.

The manifest of a checkpoint is a file beside the files of values:

    {"content": {"format": 1, "position": ..., "variables": ...,
                 "files": {"values.index": {"bytes": ..., "sha256": ...}, ...},
                 "monitored": ..., "versions": ...},
     "sha256": of the content}

A checkpoint is whole if its manifest is, and every file in it is what the
manifest says.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfgpipe.checks import checked_path
from tfgpipe.files import FolderLock, to_disk

Json = Any  # what JSON can hold

_UNFINISHED = ".unfinished-"

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


class Folder:
    """The checkpoints of one training.

    `path` is on this host or a file system that it mounts.

    Raises:
        ValueError: If it is an address, such as of a bucket; from `take`
            if another training has it.
        OSError: From `take`, if it cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]):
        checked = checked_path("folder", path)
        if "://" in os.fspath(path):
            raise ValueError(
                "`folder` must be a path of this host. Received: folder="
                f"{str(path)!r}. Mount the bucket, or copy checkpoints there."
            )
        self.path = checked.absolute()
        self._lock: FolderLock | None = None

    def take(self) -> None:
        """Makes the folder if need be, and keeps other trainings out.

        Clears what a kill has left there. Nothing is touched before it is
        certain that no other training writes there.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = FolderLock(self.path, "folder")
        for left in self.path.glob(f"{_UNFINISHED}*"):
            remove(left)
        # What cannot be written to shows now, and not after hours.
        probe = self._unfinished("probe")
        probe.mkdir()
        probe.rmdir()

    def release(self) -> None:
        """Lets another training have the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, in order; damaged ones too."""
        return sorted({step for step, _ in self._named()})

    def path_of(self, step: int) -> pathlib.Path:
        """Returns where the checkpoint of a step is, or would be."""
        same = [again for known, again in self._named() if known == step]
        return self._path(step, max(same, default=0))

    def begin(self, step: int) -> pathlib.Path:
        """Makes a folder in which the checkpoint of a step can be written."""
        unfinished = self._unfinished(self._path(step, 0).name)
        unfinished.mkdir()
        return unfinished

    def finish(self, unfinished: pathlib.Path, step: int) -> None:
        """Gives a checkpoint its name, once all of it is on the disk."""
        for path in unfinished.iterdir():
            to_disk(path)
        to_disk(unfinished)
        # One of the same step goes when the new one has its name.
        same = [again for known, again in self._named() if known == step]
        new = self._path(step, max(same) + 1 if same else 0)
        os.replace(unfinished, new)
        to_disk(self.path)
        for again in same:
            self._delete(self._path(step, again))

    def keep(self, count: int, mode: str, name: str | None, last: int) -> None:
        """Deletes all but the last `count`, and the best one.

        That is the "min" or "max" of what is monitored, if `name` is not None.
        What there is of later steps than `last`, the last one of this training,
        is damaged, and left.
        """
        steps = [step for step in self.steps() if step <= last]
        kept = set(steps[-count:])
        if values := self._monitored(name):
            best = min if mode == "min" else max
            kept.add(best(values, key=lambda step: (values[step], -step)))
        for step in steps:
            if step not in kept:
                path = self.path_of(step)
                with contextlib.suppress(Damaged):  # is left to the user
                    read_manifest(path, step)
                    self._delete(path)

    def best(self, mode: str, name: str | None) -> float | None:
        """Returns the best monitored value of all checkpoints, or None."""
        best = min if mode == "min" else max
        return best(self._monitored(name).values(), default=None)

    def _monitored(self, name: str | None) -> dict[int, float]:
        """Returns what was monitored, by step, where it is a number."""
        numbers = {}
        for step in self.steps():
            with contextlib.suppress(Damaged):
                said = read_manifest(self.path_of(step), step).monitored or {}
                is_number = not math.isnan(said.get("value", math.nan))
                if is_number and said["name"] == name:
                    numbers[step] = said["value"]
        return numbers

    def _named(self) -> list[tuple[int, int]]:
        """Returns the step of each checkpoint, and how many it had before."""
        if not self.path.is_dir():
            return []
        names = (_NAME.fullmatch(p.name) for p in self.path.iterdir())
        return [(int(n[1]), int(n[2] or 0)) for n in names if n]

    def _path(self, step: int, again: int) -> pathlib.Path:
        return self.path / f"step-{step:010d}{f'.{again}' if again else ''}"

    def _unfinished(self, name: str) -> pathlib.Path:
        return self.path / f"{_UNFINISHED}{uuid.uuid4().hex}-{name}"

    def _delete(self, path: pathlib.Path) -> None:
        # Without its name first: a kill leaves no half of a checkpoint.
        nameless = self._unfinished(path.name)
        os.replace(path, nameless)
        remove(nameless)


FORMAT = 1

NAME = "manifest.json"


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
    """The contents of a checkpoint, as it says.

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
    variables: Mapping[str, Sequence[Sequence[Json]]]
    files: Mapping[str, Mapping[str, Json]]
    monitored: Mapping[str, Json] | None
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


def read_manifest(folder: pathlib.Path, step: int | None = None) -> Manifest:
    """Returns the manifest of a checkpoint, whose name says `step`, if any.

    Raises:
        Damaged: If there is none, or it is not whole, or of another step.
    """
    path = folder / NAME
    if not path.is_file():  # a pipe is waited for
        raise Damaged(f"{NAME} is no file")
    try:
        text = json.loads(path.read_text("utf-8"))
        content = text["content"]
        is_whole = text["sha256"] == _digest(content)
        if is_whole and content["format"] != FORMAT:
            raise Damaged(f"{NAME} is of a newer version of tfgpipe")
        fields = {
            k: content[k] for k in Manifest.__annotations__ if k in content
        }
        fields["position"] = Position(**content["position"])
        fields |= {k: {**content[k]} for k in ("variables", "files")}
        manifest = Manifest(**fields)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(
            f"{NAME} cannot be read ({type(error).__name__})"
        ) from error
    if not is_whole or step not in (None, manifest.position.step):
        raise Damaged(f"{NAME} is not as it was written")
    return manifest


def remove(path: pathlib.Path) -> None:
    """Deletes a folder with what is in it, or a file, or a link alone."""
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path) if is_folder else path.unlink()


def check_files(folder: pathlib.Path, manifest: Manifest) -> None:
    """Compares all files of a checkpoint with its manifest.

    Raises:
        Damaged: At the first one that is missing or differs.
    """
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            is_same = path.is_file() and file_record(path) == expected
        except OSError:  # of a disk that is damaged itself
            is_same = False
        if not is_same:
            raise Damaged(f"{name} is not as it was written")


def file_record(path: pathlib.Path) -> dict[str, Json]:
    """Returns what a manifest says of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _digest(content: Json) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
