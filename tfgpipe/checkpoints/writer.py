"""Writes checkpoints while the training goes on.

    step 100      values are copied to the CPUs of the hosts that have them
    step 101 ...  meanwhile a thread has each host write its shard:
                  TensorFlow's writer, on the host, to the common folder
    then          checksums, the manifest, the disk, and the name

`tf.train.CheckpointOptions` can do this in the background too, but copies all
variables of all hosts into the memory of this process for it.
"""

from __future__ import annotations

import atexit
import contextlib
import pathlib
import threading
from collections.abc import Mapping
from typing import TypeAlias

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.checkpoints.folder import (
    Folder,
    Json,
    Manifest,
    Position,
    file_record,
    remove,
)
from tfgpipe.devices import names
from tfgpipe.versions import VERSION

Stored: TypeAlias = "keras.Variable | tf.Variable"

VALUES = "values"


class _Thread(threading.Thread):
    """Writes a checkpoint. The end of the process waits for it, see below."""


def wait_for_all() -> None:
    """Waits until this process writes no checkpoint any more.

    An error may have ended a training without that.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _Thread):
            thread.join()


def end_without_waiting() -> None:
    """Lets this process end while it writes: the user is in a hurry."""
    atexit.unregister(wait_for_all)


atexit.register(wait_for_all)


class Writer:
    """Writes checkpoints of a model, one at a time.

    The folder is made already. The last `keep` stay, and the best by `mode`,
    "min" or "max", of what `best` names, if that is not None. If `shared`, all
    hosts have the folder, and each writes its values; else this process writes
    them all.
    """

    def __init__(
        self,
        folder: Folder,
        keep: int,
        mode: str,
        best: str | None,
        shared: bool = True,
    ):
        self._folder = folder
        self._kept = keep, mode, best
        self._shared = shared
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(
        self,
        model: keras.Model,
        position: Position,
        monitored: Mapping[str, Json] | None,
    ) -> None:
        """Begins to write, once the checkpoint before is written.

        When it returns, the model may be trained on. `monitored` is a metric's
        "name" and "value", or None.

        Raises:
            OSError: If the one before could not be written.
        """
        self.wait()
        groups = contents(model)
        shards = _copied(groups, self._shared)
        manifest = Manifest(
            position,
            variable_records(groups),
            {},
            monitored,
            internals.optimizer_names(model),
            {
                "tfgpipe": VERSION,
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
            },
        )
        #     training   step 7 | copy | step 8 | step 9 | ...
        #     thread                   | write ...... |
        self._thread = _Thread(
            target=self._write, args=(shards, manifest), daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits for what is being written.

        Raises:
            OSError: If it could not be. The training is as it was.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises the error of the last checkpoint, if there was one."""
        error, self._error = self._error, None
        if error is None:
            return
        raise OSError(
            "A checkpoint must be written to `folder`. Received: folder="
            f"{str(self._folder.path)!r}, and this error: {error}. The "
            "checkpoints before are whole, and the model is as it was: make "
            "room, or choose another folder, and go on."
        ) from error

    def _write(
        self, shards: dict[str, dict[str, tf.Tensor]], manifest: Manifest
    ) -> None:
        step, unfinished = manifest.position.step, None
        try:
            # It gets its name when all of it is there: a kill leaves no half.
            unfinished = self._folder.begin(step)
            _write_values(unfinished, shards)
            shards.clear()  # lets the copies go
            files = {
                path.name: file_record(path)
                for path in sorted(unfinished.iterdir())
            }
            manifest._replace(files=files).write(unfinished)
            self._folder.finish(unfinished, step)
            self._folder.keep(*self._kept, step)
        except Exception as error:
            self._error = error  # told by `check`
            # A part of one would keep a full disk full.
            with contextlib.suppress(OSError):
                if unfinished is not None and unfinished.exists():
                    remove(unfinished)


def _copied(
    groups: dict[str, list[Stored]], shared: bool
) -> dict[str, dict[str, tf.Tensor]]:
    """Copies values: for each host, those that it writes, by their keys.

    On a CPU that is no copy, until a variable gets another value.
    """
    shards: dict[str, dict[str, tf.Tensor]] = {}
    for group, variables in groups.items():
        for i, variable in enumerate(map(storage, variables)):
            host = names.host_of(variable.device) if shared else "CPU:0"
            with tf.device(host):
                value = tf.identity(variable.read_value())
            shards.setdefault(host, {})[key(group, i)] = value
    return shards


def _write_values(
    folder: pathlib.Path, shards: dict[str, dict[str, tf.Tensor]]
) -> None:
    """Has each host write its values; merges the index of the files."""
    prefixes = []
    for i, (host, values) in enumerate(shards.items()):
        with tf.device(host):
            prefixes.append(str(folder / f"shard_{i}_of_{len(shards)}"))
            tf.raw_ops.SaveV2(
                prefix=prefixes[-1],
                tensor_names=[*values],
                shape_and_slices=[""] * len(values),
                tensors=[*values.values()],
            )
    missing = [p for p in prefixes if not pathlib.Path(f"{p}.index").exists()]
    if missing:
        raise OSError(
            f"{missing[0]}.index is not seen by this process. All hosts must "
            "have the folder in common, under one path, or `shared` be False"
        )
    with tf.device("CPU:0"):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes,
            destination_prefix=str(folder / VALUES),
            delete_old_dirs=False,
        )


def contents(model: keras.Model) -> dict[str, list[Stored]]:
    """Returns the variables of a training, by groups.

    Their order follows the layers, wherever they are: the same for a `GPipe`
    of any cells and replicas, and for a plain Keras model of the same layers.
    "model" has weights, state, seeds and metrics of layers; "optimizer" its
    slots, iterations and the like, if there is one, which is built; "skipped"
    is there for a `GPipe` that skips.
    """
    optimizer = getattr(model, "optimizer", None)
    skips = getattr(model, "skips", None)
    kept: list[Stored] = []
    if optimizer is not None:
        kept = [*optimizer.variables, *internals.unlisted(optimizer)]
    return {
        "model": [*model.variables],
        "optimizer": kept,
        "skipped": [] if skips is None else [*skips.lasting.values()],
    }


def storage(variable: Stored) -> tf.Variable:
    """Returns what holds a variable's value."""
    is_keras = isinstance(variable, keras.Variable)
    return variable.value if is_keras else variable


def variable_records(
    groups: dict[str, list[Stored]],
) -> dict[str, list[list[Json]]]:
    """Returns the name, shape and dtype of each variable, for JSON."""
    return {
        group: [
            [
                getattr(v, "path", v.name),
                [int(n) for n in v.shape],
                tf.as_dtype(v.dtype).name,
            ]
            for v in variables
        ]
        for group, variables in groups.items()
    }


def key(group: str, index: int) -> str:
    """Returns what the values of a variable are called in the files."""
    return f"{group}/{index}"
