"""Files of models: written whole or not at all; errors name them.

What is written goes to a file beside the one that is meant, and takes its place
when it is whole. Other than local files (addresses, open files, directories)
are left to Keras.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import h5py
import keras

from tfgpipe import internals


class Filed(keras.Model):
    """The part of `GPipe` that writes and reads files, as Keras does."""

    def save(
        self,
        filepath: Any,
        overwrite: bool = True,
        zipped: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes a `.keras` file, see `keras.Model.save`.

        Raises:
            ValueError: If the file is of the older HDF5 format, which has no
                place for a `GPipe`.
            OSError: If it cannot be written. What was there is kept.
        """
        if str(filepath).endswith((".h5", ".hdf5")):
            raise ValueError(
                "`filepath` must end in '.keras'. Received: "
                f"filepath={str(filepath)!r}, of the older HDF5 format, from "
                "which Keras cannot load a `GPipe`. Save to '.keras', or the "
                "weights alone by `save_weights` to '.weights.h5'."
            )
        _warn_of_unlisted(self)
        with written_whole(filepath, overwrite) as path:
            super().save(path, overwrite, zipped, **kwargs)

    def save_weights(
        self,
        filepath: Any,
        overwrite: bool = True,
        max_shard_size: float | None = None,
    ) -> None:
        """Writes a `.weights.h5` file, see `keras.Model.save_weights`.

        Raises:
            OSError: If it cannot be written. What was there is kept.
        """
        _warn_of_unlisted(self)
        if max_shard_size is not None:  # several files, left to Keras
            super().save_weights(filepath, overwrite, max_shard_size)
            return
        with written_whole(filepath, overwrite) as path:
            super().save_weights(path, overwrite)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Loads what `save_weights` wrote, see `keras.Model.load_weights`.

        The optimizer's state is loaded even if it has made no step yet.

        Raises:
            ValueError: If the file is damaged, or that of another model.
        """
        with read_whole(filepath):
            if self.built and _holds_optimizer(filepath):
                self.build_optimizer()
            super().load_weights(filepath, *args, **kwargs)


def _warn_of_unlisted(model: keras.Model) -> None:
    """Warns of an optimizer's state for which Keras's files have no place."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and internals.unlisted(optimizer):
        names = " of ".join(internals.optimizer_names(model))
        warnings.warn(
            "Keras's files leave out what this optimizer keeps for all weights "
            "together: a training that goes on from one has other numbers than "
            f"one that was not interrupted. Received: {names}. Go "
            "on from what `tfgpipe.callbacks.Checkpoint` writes.",
            stacklevel=3,
        )


def _holds_optimizer(path: Any) -> bool:
    """Whether a file of `save_weights` has the state of an optimizer."""
    if not str(path).endswith(".weights.h5"):
        return False
    with h5py.File(path) as file:
        return len(file.get("optimizer/vars", ())) > 0


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
    target = os.path.realpath(path)  # a link stays one
    folder, name = os.path.split(target)
    beside = os.path.join(folder, f".{uuid.uuid4().hex}.{name}")
    try:
        yield beside
        if os.path.exists(beside):  # else nothing was written, on purpose
            os.replace(beside, target)
    except OSError as error:
        raise _unwritten(path, target, error) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(beside)


def _unwritten(path: Any, target: str, error: OSError) -> OSError:
    left = "The file that was there is as it was."
    text = (
        "`filepath` must be a file that can be written. Received: filepath="
        f"{str(path)!r}, and this error: {error.strerror or error}. "
        f"{left if os.path.exists(target) else 'There is no such file now.'} "
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

    Args:
        path: What the user gave.

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
