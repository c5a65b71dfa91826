"""How `tools.train` ends: its exit codes, and signals at any moment.

In `fit`, signals are those of `tfgpipe.callbacks.Checkpoint`, which saves. What
comes before, after, or a second time is dealt with here. Imports nothing that
takes long: what is caught first is the import of TensorFlow.
"""

import enum
import os
import signal
import sys
import threading
from typing import Any


class Code(enum.IntEnum):
    """What the program ends with; those from 70 on are of sysexits.h."""

    FINISHED = 0
    DIFFERENT = 1  # compared weights, or what --check finds
    REFUSED = 2  # flags or files; nothing was trained
    LOST = 3  # another host; that of `tfgpipe.hosts`
    NOT_FINITE = 4
    BROKEN = 70  # an error that nobody has foreseen
    FILES = 74  # could not be read or written, after all was checked
    PREEMPTED = 75  # SIGTERM or SIGHUP
    STOPPED = 76  # Ctrl-C, and there is a --train_dir
    INTERRUPTED = 130  # Ctrl-C, and there is none


class Stopped(SystemExit):
    """A signal came."""

    code: int


_PATIENCE = 20.0  # seconds for what a signal has ended to end
_NAMES = ("SIGTERM", "SIGHUP", "SIGINT")
_state = {"is_importing": False, "is_ending": False}


def catch_signals() -> None:
    """Has signals end this process with a code of the table, from now on.

    One that the process ignores, as under `nohup`, stays ignored.
    """
    _state.update(is_importing=True, is_ending=False)
    for name in _NAMES:
        number = getattr(signal, name, None)  # not all are on Windows
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def has_imported() -> None:
    """From now on there may be something to clean up."""
    _state["is_importing"] = False


def code_of(number: int) -> Code:
    """What a signal ends this process with."""
    if number != signal.SIGINT:
        return Code.PREEMPTED
    words = [word.lstrip("-") for word in sys.argv[1:]]
    has_folder = any(word.partition("=")[0] == "train_dir" for word in words)
    return Code.STOPPED if has_folder else Code.INTERRUPTED


def _end(number: int, frame: Any) -> None:
    code = code_of(number)
    # An import may swallow what is raised in it, and has nothing to lose.
    if _state["is_importing"] or _state["is_ending"]:
        os._exit(code)
    _state["is_ending"] = True
    # So may what runs now; or it waits for what does not come.
    watch = threading.Timer(_PATIENCE, os._exit, (code,))
    watch.daemon = True
    watch.start()
    raise Stopped(int(code))
