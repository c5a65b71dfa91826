"""Notices devices that hang while the Python of their host lives.

Where no step ends for a while, a small operation is asked of each device of a
host, by a thread of its own. A device that computes has it done in the end; one
that hangs has not. A step may take minutes, and an operation may wait for all
of it: so what is waited for is a minute, or three times the longest step, if
that is more. The first step, which traces and compiles, and the second one,
which shows how long steps take, are not looked at.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.hosts import link


class Progress(keras.callbacks.Callback):
    """Counts the steps that have ended.

    Attributes:
        count: Their number.
        is_training: Whether more are to come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.is_training = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """From here on, steps are expected."""
        self.is_training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """They are no more: what comes then is not told."""
        self.is_training = False

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts one."""
        self.count += 1

    def on_test_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts one."""
        self.count += 1


def wait_until_silent(
    progress: Progress,
    names: Sequence[str],
    ask: Callable[[Sequence[str]], threading.Event] | None = None,
) -> float:
    """Returns when no step ends and devices do not answer.

    Its waits are counted, not the time: that in which this process was stopped
    does not count.

    Args:
        progress: The steps that have ended.
        names: Of the devices.
        ask: Asks them for a sign of life; its event is set when all have
            given one.

    Returns:
        For how many seconds they have not answered.
    """
    ask = ask or ask_devices
    seen, waits, longest, silent = 0, 0, link.BEATS, 0
    asked: threading.Event | None = None
    while silent < longest:
        time.sleep(link.BEAT)
        waits += 1
        if progress.count != seen:
            if seen:
                longest = max(longest, 3 * waits)
            seen, waits, silent, asked = progress.count, 0, 0, None
        elif not progress.is_training:
            waits, silent, asked = 0, 0, None
        elif seen < 2:
            pass
        elif asked is None or asked.is_set():
            asked, silent = ask(names), 0
        else:
            silent += 1
    return silent * link.BEAT


def ask_devices(names: Sequence[str]) -> threading.Event:
    """Asks devices for a sign of life."""
    answered = threading.Event()

    def ask() -> None:
        try:
            for name in names:
                with tf.device(name):
                    (tf.constant(1.0) + 1.0).numpy()
        except tf.errors.OpError:
            pass  # the host is lost, which others notice and tell
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered
