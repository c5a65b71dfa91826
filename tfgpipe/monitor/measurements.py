"""Measures what `fit` trains, and keeps it in files.

`TimedStep` runs a step that `fit` would run anyway, on the same data: it is
traced once more, with a `run.Clock` between the tasks. So what is trained is
the same, to the bit. TensorBoard shows the files, and is not needed to write
them.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe import internals, timeline
from tfgpipe.cells import outline
from tfgpipe.checks import checked_path
from tfgpipe.inputs import as_specs, first_tensor
from tfgpipe.internals import Nest
from tfgpipe.run import Clock, Event


class Rates:
    """Counts examples and seconds while it runs, from the beginning.

    What the loss tracker counts are the examples. To read it waits for the
    devices, so it is done when counting starts and stops, not in between.

    Attributes:
        seconds: How long it has run, up to the last `stop`.
        examples: How many examples came in that time.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.seconds = self.examples = 0.0
        self.start()

    def start(self) -> None:
        """Counts from now on, without what came since the last `stop`."""
        examples = self._count()
        self._since: tuple[float, float] | None = time.perf_counter(), examples

    def stop(self) -> None:
        """Adds what came since `start`; nothing if it has been stopped."""
        if self._since is None:
            return
        (start, before), self._since = self._since, None
        examples = self._count() - before
        # It is fewer where someone has reset the metrics.
        self.examples += examples if examples >= 0 else math.nan
        self.seconds += time.perf_counter() - start

    @property
    def examples_per_second(self) -> float | None:
        """The mean; None if it cannot be told."""
        return self.examples / self.seconds if self.examples > 0 else None

    def _count(self) -> float:
        return float(internals.loss_tracker(self._model).count)


def tokens_of_example(input_spec: Nest) -> int | None:
    """Returns how many tokens an example has; None if examples differ.

    0 if the inputs, which have a `shape` (batch, ...) and a `dtype`, are no
    token ids.
    """
    first = first_tensor(input_spec)
    is_ids = len(first.shape) == 2 and "int" in first.dtype
    return first.shape[1] if is_ids else 0


def flops_of_example(model: keras.Model, input_spec: Nest) -> float | None:
    """Returns the FLOPs of a forward pass of one example.

    The model is built; `input_spec` describes the data. None if examples differ
    in size.
    """
    leaves = [x for x in keras.tree.flatten(input_spec) if x is not None]
    if any(None in tuple(leaf.shape[1:]) for leaf in leaves):
        return None

    def call(x: Nest, training: bool) -> Any:
        return model(x, training=training)

    return sum(outline(call, [model], input_spec).flops)


# ----------------------------------------------------------------- timed steps
class Measured(NamedTuple):
    """A step, measured with a clock.

    Attributes:
        events: An event a task, and one a device for its update.
        num_rows: Rows of the mini-batch.
        sent_bytes: What tasks took from other devices.
        input_spec: Nest of `keras.KerasTensor`: the inputs.
    """

    events: list[Event]
    num_rows: int
    sent_bytes: int
    input_spec: Nest


def typical(measured: Iterable[Measured]) -> tuple[Measured, int]:
    """Returns the step of median length, among those with as many rows as most.

    And how many these are. There is at least one.
    """
    steps = list(measured)
    counts = collections.Counter(m.num_rows for m in steps)
    rows = max(counts, key=lambda n: (counts[n], n))
    alike = [m for m in steps if m.num_rows == rows]
    alike.sort(key=lambda m: timeline.length(m.events))
    return alike[(len(alike) - 1) // 2], len(alike)


class TimedStep:
    """Stands for a model's train function, for one call at a time.

    Python looks at no layer, also if the model runs eagerly.

    The first call for each kind of mini-batch traces, and is not measured.
    With `steps_per_execution`, a call runs several steps, and the last of them
    is measured.

    Args:
        model: A compiled `GPipe`, within `fit`.

    Attributes:
        replaced: The train function for which it stands.
        measured: What the last call has measured; None if it traced.
    """

    def __init__(self, model: keras.Model) -> None:
        self.replaced = model.train_function
        self.measured: Measured | None = None
        self._model = model
        self._train_step = model.train_step
        self._traces: list[tuple[Clock, Any]] = []
        self._calls: collections.Counter[int] = collections.Counter()
        with model.nothing_eager():
            self._function = model.train_function_of(self._timed)

    def install(self) -> None:
        """Lets `fit` call this once instead of the model's function."""
        self.measured = None
        self._model.train_function = self

    def withdraw(self) -> None:
        """Undoes `install`, if it was not called since."""
        if self._model.train_function is self:
            self._model.train_function = self.replaced

    def __call__(self, iterator: Any) -> Any:
        """Runs what a call of the train function runs; returns its logs."""
        self.withdraw()
        with self._model.nothing_eager():
            logs, numbers = self._function(iterator)
        trace, num_rows, sent_bytes, *times = numbers.numpy().tolist()
        self._calls[trace] += 1
        if self._calls[trace] > 1:
            clock, input_spec = self._traces[int(trace)]
            self.measured = Measured(
                clock.events(times, self._model.devices),
                int(num_rows),
                int(sent_bytes),
                input_spec,
            )
        return logs

    def _timed(self, data: Nest) -> tuple[Any, tf.Tensor]:
        """Runs the training step; also tells the trace, rows, bytes, times."""
        clock = Clock()
        with self._model.timed_by(clock):
            logs = self._train_step(data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        num_rows = tf.shape(first_tensor(x))[0]
        numbers = [len(self._traces), num_rows, clock.sent_bytes()]
        self._traces.append((clock, as_specs(x)))
        with tf.device("CPU:0"):
            doubles = [tf.cast(number, tf.float64) for number in numbers]
            return logs, tf.stack([*doubles, *clock.times])


# ---------------------------------------------------------- memory of devices
_MIB = 2**20


def accelerator_mib(devices: Iterable[str]) -> dict[str, float]:
    """Returns the memory in use, where TensorFlow counts it.

    MiB by name, "GPU:0_current" and "GPU:0_peak" for the full name
    "/device:GPU:0". Nothing of CPUs, and of accelerators that do not count or
    are of other processes.
    """
    used: dict[str, float] = {}
    for spec in map(tf.DeviceSpec.from_string, devices):
        if spec.device_type == "CPU":
            continue
        short = f"{spec.device_type}:{spec.device_index}"
        # This kind does not count, or it is another process's.
        with contextlib.suppress(ValueError):
            info = tf.config.experimental.get_memory_info(short)
            used |= {f"{short}_{key}": info[key] / _MIB for key in info}
    return used


def peak_mib(devices: Sequence[str], run: Callable[[], object]) -> list[float]:
    """Returns the most MiB that devices hold while something runs.

    None of those that do not count, see `accelerator_mib`.
    """
    end = "_peak"
    counted = [key for key in accelerator_mib(devices) if key.endswith(end)]
    for key in counted:
        tf.config.experimental.reset_memory_stats(key.removesuffix(end))
    run()
    used = accelerator_mib(devices)
    return [used[key] for key in counted]


def host_bytes() -> float:
    """Returns the bytes that this computer has for processes, or infinity."""
    limits = [math.inf]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        # "max" is no number; nor are there such limits everywhere.
        with contextlib.suppress(OSError, ValueError):
            path = pathlib.Path("/sys/fs/cgroup", name)
            limits.append(int(path.read_text("utf-8")))
    return min(limits)


# -------------------------------------------------------- files and pictures
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
