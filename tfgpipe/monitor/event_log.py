"""Numbers and pictures of a training, in files that TensorBoard shows.

TensorBoard itself is not needed to write the files.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfgpipe import timeline
from tfgpipe.checks import checked_path
from tfgpipe.run import Event


def _metadata(plugin: str, data_class: int) -> tf.compat.v1.SummaryMetadata:
    return tf.compat.v1.SummaryMetadata(
        plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name=plugin),
        data_class=data_class,
    )


_SCALAR = _metadata("scalars", 1)  # DATA_CLASS_SCALAR

_TEXT = _metadata("text", 2)  # DATA_CLASS_TENSOR

_PICTURE = _metadata("images", 3)  # DATA_CLASS_BLOB_SEQUENCE


class EventLog:
    """Writes scalars into a folder; there is one writer at a time."""

    def __init__(self, folder: pathlib.Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = tf.summary.create_file_writer(str(folder))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes numbers by name; a slash in a name makes a group.

        `step` is how many updates the model has had.
        """
        with self._writer.as_default():
            for tag, value in scalars.items():
                tf.summary.write(
                    tag, tf.constant(value, tf.float32), step, _SCALAR
                )
        self._writer.flush()

    def write_text(self, step: int, tag: str, text: str) -> None:
        """Writes a text, in Markdown."""
        self._write(step, tag, tf.constant(text), _TEXT)

    def write_picture(self, step: int, tag: str, path: pathlib.Path) -> None:
        """Writes a picture: a PNG file."""
        png = path.read_bytes()
        # As a PNG file begins: 16 bytes, then its width and its height.
        sizes = [str(int.from_bytes(png[i : i + 4], "big")) for i in (16, 20)]
        values = [size.encode() for size in sizes]
        self._write(step, tag, tf.constant([*values, png]), _PICTURE)

    def _write(
        self,
        step: int,
        tag: str,
        value: tf.Tensor,
        metadata: tf.compat.v1.SummaryMetadata,
    ) -> None:
        with self._writer.as_default():
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
        if self._pictures is None:
            return
        if not importlib.util.find_spec("matplotlib"):
            raise ValueError(
                "`pictures` needs matplotlib, which is not installed. "
                f"Received: pictures={str(pictures)!r}. Install it with `pip "
                "install matplotlib`, or leave `pictures` out."
            )
        self._pictures.mkdir(parents=True, exist_ok=True)

    def open(self) -> None:
        """Begins a file, beside those that are there."""
        if self._folder is not None:
            self._log = EventLog(self._folder / "pipeline")

    def write(self, epoch: int, numbers: Mapping[str, float]) -> None:
        """Writes the numbers of an epoch, by name."""
        if self._log is not None:
            tagged = {f"pipeline/{name}": v for name, v in numbers.items()}
            self._log.write(epoch, tagged)

    def write_step(
        self, epoch: int, events: Sequence[Event], advice: str
    ) -> None:
        """Writes what is said about a measured step, and draws it."""
        if self._log is not None:
            self._log.write_text(epoch, "pipeline/advice", advice)
        if self._pictures is None:
            return
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
    events: Sequence[Event], what: str, advice: str, path: pathlib.Path
) -> None:
    """Draws a step into a PNG file."""
    # Needs matplotlib, which not everyone has.
    from tfgpipe.monitor import gantt

    length = timeline.length(events)
    title = (
        f"{what}: bubble {timeline.bubble(events):.0%}, the tasks take "
        f"{timeline.seconds(length)}"
    )
    gantt.save(events, gantt.Caption(title, advice), [path])
