"""What became of a case, and which errors are refusals."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import traceback

import tfgpipe

PACKAGE = pathlib.Path(tfgpipe.__file__).parent
KINDS = ("passed", "refused", "skipped", "unstable", "failed")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: "passed"; "refused" by the library, with a clear error; "skipped"
            because Keras refuses it, or has no finite numbers; "unstable" if
            Keras differs from itself as much when weights change in their last
            bits; "failed".
        reason: In short, for counting.
        detail: All that is known.
    """

    kind: str
    reason: str = ""
    detail: str = ""


class Difference(AssertionError):
    """A promise that is broken.

    Args:
        check: Which promise.
        what: Which numbers.
        size: By how much, relatively.
    """

    def __init__(self, check: str, what: str, size: float):
        super().__init__(f"{check}: {what} differ by {size:.1e}")
        self.check, self.size = check, size


def of_error(error: BaseException, check: str) -> Outcome:
    """A refusal or a failure."""
    reason = summary(error)
    if is_refusal(error):
        return Outcome("refused", reason, str(error))
    detail = "".join(traceback.format_exception(error))
    return Outcome("failed", f"{check}: {reason}", detail)


def is_refusal(error: BaseException) -> bool:
    """Whether the library says what is wrong in its own words."""
    if not isinstance(error, (ValueError, NotImplementedError)):
        return False
    text = str(error)
    if "must accept" in text and "this error" in text:
        return False  # a layer's error, handed on
    return "Received" in text and pathlib.Path(_place(error)).is_relative_to(
        PACKAGE
    )


def _place(error: BaseException) -> str:
    """The file that raised an error; TensorFlow moves that to the message."""
    named = re.findall(r'File "([^"]+)", line', str(error))
    if named:
        return named[-1]
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""


def summary(error: BaseException) -> str:
    """An error in one line, without what differs from case to case."""
    text = str(error)
    if "in user code" in text:
        text = re.split(r"\n\s*\n", text.strip())[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = re.split(r" Received| Expected", lines[0] if lines else "")[0]
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", text)
    text = re.sub(r"\d+", "N", text)
    if not text.startswith(type(error).__name__):
        text = f"{type(error).__name__}: {text}"
    return text[:160]
