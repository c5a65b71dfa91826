"""Watches a training run: numbers for TensorBoard, tests in between."""

from __future__ import annotations

import pathlib
import sys
import time
from typing import TYPE_CHECKING

import keras

from tfgpipe.monitor import EventLog

if TYPE_CHECKING:
    from tools.train.trainer import Trainer

_EVERY = 50  # updates from one writing to the next


class Monitor(keras.callbacks.Callback):
    """Writes what a run does for TensorBoard, and tests the model meanwhile.

    By number of updates, so that a run which is resumed goes on: train/NAME,
    loss and metrics as Keras tells them, the learning rate, and test/NAME. A
    test leaves no trace in the training: not in its weights, and not in its
    metrics. `tfgpipe.callbacks.PipelineMonitor` measures the pipeline.

    Args:
        trainer: The run.
        folder: For the files; `None` writes none.
        evaluate_every: Updates from one test to the next; `None` for no tests.
        say_every: Seconds from one line of text to the next, where there is no
            progress bar; `None` for none.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: pathlib.Path | None,
        evaluate_every: int | None = None,
        say_every: float | None = None,
    ) -> None:
        super().__init__()
        self._trainer = trainer
        self._folder = folder
        self._evaluate_every = evaluate_every
        self._say_every = say_every
        self._log: EventLog | None = None
        self._step = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Opens the log at the step that the model is at."""
        self._step = int(self.model.optimizer.iterations)
        self._said = time.monotonic(), self._step
        if self._folder is not None:
            self._log = EventLog(self._folder)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Writes, tests and tells when it is time."""
        before, self._step = self._step, int(self.model.optimizer.iterations)
        is_last = self._step == self._trainer.num_steps
        if self._log and (is_last or self._step // _EVERY > before // _EVERY):
            scalars = {f"train/{name}": x for name, x in (logs or {}).items()}
            scalars["learning_rate"] = float(self.model.optimizer.learning_rate)
            self._log.write(self._step, scalars)
        every = self._evaluate_every
        if every and self._step // every > before // every:
            self._test()
        if self._say_every is not None:
            self._tell(logs or {})

    def on_train_end(self, logs: dict | None = None) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _test(self) -> None:
        """Evaluates; then the training's metrics are as they were."""
        variables = [v for m in self.model.metrics for v in m.variables]
        values = [variable.numpy() for variable in variables]
        results = self._trainer.evaluate()
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        if self._log is not None:
            scalars = {f"test/{name}": x for name, x in results.items()}
            self._log.write(self._step, scalars)
        text = ", ".join(f"{name} {v:.4g}" for name, v in results.items())
        _say(f"Step {self._step}, test: {text}")

    def _tell(self, logs: dict) -> None:
        (then, step), now = self._said, time.monotonic()
        if now - then >= (self._say_every or 0):
            self._said = now, self._step
            rate = (self._step - step) / max(now - then, 1e-9)
            _say(
                f"Step {self._step} of {self._trainer.num_steps}: "
                f"loss {logs.get('loss', float('nan')):.4g}, "
                f"{rate:,.2f} steps/s"
            )


def _say(line: str) -> None:
    # After a progress bar, which ends in the middle of a line.
    print(f"\n{line}" if sys.stdout.isatty() else line, flush=True)
