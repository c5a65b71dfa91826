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

_SUFFIXES = (".png", ".svg")

# TensorBoard's plugins, and the classes of their data.
_PLUGINS = {"scalars": 1, "text": 2, "images": 3}


class EventLog:
    """Writes what TensorBoard shows into a folder, one writer at a time."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._writer = tf.summary.create_file_writer(str(folder))

    def write(
        self, step: int, values: Mapping[str, Any], plugin: str = "scalars"
    ) -> None:
        """Writes values by name; a slash in a name makes a group.

        `step` is how many updates the model has had. Texts are Markdown; an
        image is its width, its height and its PNG file.
        """
        metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(
                plugin_name=plugin
            ),
            data_class=_PLUGINS[plugin],
        )
        with self._writer.as_default():
            for tag, value in values.items():
                if plugin == "scalars":
                    value = tf.cast(value, tf.float32)
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
            self._log.write(epoch, {"pipeline/advice": advice}, "text")
        if self._pictures is not None and events:
            path = self._pictures / f"epoch_{epoch + 1:04}.png"
            save_picture(events, f"Epoch {epoch + 1}", advice, path)
            if self._log is not None:
                png = path.read_bytes()
                height, width, _ = tf.io.decode_png(png).shape
                image = [str(width).encode(), str(height).encode(), png]
                self._log.write(epoch, {"pipeline/timeline": image}, "images")

    def close(self) -> None:
        """Ends the files that were begun."""
        if self._log is not None:
            self._log.close()
            self._log = None


def plot_cells(
    model: Any, to_file: str | os.PathLike[str] = "cells.png"
) -> None:
    """Draws the cells of a model into a file.

    A row is a cell, with its devices. A box in it is a call of a layer, as wide
    as its share of the cost, and has its name if there is room; colours are
    classes of layers. At the end of a row are the cell's share of the cost and
    the size of its weights. So the longest row is the slowest cell, for which
    the others wait; a dashed line marks the mean.

    Equal models give equal files, with the same version of matplotlib, which
    is needed. `keras.utils.plot_model(model)` draws the layers and what they
    are connected to.

    Args:
        model: A `GPipe` that is built.
        to_file: The file to write, whose name ends with ".png" or ".svg".

    Raises:
        ValueError: If the model is no `GPipe` or not built, or the file has
            another ending.
        OSError: If the file cannot be written.
        ImportError: If matplotlib is not installed.

    Example:

    >>> import keras, tempfile, tfgpipe
    >>> layers = [keras.layers.Dense(8, "relu") for _ in range(4)]
    >>> model = tfgpipe.GPipe([keras.Input((8,)), *layers], 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tfgpipe.plot_cells(model, f"{folder}/cells.svg")
    """
    if not hasattr(model, "built_for"):
        raise ValueError(
            "`model` must be a `tfgpipe.GPipe`, which has cells. Received: "
            f"model={getattr(model, 'name', model)!r}, a "
            f"{type(model).__name__}. Pass `tfgpipe.GPipe(layers)`, or draw it "
            "by `keras.utils.plot_model`."
        )
    path = checked_path("to_file", to_file)
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"`to_file` must end with {' or '.join(_SUFFIXES)}. Received: "
            f"to_file={str(to_file)!r}."
        )
    model.built_for("plot_cells(model)")
    if not importlib.util.find_spec("matplotlib"):
        raise ImportError(
            "`tfgpipe.plot_cells` needs matplotlib, which is not installed. "
            f"Received: to_file={str(to_file)!r}. Install it with `pip install "
            "matplotlib`; `model.summary()` prints the cells without it."
        )
    # Needs matplotlib, which not everyone has.
    from tfgpipe.monitor import drawing

    drawing.cells_picture(model).save(path)


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
