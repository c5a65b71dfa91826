"""Numbers of a pipeline while `fit` trains it."""

from __future__ import annotations

import collections
import functools
import importlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import keras

from tfgpipe import timeline
from tfgpipe.checks import (
    checked_counts,
    checked_positive,
    checked_sink,
)
from tfgpipe.model import GPipe
from tfgpipe.monitor import (
    EventLog,
    Measured,
    Rates,
    TimedStep,
    accelerator_mib,
    advise,
    flops_of_example,
    ideal_bubble,
    layout_of,
    save_picture,
    tokens_of_example,
    typical,
)
from tfgpipe.plans import Plan
from tfgpipe.run import Event

_STEPS = 3  # that are measured in an epoch, and that advice needs

_RATES = ("examples_per_second", "tokens_per_second")

_IN_LOGS = {"bubble", "model_flops_utilisation", *_RATES}


class PipelineMonitor(keras.callbacks.Callback):
    """Measures the pipeline while `fit` trains it, and says what would help.

    In every `every`-th epoch up to three of the training's steps are run with a
    clock; the numbers are of the step of median length among the last six.
    Nothing is trained besides: weights and metrics are the same to the bit. The
    step is traced once more for that, in the first measured epoch, and that
    mini-batch is not measured; where an epoch has one mini-batch, the next
    epoch is measured. Other steps run as without the monitor. Advice waits for
    three measured steps.

    At the end of an epoch that was measured, `history` gets

    * `bubble`: the share of the time of the tasks in which devices idle, from 0
      to 1
    * `busiest_device`, its index, and `busiest_share`, the share in which it
      runs tasks
    * `slowest_cell`: the index of the cell whose tasks take longest together,
      and `slowest_ratio`, how many times the mean of the cells
    * `step_seconds`: from the start of the first task to the end of the update
    * `boundary_mib`: MiB that tasks take from other devices in the step: what
      crosses between cells, and the gradients that come back

    and at the end of every epoch

    * `examples_per_second`, and `tokens_per_second` where the inputs are token
      ids of one length: of all steps but those that trace. They are left out
      where there are none, or where another callback has reset the metrics
      within the epoch, as by calling `evaluate`
    * `model_flops_utilisation`, if `peak_flops` is given: three times the
      forward pass's FLOPs, a second, as a share of what all devices could do.
      What is computed again is not counted
    * `memory_mib/GPU:0_current` and `memory_mib/GPU:0_peak`, in MiB, for each
      accelerator whose memory TensorFlow counts; nothing of CPUs

    The bubble, the rates and the utilisation are in `fit`'s `logs`, too, and so
    in the progress bar.

    An accelerator is waited for after each task of a measured step, which is
    slower than others. Devices of several hosts have several clocks: their
    bubble is as exact as these agree. Put the monitor before callbacks that
    read the logs, such as `keras.callbacks.CSVLogger`.

    Args:
        every: Epochs from one measurement to the next, the first one in the
            first epoch of a `fit`. Positive.
        log_dir: Folder for TensorBoard, or None. The numbers are written to
            "pipeline" in it, by epoch, as "pipeline/bubble" and so on, and the
            advice as "pipeline/advice".
        pictures: Folder for a picture of each measured step, or None:
            "epoch_0001.png" shows the first epoch. Needs matplotlib.
        peak_flops: FLOP/s of one device at its best, or None. Positive.
        flops_of_example: FLOPs of the forward pass of one example. By default
            estimated as `GPipe` estimates the costs of layers, if
            `peak_flops` is given and examples are of one size.
        say: Called with each sentence of advice. Defaults to printing it; None
            for silence.
        plan: The `tfgpipe.plan` by which the model is trained, or None. After
            `fit` a sentence tells how far it was off: the seconds of a step
            are those of the last epoch, without a clock, if its mini-batches
            have as many rows as the plan's; the bytes are the most that an
            accelerator has held since the program began.

    Attributes:
        advice: The last sentence of advice; None before there is one.
        events: The `tfgpipe.timeline.Event`s of the step with the numbers.
        history: The numbers of the last `fit`, by name: a list, with one of
            each epoch that has it.

    Raises:
        ValueError: If a number is not positive.
        ImportError: If there are to be pictures, and no matplotlib.

    Example:

    >>> import numpy as np
    >>> layers = [keras.layers.Dense(4) for _ in range(2)]
    >>> model = GPipe(layers, num_partitions=1, num_micro_batches=2)
    >>> model.compile("sgd", "mse")
    >>> x = np.ones((16, 4))
    >>> monitor = PipelineMonitor(say=lambda sentence: None)
    >>> history = model.fit(x, x, 4, verbose=0, callbacks=[monitor])
    >>> monitor.history["slowest_cell"]
    [0]
    """

    def __init__(
        self,
        every: int = 1,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        pictures: str | os.PathLike[str] | None = None,
        peak_flops: float | None = None,
        flops_of_example: float | None = None,
        say: Callable[[str], object] | None = print,
        plan: Plan | None = None,
    ) -> None:
        super().__init__()
        (self._every,) = checked_counts(every=every)
        self._log_dir, self._pictures = log_dir, pictures
        if pictures is not None:
            importlib.import_module("matplotlib")  # not at the end of an epoch
            pathlib.Path(pictures).mkdir(parents=True, exist_ok=True)
        for name, value in (
            ("peak_flops", peak_flops),
            ("flops_of_example", flops_of_example),
        ):
            if value is not None:
                checked_positive(name, value, "or None if it is not known")
        self._peak, self._known_flops = peak_flops, flops_of_example
        self._log: EventLog | None = None
        self._flops: float | None = None
        self._say = checked_sink("say", say)
        if plan is not None:
            self._planned_rows = plan.batch_size
        self._plan = plan
        self._rates: Any = None
        self._step: TimedStep | None = None
        self._measured = collections.deque[Measured](maxlen=2 * _STEPS)
        self._count = 0  # of steps measured in the epoch
        self._unsaid: str | None = None
        self._is_traced = self._is_timed = False
        self._due: int | None = None
        self._epoch = 0
        self.advice: str | None = None
        self.events: list[Event] = []
        self.history: dict[str, list[float]] = {}

    # ------------------------------------------------------ what Keras calls
    def on_train_begin(self, logs: dict | None = None) -> None:
        """Makes ready for the first epoch."""
        if not isinstance(self.model, GPipe):
            raise ValueError(
                "`PipelineMonitor` must watch a `GPipe`. Received: "
                f"'{self.model.name}', a {type(self.model).__name__}."
            )
        step = self._step
        if step is not None:
            step.withdraw()  # the last `fit` may have failed
        if step is None or step.replaced is not self.model.train_function:
            self._step = None  # compiled again, or another
            self._measured.clear()
            self._is_traced = False
            self._flops = self._known_flops
        self._due = None
        self.history = {}
        if self._log_dir is not None:
            self._log = EventLog(pathlib.Path(self._log_dir, "pipeline"))

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Gives advice on the last epoch, and starts to count examples."""
        self._tell()
        if self._due is None:
            self._due = epoch
        self._epoch = epoch
        self._count = 0
        self._rates = Rates(self.model)

    def on_train_batch_begin(
        self, batch: int, logs: dict | None = None
    ) -> None:
        """Has the step timed if it is due."""
        is_due = self._due is not None and self._epoch >= self._due
        self._is_timed = is_due and self._count < _STEPS
        if self._is_timed:
            if self._step is None:
                self._step = TimedStep(self.model)
            self._step.install()
        if self._is_timed or not self._is_traced:
            self._rates.stop()
            self._rates.start()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Takes what was measured."""
        traces = not self._is_traced
        if self._is_timed and self._step is not None:
            measured = self._step.measured
            traces = measured is None
            if measured is not None:
                self._measured.append(measured)
                self._count += 1
        else:
            self._is_traced = True
        if traces:  # do not count it
            self._rates.start()

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Stops counting: what `fit` validates is not trained."""
        if self._rates is not None:  # `evaluate` may be called before
            self._rates.stop()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Takes the numbers of the epoch, and some of them to the logs."""
        self._rates.stop()
        numbers: dict[str, float] = {}
        if self._count:
            self._due = epoch + self._every
            numbers |= self._numbers_of_step()
        numbers |= self._speed()
        used = accelerator_mib(self.model.devices)
        numbers |= {f"memory_mib/{name}": mib for name, mib in used.items()}
        for name, number in numbers.items():
            self.history.setdefault(name, []).append(number)
            if logs is not None and name in _IN_LOGS:
                logs[name] = number
        advice = self.advice or ""
        if self._log is not None:
            values = {f"pipeline/{name}": x for name, x in numbers.items()}
            self._log.write(epoch, values)
            if self._count:
                self._log.write(epoch, {"pipeline/advice": advice})
        if self._count and self._pictures is not None:
            path = pathlib.Path(self._pictures, f"epoch_{epoch + 1:04}.png")
            save_picture(self.events, f"Epoch {epoch + 1}", advice, path)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Gives advice on the last epoch, and closes the log."""
        self._tell()
        if self._plan is not None:
            rate = self.history.get("examples_per_second")
            rows = {step.num_rows for step in self._measured}
            seconds = None
            if rate and rows == {self._planned_rows}:
                seconds = self._planned_rows / rate[-1]
            held = accelerator_mib(self.model.devices)
            self._say(
                self._plan.compare(
                    seconds,
                    [2**20 * held[n] for n in held if n.endswith("_peak")],
                )
            )
        if self._log is not None:
            self._log.close()

    # ---------------------------------------------------------- what it does
    def _numbers_of_step(self) -> dict[str, float]:
        """Returns the numbers of the step of median length; makes advice."""
        model, layout = self.model, layout_of(self.model)
        measured, count = typical(self._measured)
        self.events = measured.events
        if count >= _STEPS:
            self.advice = advise(
                self.events,
                layout,
                model.num_micro_batches,
                measured.num_rows // model.num_replicas,
                functools.partial(ideal_bubble, model),
            )
            self._unsaid = f"Epoch {self._epoch + 1}: {self.advice}"
        return {
            **timeline.summary(self.events, layout.numbers),
            "boundary_mib": measured.sent_bytes / 2**20,
        }

    def _tell(self) -> None:
        """Says what there is to say, where no progress bar is in its line."""
        if self._unsaid is not None:
            self._say(self._unsaid)
        self._unsaid = None

    def _speed(self) -> dict[str, float]:
        """Returns the numbers of the whole epoch."""
        rate = self._rates.examples_per_second
        if rate is None:
            return {}
        numbers = {"examples_per_second": rate}
        if not self._measured:
            return numbers
        spec = self._measured[-1].input_spec
        if tokens := tokens_of_example(spec):
            numbers["tokens_per_second"] = tokens * rate
        if self._peak is not None:
            self._flops = self._flops or flops_of_example(self.model, spec)
            if self._flops is not None:
                peak = self._peak * len(self.model.devices)
                used = 3 * self._flops * rate
                numbers["model_flops_utilisation"] = used / peak
        return numbers
