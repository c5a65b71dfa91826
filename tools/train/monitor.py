"""Watches a training run: TensorBoard, throughput, tests in between.

from tools.train.monitor import Monitor

trainer.fit([Monitor.of(trainer, train_dir / "tensorboard")])
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

import tfgpipe
from tfgpipe.monitor import EventLog, ideal_bubble, tokens_of_example
from tfgpipe.monitor.device_memory import memory_mib
from tools.train import event_log
from tools.train.meter import Meter

if TYPE_CHECKING:
    from tools.train.trainer import Trainer


class Monitor(keras.callbacks.Callback):
    """Writes what a run does for TensorBoard, and tests the model meanwhile.

    After every `every` steps, and the last one, it writes, by step:

    * train/NAME: loss and metrics, their means over the steps in between
    * learning_rate
    * speed/examples_per_second, and tokens_per_second of models of text,
      without the first step of each `fit`, which traces, without tests, and
      without what other callbacks do between epochs, such as to save
    * pipeline/ideal_bubble: see `tfgpipe.monitor.ideal_bubble`
    * memory_mib/NAME: see `device_memory.memory_mib`

    and after every `evaluate_every` steps, and as a line of text too:

    * test/NAME: what `evaluate` returns

    The number of a step is that of the optimizer's updates, so a run that was
    resumed goes on where its checkpoint was. A test leaves no trace in the
    training: not in its weights, and not in its metrics.

    Each epoch's throughput joins what Keras prints and records about it. Where
    there is no progress bar, a line of text now and then gives step, loss and
    throughput, so that long epochs show that they go on.

    Args:
        folder: For the files; `None` writes none. What is in it about steps
            after the one that a run starts at is taken out.
        input_spec: As in `params.source.Source`; tells how many tokens an
            example has.
        every: Steps from one writing to the next. Positive.
        evaluate: Tests the model: numbers by name.
        evaluate_every: Steps from one test to the next; `None` for no tests.
            Positive.
        say_every: Seconds from one line about loss and throughput to the next;
            `None` for none.
        last_step: Where the run ends, for that line.
        say: Called with each line of text. Defaults to printing it, on a line
            of its own even if there is a progress bar.

    Raises:
        ValueError: If a number of steps is not positive, or there is nothing
            to evaluate with.
    """

    def __init__(
        self,
        folder: pathlib.Path | None,
        *,
        input_spec: Any,
        every: int = 50,
        evaluate: Callable[[], dict[str, float]] | None = None,
        evaluate_every: int | None = None,
        say_every: float | None = None,
        last_step: int | None = None,
        say: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__()
        _check(every, evaluate, evaluate_every)
        self._folder = folder
        self._length = tokens_of_example(input_spec)
        self._every = every
        self._evaluate = evaluate
        self._evaluate_every = evaluate_every
        self._say_every = say_every
        self._last_step = last_step
        self._say = say or _say
        self._log: EventLog | None = None
        self._bubble: float | None = None  # not known yet
        self._step = 0
        self._written = 0

    @classmethod
    def of(
        cls, trainer: Trainer, folder: pathlib.Path | None, **options: Any
    ) -> Monitor:
        """A monitor for `trainer.fit`, which tests as `trainer` does.

        Args:
            trainer: The run.
            folder: As for the class.
            **options: `every`, `evaluate_every`, `say_every` and `say`, as for
                the class.
        """
        return cls(
            folder,
            input_spec=trainer.source.input_spec,
            evaluate=trainer.evaluate,
            last_step=trainer.num_steps,
            **options,
        )

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Opens the log at the step that the model is at."""
        self._step = self._written = self._updates()
        self._meters = [Meter(self.model, self._length) for _ in range(3)]
        self._meter, self._epoch_meter, self._line_meter = self._meters
        if self._say_every is None:
            self._meters.pop()
        self._said = time.monotonic()
        if self._folder is not None:
            event_log.forget_after(self._folder, self._step)
            self._log = EventLog(self._folder)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Goes on taking the time, after what is done between epochs."""
        for meter in self._meters:
            meter.metrics_were_reset()
            if meter.is_running:
                meter.restart()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Writes and tests when it is time."""
        before, self._step = self._step, self._updates()
        if not self._meter.is_running:
            self._update_meters()
        if self._is_due(before, self._every):
            self._meter.update()
            self._write()
        if self._evaluate_every and self._is_due(before, self._evaluate_every):
            self._test()
        self._tell()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Adds the epoch's throughput to the logs."""
        self._update_meters()
        rates = self._epoch_meter.read().rates
        if logs is not None:
            logs.update(rates)

    def on_train_end(self, logs: dict | None = None) -> None:
        """Writes what is left, and closes the log."""
        if self._written < self._step:
            self._write()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _updates(self) -> int:
        return int(self.model.optimizer.iterations)

    def _update_meters(self) -> None:
        for meter in self._meters:
            meter.update()

    def _is_due(self, before: int, every: int) -> bool:
        """Whether a multiple of `every` was passed since `before`."""
        return self._step // every > before // every

    def _write(self) -> None:
        """Writes what the meter has found since the last writing."""
        self._written = self._step
        means, rates = self._meter.read()
        if self._log is None:
            return
        scalars = {f"train/{name}": value for name, value in means.items()}
        scalars["learning_rate"] = float(self.model.optimizer.learning_rate)
        scalars |= {f"speed/{name}": value for name, value in rates.items()}
        if isinstance(self.model, tfgpipe.GPipe):
            if self._bubble is None:
                self._bubble = ideal_bubble(self.model)
            scalars["pipeline/ideal_bubble"] = self._bubble
        used = memory_mib(_devices(self.model))
        scalars |= {f"memory_mib/{name}": mib for name, mib in used.items()}
        self._log.write(self._step, scalars)

    def _test(self) -> None:
        """Evaluates; then the training's metrics are as they were."""
        self._update_meters()
        variables = [v for m in self.model.metrics for v in m.variables]
        values = [variable.numpy() for variable in variables]
        results = self._evaluate()
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        for meter in self._meters:
            meter.restart()
        scalars = {f"test/{name}": value for name, value in results.items()}
        if self._log is not None:
            self._log.write(self._step, scalars)
        text = ", ".join(f"{name} {v:.4g}" for name, v in results.items())
        self._say(f"Step {self._step}, test: {text}")

    def _tell(self) -> None:
        """Says how the training goes, when it is time."""
        now = time.monotonic()
        if self._say_every is None or now - self._said < self._say_every:
            return
        self._said = now
        self._line_meter.update()
        means, rates = self._line_meter.read()
        end = f" of {self._last_step}" if self._last_step else ""
        parts = [f"loss {means['loss']:.4g}"] if "loss" in means else []
        parts += [
            f"{rate:,.1f} {name.removesuffix('_per_second')}/s"
            for name, rate in rates.items()
        ]
        self._say(f"Step {self._step}{end}: {', '.join(parts)}")


def _devices(model: keras.Model) -> list[str]:
    """Where the weights are."""
    if isinstance(model, tfgpipe.GPipe):
        return [name for cell in model.cells() for name in cell.devices]
    return [variable.value.device for variable in model.weights]


def _say(line: str) -> None:
    # After a progress bar, which ends in the middle of a line.
    print(f"\n{line}" if sys.stdout.isatty() else line, flush=True)


def _check(every: int, evaluate: Any, evaluate_every: int | None) -> None:
    problems = [
        f"`{name}` must be positive. Received: {name}={value}."
        for name, value in (
            ("every", every),
            ("evaluate_every", evaluate_every),
        )
        if value is not None and value < 1
    ]
    if evaluate_every is not None and evaluate is None:
        problems.append(
            "`evaluate` must be given for `evaluate_every`. Received: "
            f"evaluate=None and evaluate_every={evaluate_every}. Pass a "
            "function, such as `trainer.evaluate`."
        )
    if problems:
        raise ValueError("\n".join(problems))
