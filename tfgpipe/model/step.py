"""What a `GPipe` does with one mini-batch: train, test and predict steps.

Keras's `fit`, `evaluate` and `predict` call the steps, and trace them into one
graph each. A training step ends with the update, or skips the mini-batch.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import Cell, Tracer, until_known
from tfgpipe.devices import (
    names,
    placement,
    update_on_devices,
    updates_slices_alike,
)
from tfgpipe.loss import (
    Head,
    Objective,
    SummedLoss,
    WholeLoss,
    add_direct,
    has_own_scale,
    streams_loss,
    streams_metrics,
)
from tfgpipe.micro_batches import as_specs, check_rows
from tfgpipe.model.hooks import base
from tfgpipe.model.look import Looking, as_graph
from tfgpipe.model.nonfinite import Guard
from tfgpipe.run import MiniBatch, Pipeline
from tfgpipe.schedules import Remat
from tfgpipe.sequence import inputs


class Updates(Looking):
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
        if not internals.overrides(self, "compute_metrics"):
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


class Steps(Updates):
    """The part of `GPipe` that runs mini-batches through its cells."""

    @base
    @as_graph
    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains on one mini-batch; called by `fit`."""
        batch, arrival = self._unpack(data)
        head, loss = self._loss_of(batch, training=True)
        run = self._forward(batch, head, loss, training=True)
        guard = self._guard(run)
        with tf.control_dependencies(arrival):
            if run.results.are_complete:  # what follows sees the new state
                run.state.assign()
            start = loss.start(run)
        run.backward(start)
        with tf.control_dependencies(arrival):
            run.state.assign()
            total = loss.total(run)
            self._update(run, loss, total, guard)
            logs = self._logs(run, head, total, batch)
            return logs if guard is None else self._guarded(logs, guard)

    @base
    @as_graph
    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluates one mini-batch; called by `evaluate`."""
        batch, arrival = self._unpack(data)
        head, loss = self._loss_of(batch, training=False)
        run = self._forward(batch, head, loss, training=False)
        with tf.control_dependencies(arrival):
            run.state.assign()
            total = loss.total(run)
            return self._logs(run, head, total, batch)

    @base
    @as_graph
    def predict_step(self, data: Any) -> Any:
        """Computes one mini-batch's outputs; called by `predict`."""
        batch, arrival = self._unpack(data, with_loss=False)
        run = self._forward(batch, None, None, training=False)
        with tf.control_dependencies(arrival):
            run.state.assign()
        return run.results.joined_outputs()

    def _unpack(
        self, data: Any, with_loss: bool = True
    ) -> tuple[tuple[Any, Any, Any], list[tf.Operation]]:
        """The mini-batch as it is given, and what has run once it is there.

        Losses and metrics of a user's get this x, as in Keras: uncast, and in
        a dict if it came in one.
        """
        self._check_scope()
        internals.forget_added_losses(self)  # as does a call of the model
        kept = (type(None), tf.SparseTensor, tf.RaggedTensor)  # to be refused
        data = tree.map_structure(
            lambda t: t if isinstance(t, kept) else tf.convert_to_tensor(t),
            data,
        )
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        inputs.check_there(x)
        if not with_loss:
            y = sample_weight = None
        checks = check_rows(x, y, sample_weight)
        self.prepare(x, y, sample_weight, with_loss)
        arrival = inputs.arrival((x, y, sample_weight), checks)
        return (x, y, sample_weight), arrival

    def as_taken(self, x: Any) -> Any:
        """Data as the first layer takes it, checked."""
        x = self.cast_inputs(x)
        model = self._source.model
        is_exact = model is not None and model.input_spec is not None
        inputs.check_shapes(x, self._plan.input_spec, is_exact)
        return x

    def cast_inputs(self, x: Any) -> Any:
        """Data as the layers expect it, see `inputs.as_expected`."""
        is_declared = self._source.input_spec is not None
        x = self._source.arranged(x)
        return inputs.as_expected(x, self._plan.input_spec, is_declared)

    def _loss_of(
        self, batch: tuple[Any, Any, Any], training: bool
    ) -> tuple[Head, Objective]:
        """What the last cell computes of the loss, and the rest of it."""
        _, y, sample_weight = batch
        specs = as_specs(y), self._plan.output_spec, as_specs(sample_weight)
        has_own_losses = type(self).losses is not Steps.losses
        is_summed = (
            not has_own_losses
            and streams_loss(self, *specs)
            and not (training and has_own_scale(self.optimizer))
        )
        head = Head(self, is_summed, streams_metrics(self, *specs))
        objective = SummedLoss if is_summed else WholeLoss
        if training:
            seen = internals.compiled_loss(self), as_specs(batch)
            self._plan.trained = seen
        return head, objective(self, batch, training)

    def _forward(
        self,
        batch: tuple[Any, Any, Any],
        head: Head | None,
        loss: Objective | None,
        training: bool,
    ) -> Pipeline:
        """Runs a mini-batch through the cells, up to the backward pass."""
        given, *labels = batch
        x = self.as_taken(given)

        def run_forward() -> Pipeline:
            run = self.lowered(x, labels, head, loss, training)
            run.forward()
            return run

        with inputs.explaining_sizes(x, self._plan.input_spec):
            return until_known(run_forward)

    def lowered(
        self,
        x: Any,
        labels: Sequence[Any],
        head: Head | None,
        loss: Objective | None,
        training: bool,
    ) -> Pipeline:
        """A mini-batch of which it is known what it will run.

        Args:
            x: What the first layer takes.
            labels: y and sample_weight, nests or None.
            head: What the last cell computes of the loss, or None.
            loss: The rest of it, or None.
            training: Whether gradients are wanted.
        """
        traced = self._traced(x, labels, head, training)
        trained = loss if traced.is_training else None
        will_have: Any = ()
        if trained is not None:
            will_have = trained.has_gradient(traced)
        tasks = traced.tasks(*will_have)
        program = traced.program(tasks, self._arguments.schedule_of)
        if trained is not None:
            trained.check(program)
        return Pipeline(traced, tasks, program, self._plan.clock)

    def _traced(
        self,
        x: Any,
        labels: Sequence[Any],
        head: Any,
        training: bool,
        parts: tuple[list[Cell], Remat] | None = None,
    ) -> MiniBatch:
        """Traces the cells, or parts of them, with what these recompute."""
        self._source.check(as_specs(x))
        plan, arguments = self._plan, self._arguments
        cells, remat = parts or (plan.cells, arguments.remat_by_cell())
        compiles = self._jit_cells or self._only_compiles
        if compiles:
            inputs.warn_of_unknown_sizes(x, plan.input_spec)
        return MiniBatch(
            cells,
            x,
            None if head is None else tuple(labels),
            self.num_micro_batches,
            training,
            head,
            remat,
            Tracer(compiles, arguments.gradient_dtype),
            plan.trial if parts is None else None,
        )

    @property
    def _only_compiles(self) -> bool:
        return names.only_compiles(
            device for cell in self._plan.cells for device in cell.devices
        )

    @contextlib.contextmanager
    def timed_by(self, clock: Any) -> Iterator[None]:
        """Inside, training steps are traced with a `run.Clock`."""
        self._plan.clock = clock
        try:
            yield
        finally:
            self._plan.clock = None

    def _logs(
        self,
        run: Pipeline,
        head: Head,
        total: tf.Tensor,
        batch: tuple[Any, Any, Any],
    ) -> dict[str, Any]:
        """What `fit` shows: the loss and the metrics."""
        x, y, sample_weight = batch
        added = [v for losses in run.results.extra_losses() for v in losses]
        self._plan.added_losses = internals.current_graph(), added
        with tf.device(run.results.device):
            internals.loss_tracker(self).update_state(
                total, sample_weight=run.micro_batches.num_rows
            )
            if head.streams_metrics:
                return self.get_metrics_result()
            return self.compute_metrics(
                x, y, run.results.joined_outputs(), sample_weight=sample_weight
            )

    @contextlib.contextmanager
    def replaced_losses(self, losses: list[Any]) -> Iterator[None]:
        """Inside, `self.losses` are these: those of the mini-batch.

        So is what `self.add_loss` adds; calls of layers that add are refused.
        """
        internals.forget_added_losses(self)
        self._plan.pending_losses = losses
        try:
            yield
        finally:
            self._plan.pending_losses = None

    @property
    def losses(self) -> list[Any]:
        """Losses of `add_loss` and regularisers, see `keras.Model`."""
        pending = self._plan.pending_losses
        graph, added = self._plan.added_losses
        if pending is None and graph is not internals.current_graph():
            return super().losses
        if (pending or added) and (layer := internals.adding_layer(self)):
            raise ValueError(
                "`self.losses` must be read before layers are called that add "
                "to them: those of the mini-batch are another call's. "
                f"Received: a call of layer '{layer.name}' beside the "
                "pipeline's. Read `self.losses`, or call the base's "
                "`compute_loss`, first."
            )
        if pending is not None:
            return [*pending, *internals.own_losses(self)]
        return [*added, *super().losses]
