"""Numbers and pictures of a training, in files that TensorBoard shows.

TensorBoard itself is not needed to write the files.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import timeline
from tfgpipe.checks import checked_path
from tfgpipe.run import Event


class EventLog:
    """Writes what TensorBoard shows into a folder, one writer at a time."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._writer = tf.summary.create_file_writer(str(folder))

    def write(self, step: int, values: Mapping[str, float | str]) -> None:
        """Writes numbers and texts by name; a slash in a name makes a group.

        `step` is how many updates the model has had. Texts are Markdown.
        """
        with self._writer.as_default():
            for tag, value in values.items():
                is_text = isinstance(value, str)
                # TensorBoard's plugins, and the classes of their data.
                name, data_class = ("text", 2) if is_text else ("scalars", 1)
                metadata = tf.compat.v1.SummaryMetadata(
                    plugin_data={"plugin_name": name}, data_class=data_class
                )
                kind = tf.string if is_text else tf.float32
                tf.summary.write(tag, tf.cast(value, kind), step, metadata)
        self._writer.flush()

    def close(self) -> None:
        """Ends the file, after which nothing can be written."""
        self._writer.close()


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
        ValueError: If the model is no `GPipe` or not built.
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
            "`model` must be a `tfgpipe.GPipe`. Received: "
            f"model={getattr(model, 'name', model)!r}, a "
            f"{type(model).__name__}. Draw it by `keras.utils.plot_model`."
        )
    model.built_for("plot_cells(model)")
    # Needs matplotlib, which not everyone has.
    from tfgpipe.monitor import drawing

    drawing.cells_picture(model).save(checked_path("to_file", to_file))


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
