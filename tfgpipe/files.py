"""Files: written whole or not at all; errors name those of models.

What is written goes to a file beside the one that is meant, and takes its place
when it is whole. Other than local files (addresses, open files, directories)
are left to Keras.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any


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
        raise _unwritten(path, error) from error


@contextlib.contextmanager
def put_in_place(path: str | os.PathLike[str]) -> Iterator[str]:
    """Inside, a file is written beside a path; after that it is there.

    Yields:
        Where to write it.
    """
    target = os.path.realpath(path)  # a link stays one
    folder, name = os.path.split(target)
    beside = os.path.join(folder, f".{uuid.uuid4().hex}.{name}")
    try:
        yield beside
        if os.path.exists(beside):  # else nothing was written, on purpose
            os.replace(beside, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)


def _unwritten(path: Any, error: OSError) -> OSError:
    left = "The file that was there is as it was."
    text = (
        "`filepath` must be a file that can be written. Received: filepath="
        f"{str(path)!r}, and this error: {error.strerror or error}. "
        f"{left if os.path.exists(path) else 'There is no such file now.'} "
        "The model can be saved again: make room on the disk, or choose "
        "another path."
    )
    return OSError(text) if error.errno is None else OSError(error.errno, text)


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
    if str(path).endswith(".keras") and os.path.isfile(path):
        with open(path, "rb") as file:  # or else says why not
            if not zipfile.is_zipfile(file):
                raise _damaged(path, "It is no zip archive, or part of one.")
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, json.JSONDecodeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}.") from error
    except OSError as error:
        # Of HDF5, those that are about what is in a file have no number.
        if error.errno is not None or isinstance(error, DamagedFileError):
            raise
        raise _damaged(path, f"{type(error).__name__}: {error}.") from error


def _damaged(path: Any, reason: str) -> DamagedFileError:
    return DamagedFileError(
        "The path must be that of a whole file, as Keras writes it. Received: "
        f"{str(path)!r}, which is damaged. {reason} It may have been cut off "
        "while it was written or copied: copy it again, or take an earlier one."
    )
