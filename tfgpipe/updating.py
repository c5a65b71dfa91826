"""How a `GPipe` updates its weights, or skips a mini-batch."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.devices import (
    placement,
    update_on_devices,
    updates_slices_alike,
)
from tfgpipe.loss import Objective, add_direct
from tfgpipe.nonfinite import Guard
from tfgpipe.prepared import Prepared
from tfgpipe.run import Pipeline


class Updating(Prepared):
    """The part of `GPipe` that applies the gradients of a mini-batch."""

    @property
    def skip_nonfinite(self) -> bool:
        """Whether mini-batches that are not finite change nothing."""
        return self._arguments.skip_nonfinite

    def _update(
        self, run: Pipeline, loss: Objective, total: tf.Tensor, guard: Any
    ) -> None:
        """Applies the gradients, each on the device of its variable."""
        pairs = self._gradients(run, loss)
        if not pairs:
            warnings.warn(
                "The model does not have any trainable weights.", stacklevel=3
            )

        def update() -> None:
            if pairs:
                self.optimizer.apply_gradients(pairs)

        in_branch = guard is not None
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                update_on_devices(
                    self.optimizer, self.trainable_variables, in_branch
                )
            )
            if self._plan.clock is not None:
                stack.enter_context(self._plan.clock.update(run.chain.last_op))
            if guard is None:
                update()
            else:
                guard.update(self.optimizer, total, pairs, update)

    def _gradients(
        self, run: Pipeline, loss: Objective
    ) -> list[tuple[Any, keras.Variable]]:
        """Gradients, or None, and their weights."""
        if not run.is_training:
            return []
        gradients = run.gradients()
        add_direct(gradients, loss.direct_gradients())
        pairs = [(gradients.get(id(v)), v) for v in self.trainable_weights]
        taken = [(placement.as_device_takes(d, v), v) for d, v in pairs]
        changed = [v for (d, v), (t, _) in zip(pairs, taken) if d is not t]
        if changed and not updates_slices_alike(self.optimizer):
            warnings.warn(
                "A sparse gradient is applied as a dense one on a device that "
                "runs nothing but what XLA compiles, so the optimizer also "
                "moves rows that the mini-batch has not looked up. Received: "
                f"'{changed[0].path}' on {changed[0].value.device}, and "
                f"{type(self.optimizer).__name__}. Put that cell on another "
                "device, or train with SGD or Lion, for the numbers that other "
                "devices give.",
                stacklevel=3,
            )
        if self._plan.tell_gradients is not None:
            self._plan.tell_gradients(taken)
        return taken

    def _guard(self, run: Pipeline) -> Guard | None:
        """What skips the mini-batch if it is not finite."""
        skips = self._plan.skips
        return None if skips is None else Guard(self._kept(run), skips)

    def _kept(self, run: Pipeline) -> list[keras.Variable]:
        """What a step may assign, but by the optimizer."""
        return [
            *self.non_trainable_variables,
            *self.metrics_variables,
            *run.assigned_variables(),
        ]

    def _guarded(self, logs: dict[str, Any], guard: Guard) -> dict[str, Any]:
        """What `fit` shows, when what is not finite is undone."""
        skipped = guard.end()
        if type(self).compute_metrics is keras.Model.compute_metrics:
            logs = self.get_metrics_result()  # as they are now
        return {**logs, "skipped_steps": skipped}

    @property
    def num_skipped(self) -> int:
        """How many mini-batches were skipped, since it was new.

        Saved with the model. The optimizer's iterations and these are all that
        it has seen in training.
        """
        skips = self._plan.skips
        return 0 if skips is None else skips.total

    @property
    def skipped_in_a_row(self) -> int:
        """How many of the last mini-batches were skipped, up to now."""
        skips = self._plan.skips
        return 0 if skips is None else skips.in_a_row

    def reset_metrics(self) -> None:
        """Starts the metrics anew, as `fit` does when an epoch begins."""
        super().reset_metrics()
        if self._plan.skips is not None:
            self._plan.skips.start_epoch()
