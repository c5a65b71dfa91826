"""Saves a training in `fit`: in the background, and at signals that end it."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import pathlib
import signal
import threading
import warnings
import weakref
from types import FrameType
from typing import Any

import keras

from tfgpipe.checkpoints import (
    Folder,
    Position,
    Restored,
    Writer,
    end_without_waiting,
    is_known_damaged,
    known_steps_of,
    steps_of,
    wait_for_all,
)
from tfgpipe.checks import checked_bool, checked_choice, checked_counts


class Checkpoint(keras.callbacks.Callback):
    """Saves a training now and then, in the background.

    `tfgpipe.restore` reads what this writes, into a model of any number of
    cells, micro-batches and replicas, or into one of plain Keras. A checkpoint
    is there as a whole or not at all, whatever ends the process. `fit` goes on
    while one is written, and waits only if the next one is due before.

    With workers on other hosts, each host writes the values that it has: all
    need the folder in common, under one path. Or else pass `shared=False`: then
    this process fetches and writes them all, and needs the memory for it.

    Put it after callbacks that end a training, such as
    `keras.callbacks.EarlyStopping`: it saves at the end of the last epoch, when
    the weights are as training left them, not the best or the averaged ones.

    Args:
        folder: For this training, and this callback, alone. Made if need be,
            and locked while `fit` runs.
        every: Steps from one checkpoint to the next; None for one at the end of
            each epoch. There is one at the end of the last epoch in any case.
        keep: How many of the last ones are kept. Positive.
        best: Name of a number in `fit`'s logs, such as "val_loss", or None. The
            checkpoint of the epoch with the best one is kept besides, and there
            is one at the end of each epoch that is the best so far.
        mode: Whether the best is the "min" or the "max"; "auto" takes the
            largest accuracy or AUC, and the smallest of anything else.
        resumed: What `tfgpipe.restore` returned for this training, if it goes
            on within an epoch: so that its batches are counted from there.
        shared: Whether all hosts have the folder in common.
        on_signal: Whether SIGTERM, SIGHUP and Ctrl-C (SIGINT) wait for the end
            of the mini-batch, or of the validation that runs, save, and end
            the process: by `SystemExit`, with code 75, or 76 for Ctrl-C. A
            second signal does not wait. One that the process ignores, as under
            `nohup`, stays ignored.

    Raises:
        ValueError: If an argument is out of range; from `fit` if `on_signal` is
            asked for outside of the main thread, another training has the
            folder, in this process or another, or it has checkpoints of later
            steps than the model is at.
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
        checked_choice("mode", mode, ("auto", "min", "max"))
        checked_bool("shared", shared)
        checked_bool("on_signal", on_signal)
        for name, value, kind, what in (
            ("best", best, str, "the name of a number in the logs"),
            ("resumed", resumed, Restored, "what `tfgpipe.restore` returned"),
        ):
            if value is not None and not (isinstance(value, kind) and value):
                raise ValueError(
                    f"`{name}` must be {what}. Received: {name}={value!r}."
                )
        self._best = best
        if mode == "auto":
            name = (best or "").lower()
            mode = "max" if "acc" in name or "auc" in name else "min"
        self._mode = mode
        self._folder = Folder(folder)
        self._writer = Writer(self._folder, keep, mode, best, shared)
        self._resumed = resumed
        self._signals = Signals(self) if on_signal else None
        self._thread = threading.current_thread()  # of the last `fit`
        self._step = self._epoch = self._batch = self._seen = 0
        self._epoch_after = self._counted = 0
        self._is_due = self._is_new = self._is_used = False
        self._start = 0  # batches of the epoch that an earlier run has seen

    # ------------------------------------------------------ what Keras calls
    def on_train_begin(self, logs: dict | None = None) -> None:
        """Makes the folder, and finds out how far the training is."""
        wait_for_all()
        self._take_folder()
        resumed = self._resumed
        self._step = known_steps_of(self.model)
        if resumed is not None and not self._is_used:
            self._step, self._start = resumed.step, resumed.batch
        self._is_used, self._is_new = True, False
        # New checkpoints would be the older ones.
        later = [
            step
            for step in self._folder.steps()
            if step > self._step and not is_known_damaged(self.model, step)
        ]
        if later:
            self._folder.release()
            raise ValueError(
                "`folder` must have no checkpoints of later steps than the "
                f"model is at. Received: folder={str(self._folder.path)!r} "
                f"with steps {later}, and a model at step {self._step}. Call "
                "`tfgpipe.restore(model, folder)`, or use another folder."
            )
        if self._signals is not None:
            self._signals.catch()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Counts the batches of the epoch."""
        self._epoch, self._seen, self._epoch_after = epoch, 0, epoch + 1
        self._batch, self._start = self._start, 0
        self._counted = steps_of(self.model)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Saves if it is time."""
        # Of several steps of a call, Keras counts more at the end of the data.
        seen = min(batch + 1, self._steps or batch + 1)
        new, self._seen = seen - self._seen, seen
        before = self._step
        self._step += new
        self._batch += new
        self._is_new = True
        self._writer.check()
        self._end_if_asked()
        every = self._every  # a multiple of which is passed
        self._is_due = (
            every is not None and self._step // every > before // every
        )
        if self._is_due and self._seen != self._steps:
            self._save()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Saves if it is time, or the epoch was the best."""
        if self._steps is None and self.model.steps_per_execution > 1:
            more = self._seen - (steps_of(self.model) - self._counted)
            self._step -= max(0, more)
        if self._steps is None or self._seen == self._steps:
            self._epoch, self._batch = epoch + 1, 0
        monitored: dict[str, Any] | None = None
        if self._best is not None:
            value = float((logs or {})[self._best])
            monitored = {"name": self._best, "value": value}
        is_last = epoch + 1 >= self.params.get("epochs", math.inf)
        is_last = is_last or self.model.stop_training
        # Where the length was not known, it was not known to be the end.
        is_due = self._every is None or self._is_due or is_last
        if (is_due and self._seen) or (
            monitored and self._is_best(monitored["value"])
        ):
            self._save(monitored)
        self._end_if_asked()

    def on_train_end(self, logs: dict | None = None) -> None:
        """Waits until the last one is written."""
        self._writer.wait()
        self._folder.release()
        if self._is_new:
            warnings.warn(
                "`Checkpoint` must come after callbacks that end a training. "
                f"Received: the end after step {self._step}, of which there is "
                "no checkpoint.",
                stacklevel=2,
            )
        if self._signals is not None:
            self._signals.end()

    # ---------------------------------------------------------- what it does
    def _take_folder(self) -> None:
        """Keeps other trainings out until this one ends.

        An error may have ended one of this process without a word: it has the
        folder no longer than it runs.
        """
        path = self._folder.path.resolve()
        thread = threading.current_thread()
        other = _holders.get(path)
        if other is not None and (
            not other._thread.is_alive()
            or (
                other._thread is thread
                and not _fits_with(other, inspect.currentframe())
            )
        ):
            other._folder.release()
        self._folder.take()
        _holders[path], self._thread = self, thread

    def _save(self, monitored: dict | None = None) -> None:
        position = Position(self._step, self._epoch, self._batch)
        self._writer.start(self.model, position, monitored)
        self._is_new = False

    @property
    def _steps(self) -> int | None:
        """Those of an epoch in this `fit`, if it is known."""
        return self.params.get("steps")

    def _is_best(self, value: float) -> bool:
        self._writer.wait()
        best = self._folder.best(self._mode, self._best)
        if best is None:
            return not math.isnan(value)
        return value < best if self._mode == "min" else value > best

    def _end_if_asked(self) -> None:
        """After a signal, saves, and ends the process."""
        if self._signals is None or not self._signals.caught:
            return
        if self._seen == self._steps:
            self._epoch, self._batch = self._epoch_after, 0
        if self._is_new:
            self._save()
        self._writer.wait()
        self._folder.release()
        self._signals.end()


# By a folder, who has it.
_holders: weakref.WeakValueDictionary[pathlib.Path, Checkpoint] = (
    weakref.WeakValueDictionary()
)


def _fits_with(
    callback: keras.callbacks.Callback, frame: FrameType | None
) -> bool:
    """Returns whether a frame is called from a `fit` with a callback."""
    while frame is not None:
        if frame.f_code.co_name == "fit":
            callbacks = frame.f_locals.get("callbacks")
            listed = getattr(callbacks, "callbacks", callbacks)
            listed = listed if isinstance(listed, (list, tuple)) else [listed]
            if any(known is callback for known in listed):
                return True
        frame = frame.f_back
    return False


# What a process ends with that has saved: sysexits.h's "try again later" for
# those that another program sends, and the next number for Ctrl-C.
EXIT_CODES = {"SIGTERM": 75, "SIGHUP": 75, "SIGINT": 76}


class Signals:
    """Notes signals until they can be dealt with.

    Attributes:
        caught: Name of the signal that came, or None.
    """

    def __init__(self, owner: keras.callbacks.Callback) -> None:
        self._owner = owner
        self.caught: str | None = None
        self._is_on = False
        self._before: dict[int, Any] = {}

    def catch(self) -> None:
        """Begins to note signals, instead of what they did before.

        One that the process ignores, as `nohup` asks for, stays ignored. After
        an error in `fit` they do what they did.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "`on_signal` must be False outside of the main thread, where "
                "Python handles signals. Received: on_signal=True."
            )
        self.caught, self._is_on = None, True
        for name in EXIT_CODES:
            number = getattr(signal, name, None)  # not all are on Windows
            if number is None or number in self._before:
                continue
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def end(self) -> None:
        """Lets signals do what they did before, and ends as one has asked."""
        for number, before in list(self._before.items()):
            # Another one may have come after this, which hands on to it.
            if signal.getsignal(number) == self._note:
                with contextlib.suppress(ValueError):
                    signal.signal(number, before)
                del self._before[number]
        self._is_on = False
        if self.caught is not None:
            raise SystemExit(EXIT_CODES[self.caught])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:  # the second one does not wait
            end_without_waiting()
        elif self._is_on and _fits_with(self._owner, frame):
            self.caught = signal.Signals(number).name
            return
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
