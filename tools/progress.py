"""How far a program is, on a terminal."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


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
        self._done, self._start = 0, time.monotonic()
        self._shows = sys.stderr.isatty() and not is_hidden
        self.add(0)

    def add(self, count: int) -> None:
        """Counts so many more."""
        self._done += count
        seconds = time.monotonic() - self._start
        self._write(f"{self._what}: {self._done}{self._of}, {seconds:.0f} s")

    def close(self) -> None:
        """Takes the line away."""
        self._write("")

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
    for item in known:
        yield item
        shown.add(1)
    shown.close()
