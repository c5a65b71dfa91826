"""Signals that end a training, but not within a mini-batch."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
from typing import Any

import keras

# What a process ends with that has saved: sysexits.h's "try again later" for
# those that another program sends, and the next number for Ctrl-C.
EXIT_CODES = {"SIGTERM": 75, "SIGHUP": 75, "SIGINT": 76}


class Signals:
    """Notes signals until they can be dealt with.

    Args:
        owner: The callback that deals with them.

    Attributes:
        caught: Name of the signal that came, or None.
    """

    def __init__(self, owner: keras.callbacks.Callback) -> None:
        self._owner = owner
        self.caught: str | None = None
        self._model: Any = None
        self._before: dict[int, Any] = {}

    def catch(self, model: keras.Model) -> None:
        """Begins to note signals, instead of what they did before.

        One that the process ignores, as `nohup` asks for, stays ignored.

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
            if number is None or number in self._before:
                continue
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def release(self) -> None:
        """Lets signals do what they did before."""
        for number, before in list(self._before.items()):
            # Another one may have come after this, which hands on to it.
            if signal.getsignal(number) == self._note:
                with contextlib.suppress(ValueError):
                    signal.signal(number, before)
                del self._before[number]
        self._model = None

    def is_asked(self) -> bool:
        """Whether a signal came in the `fit` that this is called from."""
        return self.caught is not None and self._is_in_fit(
            inspect.currentframe()
        )

    def _note(self, number: int, frame: Any) -> None:
        is_second = self.caught is not None  # it does not wait
        if not is_second and self._is_in_fit(frame):
            self.caught = signal.Signals(number).name
            return
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _is_in_fit(self, frame: Any) -> bool:
        """Whether `fit` runs with the callback: an error may have ended it."""
        while frame is not None:
            known = frame.f_locals
            if (
                frame.f_code.co_name == "fit"
                and self._model is not None
                and known.get("self") is self._model
            ):
                given = known.get("callbacks") or []
                inside = getattr(given, "callbacks", given)
                return any(one is self._owner for one in inside)
            frame = frame.f_back
        return False
