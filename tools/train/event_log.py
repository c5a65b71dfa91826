"""Reads the files of `tfgpipe.monitor.EventLog`, and takes steps out of them.

A run that was interrupted after its last checkpoint does some steps again. What
an earlier process wrote about those is taken out, so that every step is there
once. TensorBoard itself is not needed to read the files.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import tensorflow as tf

from tfgpipe.files import clear_unfinished, put_in_place

_PATTERN = "events.out.tfevents.*"

_SCALARS = "scalars"  # what TensorBoard calls them


def read(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars of a folder.

    Args:
        folder: Where the files are; may be missing.

    Returns:
        For each name its steps and values, by step.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    kinds: dict[str, str] = {}
    for path in sorted(folder.glob(_PATTERN)):
        for event in _events(path):
            for value in event.summary.value:
                kind = value.metadata.plugin_data.plugin_name
                kinds.setdefault(value.tag, kind)  # told the first time
                if kinds[value.tag] != _SCALARS:
                    continue
                number = float(tf.make_ndarray(value.tensor))
                found.setdefault(value.tag, []).append((event.step, number))
    return {tag: sorted(points) for tag, points in found.items()}


def forget_after(folder: pathlib.Path, step: int) -> None:
    """Takes out what a folder says about later steps, file by file.

    Args:
        folder: Where the files are; may be missing.
        step: The last one that stays.
    """
    clear_unfinished(folder)
    for path in folder.glob(_PATTERN):
        events = list(_events(path))
        kept = [event for event in events if event.step <= step]
        if len(kept) == len(events):
            continue
        with (
            put_in_place(path) as beside,
            tf.io.TFRecordWriter(beside) as writer,
        ):
            for event in kept:
                writer.write(event.SerializeToString())


def _events(path: pathlib.Path) -> Iterator[tf.compat.v1.Event]:
    """What is in a file, up to where a killed process left it."""
    records = tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
    try:
        for record in records:
            yield tf.compat.v1.Event.FromString(record)
    except tf.errors.DataLossError:
        return
