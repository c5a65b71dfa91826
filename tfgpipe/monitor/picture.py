"""A picture of a measured step."""

from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Sequence

from tfgpipe.monitor import statistics
from tfgpipe.monitor.words import seconds
from tfgpipe.timeline import Event


def save_picture(
    events: Sequence[Event], what: str, advice: str, path: pathlib.Path
) -> None:
    """Draws a step into a file.

    Args:
        events: What ran.
        what: What was measured.
        advice: What is said about it.
        path: The file, which ends in ".png".
    """
    # Needs matplotlib, which not everyone has.
    from tfgpipe.monitor import gantt

    length = statistics.length(events)
    title = (
        f"{what}: bubble {statistics.bubble(events):.0%}, the tasks take "
        f"{seconds(length)}"
    )
    line = textwrap.shorten(advice, 110, placeholder=" ...")
    gantt.save(events, gantt.Caption(title, line), [path])
