"""How far a program is: a line on a terminal, and words in a long silence.

What a program does is noted by `doing` and `Progress`, one inside the other. A
thread, of `speaking`, says it when nothing was written for ten seconds.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_QUIET = 10.0  # seconds, until it is said; twice as many until it is said again


class _Doing:
    """What is done; without words, nothing is said of it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.quiet = _QUIET
        self.start = time.monotonic()
        self.refresh: Callable[[], None] | None = None  # where it is shown

    def __str__(self) -> str:
        return f"{self.what}, {time.monotonic() - self.start:.0f} s"


_now: list[_Doing] = []  # the innermost last


def _forget(one: _Doing) -> None:
    with contextlib.suppress(ValueError):
        _now.remove(one)


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Notes what is done inside, for `speaking`.

    Args:
        what: In words, as "building the model". Empty for what is to be silent,
            such as waiting for somebody.
    """
    one = _Doing(what)
    _now.append(one)
    try:
        yield
    finally:
        _forget(one)


class Progress:
    """Counts on the standard error, in one line, unless that is no terminal.

    Args:
        what: Stands before the count.
        total: How many there will be, or None.
        is_hidden: Whether to show nothing in any case.
    """

    def __init__(
        self, what: str, total: int | None = None, is_hidden: bool = False
    ) -> None:
        self._what = what
        self._of = "" if total is None else f" of {total}"
        self._done = 0
        self._doing = _Doing("")
        self._shows = sys.stderr.isatty() and not is_hidden
        self._is_hidden = is_hidden
        if self._shows:
            self._doing.refresh = self._show
        _now.append(self._doing)
        self.add(0)

    def add(self, count: int) -> None:
        """Counts so many more."""
        self._done += count
        if not self._is_hidden:
            self._doing.what = f"{self._what}: {self._done}{self._of}"
        self._show()

    def close(self) -> None:
        """Takes the line away."""
        _forget(self._doing)
        self._write("")

    def _show(self) -> None:
        self._write(str(self._doing))

    def _write(self, text: str) -> None:
        if self._shows:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Counts, see `Progress`, what is done one by one.

    Args:
        items: What is done.
        what: Stands before the count.
    """
    known = list(items)
    shown = Progress(what, len(known))
    try:
        for item in known:
            yield item
            shown.add(1)
    finally:
        shown.close()


_listening: list["_Ear"] = []


@contextlib.contextmanager
def speaking(program: str) -> Iterator[None]:
    """Inside, a program says on the standard error what it is doing.

    It does so when it has written nothing for ten seconds; and again, while it
    does the same, after twice as many, and so on.

    Args:
        program: Its name, such as "tools.train".
    """
    if _listening:  # a program that is a part of another
        yield
        return
    _listening.extend(_Ear(stream) for stream in (sys.stdout, sys.stderr))
    has_ended = threading.Event()
    thread = threading.Thread(
        target=_speak, args=(program, has_ended), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        for ear in _listening:
            ear.close()
        _listening.clear()


class _Ear:
    """Hears what is written to a stream.

    Attributes:
        last: When something was written, or the ear was opened.
        is_in_line: Whether a line of a terminal has begun, and not ended.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._write = stream, stream.write
        self._is_terminal = stream.isatty()
        self.last = time.monotonic()
        self.is_in_line = False
        stream.write = self._hear

    def _hear(self, text: str) -> Any:
        self.last = time.monotonic()
        if text:
            has_ended = text.endswith(("\n", "\033[K"))
            self.is_in_line = self._is_terminal and not has_ended
        return self._write(text)

    def close(self) -> None:
        """Hears no more."""
        del self._stream.write


def _speak(program: str, has_ended: threading.Event) -> None:
    """Says what is done whenever that is due, until the end."""
    unknown = _Doing("at work")
    left = _QUIET
    while not has_ended.wait(min(max(left, 0.01), _QUIET)):
        one = _now[-1] if _now else unknown
        silent = time.monotonic() - max(ear.last for ear in _listening)
        left = one.quiet - silent
        if left > 0:
            continue
        left = _QUIET
        if not one.what:
            continue
        if one.refresh is not None:
            one.refresh()
            continue
        one.quiet *= 2
        told = [str(outer) for outer in _now if outer.what] or [str(one)]
        begin = "\n" if any(ear.is_in_line for ear in _listening) else ""
        text = f"{begin}{program}: {'; '.join(told)}"
        print(text, file=sys.stderr, flush=True)
