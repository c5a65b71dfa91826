"""A step of `fit` that is run with a clock.

The step is one that `fit` would run anyway, on the same data: it is traced once
more, with a `timeline.Clock` between the tasks. So what is trained is the same,
to the bit.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe.micro_batches import as_specs, first_tensor
from tfgpipe.monitor import statistics
from tfgpipe.run import Clock, Event


class Measured(NamedTuple):
    """What the clock says of a step.

    Attributes:
        events: An event a task, and one a device for its update.
        num_rows: Rows of the mini-batch.
        sent_bytes: What tasks took from other devices.
        input_spec: Nest of `keras.KerasTensor`: the inputs.
    """

    events: list[Event]
    num_rows: int
    sent_bytes: int
    input_spec: Any


def typical(measured: Iterable[Measured]) -> tuple[Measured, int]:
    """The step of median length, of those with as many rows as most.

    And how many these are. There is at least one.
    """
    steps = list(measured)
    counts = collections.Counter(m.num_rows for m in steps)
    rows = max(counts, key=lambda n: (counts[n], n))
    alike = [m for m in steps if m.num_rows == rows]
    alike.sort(key=lambda m: statistics.length(m.events))
    return alike[(len(alike) - 1) // 2], len(alike)


class TimedStep:
    """Takes the place of a model's train function, for one call at a time.

    Python looks at no layer, also if the model runs eagerly.

    The first call for each kind of mini-batch traces, and is not measured.
    With `steps_per_execution`, a call runs several steps, and the last of them
    is measured.

    Args:
        model: A compiled `GPipe`, within `fit`.

    Attributes:
        replaced: The train function whose place it takes.
        measured: What the last call has measured; None if it traced.
    """

    def __init__(self, model: Any) -> None:
        self.replaced = model.train_function
        self.measured: Measured | None = None
        self._model = model
        self._train_step = model.train_step
        self._traces: list[tuple[Clock, Any]] = []
        self._calls: collections.Counter[int] = collections.Counter()
        with model.nothing_eager():
            self._function = model.train_function_of(self._timed)

    def install(self) -> None:
        """Lets `fit` call this once instead of the model's own function."""
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

    def _timed(self, data: Any) -> tuple[Any, tf.Tensor]:
        """The training step; also which trace it is, rows, bytes and times."""
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
