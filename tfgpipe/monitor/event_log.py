"""Numbers and pictures of a training, in files that TensorBoard shows.

TensorBoard itself is not needed to write the files.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import timeline
from tfgpipe.checks import checked_path
from tfgpipe.run import Event

# TensorBoard's plugins, and the classes of their data.
_PLUGINS = {"scalars": 1, "text": 2, "images": 3}


class EventLog:
    """Writes what TensorBoard shows into a folder, one writer at a time."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._writer = tf.summary.create_file_writer(str(folder))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes numbers by name; a slash in a name makes a group.

        `step` is how many updates the model has had.
        """
        self._write(
            step,
            {tag: tf.cast(n, tf.float32) for tag, n in scalars.items()},
            "scalars",
        )

    def write_text(self, step: int, tag: str, text: str) -> None:
        """Writes a text, in Markdown."""
        self._write(step, {tag: text}, "text")

    def write_picture(self, step: int, tag: str, path: pathlib.Path) -> None:
        """Writes a PNG file."""
        png = path.read_bytes()
        height, width, _ = tf.io.decode_png(png).shape
        values = [str(width).encode(), str(height).encode(), png]
        self._write(step, {tag: values}, "images")

    def _write(self, step: int, values: Mapping[str, Any], plugin: str) -> None:
        metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(
                plugin_name=plugin
            ),
            data_class=_PLUGINS[plugin],
        )
        with self._writer.as_default():
            for tag, value in values.items():
                tf.summary.write(tag, value, step, metadata)
        self._writer.flush()

    def close(self) -> None:
        """Ends the file, after which nothing can be written."""
        self._writer.close()


class Record:
    """Writes the numbers of epochs, where there is a folder for them.

    `log_dir` gets a folder "pipeline" for TensorBoard, `pictures` one picture
    of each measured step. Either may be None.

    Raises:
        ValueError: If a path is none, or there are to be pictures, and no
            matplotlib.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None,
        pictures: str | os.PathLike[str] | None,
    ) -> None:
        self._folder, self._pictures = (
            None if path is None else checked_path(name, path)
            for name, path in (("log_dir", log_dir), ("pictures", pictures))
        )
        self._log: EventLog | None = None
        if self._pictures is not None:
            if not importlib.util.find_spec("matplotlib"):
                raise ValueError(
                    "`pictures` needs matplotlib, which is not installed. "
                    f"Received: pictures={str(pictures)!r}. Install it with "
                    "`pip install matplotlib`, or leave `pictures` out."
                )
            self._pictures.mkdir(parents=True, exist_ok=True)

    def open(self) -> None:
        """Begins a file, beside those that are there."""
        if self._folder is not None:
            self._log = EventLog(self._folder / "pipeline")

    def write(
        self,
        epoch: int,
        numbers: Mapping[str, float],
        events: Sequence[Event],
        advice: str,
    ) -> None:
        """Writes the numbers of an epoch, and draws its step if it has one."""
        if self._log is not None:
            tagged = {f"pipeline/{name}": v for name, v in numbers.items()}
            self._log.write(epoch, tagged)
        if self._log is not None and events:
            self._log.write_text(epoch, "pipeline/advice", advice)
        if self._pictures is not None and events:
            path = self._pictures / f"epoch_{epoch + 1:04}.png"
            save_picture(events, f"Epoch {epoch + 1}", advice, path)
            if self._log is not None:
                self._log.write_picture(epoch, "pipeline/timeline", path)

    def close(self) -> None:
        """Ends the files that were begun."""
        if self._log is not None:
            self._log.close()
            self._log = None


def save_picture(
    events: Sequence[Event], title: str, advice: str, path: pathlib.Path
) -> None:
    """Draws a step into a PNG file."""
    # Needs matplotlib, which not everyone has.
    from tfgpipe.monitor import drawing

    title = (
        f"{title}: bubble {timeline.bubble(events):.0%}, the tasks take "
        f"{timeline.seconds(timeline.length(events))}"
    )
    drawing.timeline_picture(events, title, advice).save(path)


def chrome_trace(
    events: Sequence[Event], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what chrome://tracing and Perfetto show, to be written as JSON.

    Args:
        events: What ran. At least one.
        about: What to say about the whole.

    Reference: [Trace Event Format](https://docs.google.com/document/d/\
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU)
    """
    names = [
        {
            "ph": "M",
            "pid": 0,
            "tid": device,
            "name": "thread_name",
            "args": {"name": f"device {device}"},
        }
        for device in sorted({event.device for event in events})
    ]
    tasks = [
        {
            "ph": "X",
            "pid": 0,
            "tid": device,
            "name": f"{timeline.name(task.kind)} {task.micro_batch}",
            "cat": task.kind,
            "ts": round(1e6 * start, 3),  # microseconds
            "dur": round(1e6 * (end - start), 3),
            "args": {"cell": task.cell, "micro_batch": task.micro_batch},
        }
        for task, device, start, end in events
    ]
    return {
        "traceEvents": [*names, *tasks],
        "displayTimeUnit": "ms",
        "otherData": dict(about),
    }
