"""Checkpoints of a training in `fit`."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.checkpoints import (
    Folder,
    Position,
    Restored,
    Writer,
    wait_for_all,
)
from tfgpipe.counts import checked_counts
from tfgpipe.versions import VERSION

# What a process ends with that has saved: sysexits.h's "try again later" for
# those that another program sends, and the next number for Ctrl-C.
EXIT_CODES = {"SIGTERM": 75, "SIGHUP": 75, "SIGINT": 76}
_MODES = ("auto", "min", "max")


class Checkpoint(keras.callbacks.Callback):
    """Saves a training now and then, in the background.

    `tfgpipe.restore` reads what this writes, into a model of any number of
    cells, micro-batches and replicas, or into one of plain Keras. A checkpoint
    is there as a whole or not at all, whatever ends the process. `fit` goes on
    while one is written, and waits only if the next one is due before.

    With workers on other hosts, each host writes the values that it has: all
    need the folder in common, under one path. Or else pass `shared=False`: then
    this process fetches and writes them all, and needs the memory for it.

    Args:
        folder: For this training alone. Made if need be.
        every: Steps from one checkpoint to the next; None for one at the end of
            each epoch. There is one at the end of `fit` in any case.
        keep: How many of the last ones are kept. Positive.
        best: Name of a number in `fit`'s logs, such as "val_loss", or None. The
            checkpoint of the epoch with the best one is kept besides, and there
            is one at the end of each epoch that is the best so far.
        mode: Whether the best is the "min" or the "max"; "auto" takes the
            largest accuracy or AUC, and the smallest of anything else.
        resumed: What `tfgpipe.restore` returned for this training, if it goes
            on within an epoch: so that batches are counted from there.
        shared: Whether all hosts have the folder in common.
        on_signal: Whether SIGTERM, SIGHUP and Ctrl-C (SIGINT) wait for the end
            of the mini-batch, save, and end the process: by `SystemExit`, with
            code 75, or 76 for Ctrl-C. A second signal does not wait.

    Raises:
        ValueError: If an argument is out of range; from `fit` if `best` is not
            in the logs, or `on_signal` is asked for outside of the main thread.
        OSError: From `fit`, if the folder cannot be written to, before it
            trains; or if a checkpoint could not be written. Those before are
            whole then, and the model can be trained on.

    Example:

    >>> import tempfile
    >>> import numpy as np
    >>> import tfgpipe
    >>> def make():
    ...     layers = [keras.Input((4,)), keras.layers.Dense(4)]
    ...     model = tfgpipe.GPipe(layers, num_partitions=1)
    ...     model.compile("adam", "mse")
    ...     return model
    >>> x, folder = np.ones((16, 4)), tempfile.mkdtemp()
    >>> save = Checkpoint(folder, every=3)
    >>> history = make().fit(x, x, 4, epochs=2, verbose=0, callbacks=[save])
    >>> restored = tfgpipe.restore(make(), folder, step=6)
    >>> restored.step, restored.epoch, restored.batch
    (6, 1, 2)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | None = None,
        *,
        keep: int = 3,
        best: str | None = None,
        mode: str = "auto",
        resumed: Restored | None = None,
        shared: bool = True,
        on_signal: bool = False,
    ) -> None:
        super().__init__()
        self._every = None
        if every is not None:
            (self._every,) = checked_counts(every=every)
        (keep,) = checked_counts(keep=keep)
        if mode not in _MODES:
            raise ValueError(
                f"`mode` must be one of {list(_MODES)}. Received: "
                f"mode={mode!r}."
            )
        self._best = best
        self._mode = _direction(best) if mode == "auto" else mode
        self._folder = Folder(folder)
        self._writer = Writer(
            self._folder,
            keep,
            self._mode,
            {
                "tfgpipe": VERSION,
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
            },
            shared,
        )
        self._resumed = resumed
        self._signals = _Signals() if on_signal else None
        self._step = self._epoch = self._batch = self._seen = 0
        self._is_due = False
        self._start = 0  # batches of the epoch that an earlier run has seen
        self._saved: int | None = None

    # ------------------------------------------------------ what Keras calls
    def on_train_begin(self, logs: dict | None = None) -> None:
        """Makes the folder, and finds out how far the training is."""
        wait_for_all()
        self._folder.make()
        self._step = steps_of(self.model)
        self._saved = None
        resumed = self._resumed
        is_same = resumed is not None and resumed.step == self._step
        self._start = resumed.batch if is_same and resumed else 0
        if self._signals is not None:
            self._signals.catch(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Counts the batches of the epoch."""
        self._epoch, self._seen = epoch, 0
        self._batch, self._start = self._start, 0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Saves if it is time."""
        # Of several steps of a call, Keras counts more at the end of the data.
        steps = self.params.get("steps") or batch + 1
        new, self._seen = min(batch + 1, steps) - self._seen, batch + 1
        before = self._step
        self._step += new
        self._batch += new
        self._writer.check()
        if self._signals is not None and self._signals.caught:
            self._end()
        self._is_due = self._has_passed(before)
        is_last = self._seen >= (self.params.get("steps") or math.inf)
        if self._is_due and not is_last:
            self._save(self._epoch, self._batch)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Saves if it is time, or the epoch was the best."""
        if self.params.get("steps") is None:
            self._step = min(self._step, steps_of(self.model))
        monitored = self._monitored(logs or {})
        # Where the length was not known, it was not known to be the end.
        is_due = self._every is None or self._is_due
        if is_due or self._is_best(monitored):
            self._save(epoch + 1, 0, monitored)
        self._epoch, self._batch = epoch + 1, 0
        if self._signals is not None and self._signals.caught:
            self._end()

    def on_train_end(self, logs: dict | None = None) -> None:
        """Saves the end, and waits until it is written."""
        if self._signals is not None:
            self._signals.release()
        if self._saved != self._step:
            self._save(self._epoch, self._batch)
        self._writer.wait()

    # ---------------------------------------------------------- what it does
    def _has_passed(self, before: int) -> bool:
        """Whether a multiple of `every` was passed since a step."""
        every = self._every
        return every is not None and self._step // every > before // every

    def _save(
        self, epoch: int, batch: int, monitored: dict | None = None
    ) -> None:
        position = Position(self._step, epoch, batch)
        self._writer.start(self.model, position, monitored)
        self._saved = self._step

    def _monitored(self, logs: dict[str, Any]) -> dict[str, Any] | None:
        if self._best is None:
            return None
        if self._best not in logs:
            raise ValueError(
                "`best` must be the name of a number in the logs of each "
                f"epoch. Received: best={self._best!r}, and logs of "
                f"{sorted(logs)}. Pass one of these, or `validation_data` to "
                "`fit`."
            )
        return {"name": self._best, "value": float(logs[self._best])}

    def _is_best(self, monitored: dict[str, Any] | None) -> bool:
        if monitored is None:
            return False
        self._writer.wait()
        best, value = self._folder.best(self._mode), monitored["value"]
        if best is None:
            return True
        return value < best if self._mode == "min" else value > best

    def _end(self) -> None:
        """Saves, and ends the process."""
        signals = self._signals
        if signals is None:
            return
        if self._saved != self._step:
            self._save(self._epoch, self._batch)
        self._writer.wait()
        signals.release()
        raise SystemExit(EXIT_CODES[signals.caught or "SIGTERM"])


def steps_of(model: keras.Model) -> int:
    """How many mini-batches a model has been trained on, skipped ones too."""
    optimizer = getattr(model, "optimizer", None)
    updates = 0 if optimizer is None else int(optimizer.iterations)
    return updates + getattr(model, "num_skipped", 0)


def _direction(name: str | None) -> str:
    """Whether the best value of a metric is the smallest or the largest."""
    text = (name or "").lower()
    is_large = "acc" in text or "auc" in text
    return "max" if is_large else "min"


class _Signals:
    """Notes signals until they can be dealt with.

    Attributes:
        caught: Name of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.caught: str | None = None
        self._model: Any = None
        self._before: dict[int, Any] = {}

    def catch(self, model: keras.Model) -> None:
        """Begins to note signals, instead of what they did before.

        Args:
            model: In whose `fit`. After an error in it, they do what they did.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "`on_signal` must be False outside of the main thread, where "
                "Python handles signals. Received: on_signal=True."
            )
        self.caught, self._model = None, model
        for name in EXIT_CODES:
            number = getattr(signal, name, None)  # not all are on Windows
            if number is not None and number not in self._before:
                self._before[number] = signal.signal(number, self._note)

    def release(self) -> None:
        """Lets signals do what they did before."""
        for number, before in self._before.items():
            with contextlib.suppress(ValueError):
                signal.signal(number, before)
        self._before.clear()

    def _note(self, number: int, frame: Any) -> None:
        is_second = self.caught is not None  # it does not wait
        if is_second or not self._is_in_fit(frame):
            self.release()
            os.kill(os.getpid(), number)
            return
        self.caught = signal.Signals(number).name

    def _is_in_fit(self, frame: Any) -> bool:
        """Whether `fit` is running: an error may have ended it."""
        while frame is not None:
            if (
                frame.f_code.co_name == "fit"
                and frame.f_locals.get("self") is self._model
            ):
                return True
            frame = frame.f_back
        return False
