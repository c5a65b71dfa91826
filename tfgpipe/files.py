"""Files that are written whole or not at all; errors name files of models.

Folders: locked by one process at a time.

What is written goes to a file beside the one that is meant, and takes its place
when it is whole. Other than local files (addresses, open files, directories)
are left to Keras.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import re
import socket
import time
import uuid
import warnings
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def written_whole(path: Any, overwrite: bool = True) -> Iterator[Any]:
    """Inside, a file is written; after that it is at its path.

    Args:
        path: Where the user wants it.
        overwrite: Whether a file there may be replaced. If not, it is left to
            Keras to ask.

    Yields:
        Where to write it.

    Raises:
        OSError: If it cannot be written. What was there before is kept.
    """
    is_file = str(path).endswith((".keras", ".weights.h5"))
    is_local = isinstance(path, (str, os.PathLike)) and "://" not in str(path)
    asks = not overwrite and is_local and os.path.exists(path)
    if not is_file or not is_local or asks or os.path.isdir(path):
        yield path
        return
    try:
        with put_in_place(path) as beside:
            yield beside
    except OSError as error:
        text = (
            "`filepath` must be a file that can be written. Received: filepath="
            f"{str(path)!r}, and this error: {error.strerror or error}. A file "
            "that was there is as it was. Make room, or choose another path."
        )
        number = () if error.errno is None else (error.errno,)
        raise OSError(*number, text) from error


@contextlib.contextmanager
def put_in_place(path: str | os.PathLike[str]) -> Iterator[str]:
    """Inside, a file is written beside a path; after that it is there.

    What a kill leaves is for `clear_unfinished`.

    Yields:
        Where to write it.
    """
    target = os.path.realpath(path)  # a link stays one
    folder, name = os.path.split(target)
    beside = os.path.join(folder, f".{uuid.uuid4().hex}.{name}")
    try:
        yield beside
        if os.path.exists(beside):  # else nothing was written, on purpose
            to_disk(beside)
            os.replace(beside, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file of text, whole or not at all."""
    with (
        put_in_place(path) as beside,
        open(beside, "w", encoding="utf-8") as file,
    ):
        file.write(text)


def to_disk(path: str | os.PathLike[str]) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\..+")


def clear_unfinished(folder: pathlib.Path) -> None:
    """Deletes what killed processes have left that were writing there."""
    for path in folder.glob(".*"):
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


class DamagedFileError(OSError, ValueError):
    """A file is not one that was written whole.

    An `OSError` for `keras.callbacks.BackupAndRestore`, which then takes the
    file before.
    """


@contextlib.contextmanager
def read_whole(path: Any) -> Iterator[None]:
    """Inside, a file is read; errors say so if it is damaged.

    Raises:
        ValueError: If there is a file, but not one that was written whole.
    """
    try:
        if str(path).endswith(".keras") and os.path.isfile(path):
            with zipfile.ZipFile(path) as archive:
                lost = _MEMBERS.difference(archive.namelist())
            if lost:
                raise _damaged(path, f"It has no {', '.join(sorted(lost))}.")
        yield
    except (
        zipfile.BadZipFile,
        zlib.error,
        json.JSONDecodeError,
        OSError,
    ) as error:
        # Of HDF5, those that are about what is in a file have no number.
        is_told = isinstance(error, DamagedFileError)
        if is_told or getattr(error, "errno", None) is not None:
            raise
        raise _damaged(path, f"{type(error).__name__}: {error}.") from error


# What Keras reads from a file of a model.
_MEMBERS = {"config.json", "model.weights.h5"}


def _damaged(path: object, reason: str) -> DamagedFileError:
    return DamagedFileError(
        "The path must lead to a whole file, as Keras writes it. Received: "
        f"{str(path)!r}, which is damaged. {reason} It may have been cut off "
        "while it was written or copied: copy it again, or take an earlier one."
    )


class FolderLock:
    """Keeps a folder for one user of it, in this process or another.

    It is the system's, on a file `.lock` there: when this process ends, however
    that is, it is none any more; nor when this object is gone.

    Args:
        folder: It exists.
        argument: What the user calls it.

    Raises:
        ValueError: If it is in use; says by which process.
        OSError: If it cannot be written to, or `.lock` is a link.
    """

    def __init__(self, folder: pathlib.Path, argument: str) -> None:
        self._end: weakref.finalize | None = None
        if fcntl is None:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        file = os.open(folder / ".lock", flags, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 1000).decode(errors="replace")
            os.close(file)
            raise ValueError(
                f"`{argument}` must not be in use by another training. "
                f"Received: {argument}={str(folder)!r}, in use by "
                f"{holder or 'another process'}. Wait until that one has ended."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(file)
                raise
            warnings.warn(
                f"The file system of `{argument}` has no locks: see to it that "
                f"one training alone writes there. Received: {argument}="
                f"{str(folder)!r}, and this error: {error.strerror}.",
                stacklevel=2,
            )
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        text = f"process {os.getpid()} on {socket.gethostname()} since {now}"
        os.ftruncate(file, 0)
        os.write(file, text.encode())
        self._end = weakref.finalize(self, _close, file, os.getpid())
        _open.add(file)

    def release(self) -> None:
        """Lets another one have the folder."""
        if self._end is not None:
            self._end()


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_open: set[int] = set()


def _close(file: int, process: int) -> None:
    if os.getpid() == process:  # not again in one that was forked
        _open.discard(file)
        os.close(file)


def _forget_locks() -> None:
    """Has a forked process not keep what its parent has locked."""
    for file in _open:
        os.close(file)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
