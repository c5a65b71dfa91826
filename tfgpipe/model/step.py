"""Runs one mini-batch: the train, test and predict steps of a `GPipe`.

Keras's `fit`, `evaluate` and `predict` call the steps, and trace them into one
graph each. A training step ends with the update, or skips the mini-batch.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import inputs, internals
from tfgpipe.cells import Head
from tfgpipe.devices import placement
from tfgpipe.failures import setting
from tfgpipe.graphs import TraceOptions, one_step
from tfgpipe.inputs import as_specs, check_dense, check_rows
from tfgpipe.internals import Nest
from tfgpipe.loss import (
    Objective,
    SummedLoss,
    WholeMiniBatchLoss,
    add_direct,
    has_own_scale,
    loss_obstacle,
    metrics_add_up,
)
from tfgpipe.model.hooks import Hooks
from tfgpipe.model.nonfinite import Guard
from tfgpipe.model.own_step import base, in_pipeline
from tfgpipe.run import (
    MiniBatch,
    Pipeline,
    update_on_devices,
    updates_slices_alike,
)

_NOTHING = contextlib.nullcontext()


class Passes(NamedTuple):
    """The forward and the backward pass of one mini-batch, without an update.

    Attributes:
        batch: x, y and sample_weight as they are given.
        arrival: Operations that have run once these are there and checked.
        head: Computes loss and metrics of a micro-batch.
        loss: The loss of the mini-batch.
        run: The mini-batch, which has gone through the cells.
        guard: Undoes what is not finite, or None.
        total: The loss, a scalar.
    """

    batch: tuple[Any, Any, Any]
    arrival: list[tf.Operation]
    head: Head
    loss: Objective
    run: Pipeline
    guard: Guard | None
    total: tf.Tensor


def as_graph(kind: str) -> Callable[[Callable], Callable]:
    """Makes a "train", "test" or "predict" step a graph, whoever calls it."""

    def wrapped(step: Callable) -> Callable:
        in_graph = one_step(step)

        @functools.wraps(step)
        @tf.autograph.experimental.do_not_convert
        def called(self: Any, data: Nest) -> Any:
            if tf.executing_eagerly():
                return self.run_as_graph(in_graph, data, kind)
            with setting(in_pipeline, True):
                return in_graph(self, data)

        return called

    return wrapped


class TrainingSteps(Hooks):
    """The part of `GPipe` that runs mini-batches through its cells."""

    run_eagerly: Any

    def build_for(self, data: Nest) -> None:
        """Creates all variables before Keras traces a step.

        `data` is what the step will get, with `tf.TensorSpec`s for tensors.
        Where a step is a subclass's, `GPipe`'s may get something else: what it
        gets is known when it is traced.
        """
        steps: Any = self.train_step, self.test_step
        leaves = tree.flatten(data)
        if all(step.is_base for step in steps) and all(
            t is None or hasattr(t, "shape") for t in leaves
        ):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            for name, nest in ("x", x), ("y", y), ("sample_weight", weight):
                check_dense((nest,), name)
            self.prepare(x, y, weight, with_loss=True)

    @base
    @as_graph("train")
    def train_step(self, data: Nest) -> dict[str, Any]:
        """Trains on one mini-batch; called by `fit`."""
        passes = self.passes_of(data, training=True)
        with tf.control_dependencies(passes.arrival):
            self._update(passes)
            logs = self._logs(passes)
            if passes.guard is None:
                return logs
            skipped = passes.guard.end()  # undoes what is not finite
            if "compute_metrics" not in internals.overridden(self, keras.Model):
                logs = self.get_metrics_result()  # as they are now
            return {**logs, **skipped}

    def passes_of(
        self,
        data: Nest,
        training: bool,
        is_whole_step: bool = True,
        updates_metrics: bool = True,
    ) -> Passes:
        """Runs a mini-batch forward, and back in `training`.

        `is_whole_step` is whether the optimizer's update follows.
        """
        batch, arrival = self._unpack(data)
        head, loss = self._loss_of(
            batch, training, is_whole_step, updates_metrics
        )
        #     forward     F0 F1             up to the first backward task
        #     start             dy          where the loss's gradient starts
        #     backward             B1 B0    all other tasks
        run = self.pipeline_for(batch, head, loss, training)
        run.forward()
        guard = self._guard(run, is_whole_step) if training else None
        if training:
            with tf.control_dependencies(arrival):
                if run.batch.is_complete:  # what follows sees the new state
                    run.assign_state()
                start = loss.start(run)
            run.backward(start)
        with tf.control_dependencies(arrival):
            run.assign_state()
            total = loss.total(run)
        return Passes(batch, arrival, head, loss, run, guard, total)

    @base
    @as_graph("test")
    def test_step(self, data: Nest) -> dict[str, Any]:
        """Evaluates one mini-batch; called by `evaluate`."""
        passes = self.passes_of(data, training=False)
        with tf.control_dependencies(passes.arrival):
            return self._logs(passes)

    @base
    @as_graph("predict")
    def predict_step(self, data: Nest) -> Any:
        """Computes one mini-batch's outputs; called by `predict`."""
        batch, arrival = self._unpack(data, with_loss=False)
        run = self.pipeline_for(batch, None, None, training=False)
        run.forward()
        with tf.control_dependencies(arrival):
            run.assign_state()
        return run.batch.joined_outputs()

    def _unpack(
        self, data: Nest, with_loss: bool = True
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
        checks = check_rows(x, y, sample_weight, self.is_split)
        self.prepare(x, y, sample_weight, with_loss)
        arrival = inputs.arrival((x, y, sample_weight), checks)
        return (x, y, sample_weight), arrival

    def _loss_of(
        self,
        batch: tuple[Any, Any, Any],
        training: bool,
        is_whole_step: bool = True,
        updates_metrics: bool = True,
    ) -> tuple[Head, Objective]:
        """Tells what the last cell computes of the loss, and the rest of it."""
        _, y, sample_weight = batch
        built = self.built_for("a step")
        specs = as_specs(y), built.output_spec, as_specs(sample_weight)
        has_own = has_own_scale(getattr(self, "optimizer", None))
        is_summed = (
            type(self).losses is TrainingSteps.losses
            and loss_obstacle(self, *specs) is None
            and not (training and is_whole_step and has_own)
        )
        adds_up = not updates_metrics or metrics_add_up(self, *specs)
        head = Head(self, is_summed, adds_up, updates_metrics)
        objective = SummedLoss if is_summed else WholeMiniBatchLoss
        if training:
            seen = internals.compiled_loss(self), as_specs(batch)
            self._notes.trained = seen
        scales = training and (is_whole_step or not has_own)
        return head, objective(self, batch, training, scales)

    def pipeline_for(
        self,
        batch: tuple[Any, Any, Any],
        head: Head | None,
        loss: Objective | None,
        training: bool,
        cls: type[MiniBatch] = MiniBatch,
    ) -> Pipeline:
        """A mini-batch of which it is known what it will run.

        `batch` is x, y and sample_weight; `loss` is what the head does not
        compute of it, or None; `cls` is the class of the mini-batch.
        """
        given, *labels = batch
        x = self.built_for("a step").as_taken(given)
        clock = self._notes.clock

        def pipeline(compiles: bool) -> Pipeline:
            built = self.built_for("a step")
            arguments = built.arguments
            m = arguments.num_micro_batches
            compiles = compiles or built.only_compiles
            mini_batch = cls(
                [*built.cells],
                built.source,
                x,
                None if head is None else tuple(labels),
                m,
                training,
                head,
                built.remat,
                TraceOptions(
                    compiles,
                    arguments.gradient_dtype,
                    begins_sums=compiles and m > 1,
                ),
                self._trial,
            )
            # Only what will have a gradient gets a backward pass.
            trained = loss if mini_batch.is_training else None
            will_have = trained.has_gradient(mini_batch) if trained else ()
            tasks = mini_batch.tasks(*will_have)
            program = mini_batch.program(tasks, arguments.schedule_of)
            if trained:
                trained.check(program)
            return Pipeline(mini_batch, tasks, program, clock)

        run = self.compiled_if_possible(pipeline)
        if training:
            # All that has weights was called now: before the loss is scaled,
            # as Keras's second trace finds an optimizer that is built.
            with internals.outside_functions():
                self.build_optimizer()
        return run

    def _update(self, passes: Passes) -> None:
        """Applies the gradients, each on the device of its variable."""
        run, guard = passes.run, passes.guard
        pairs = self.gradients_of(run, passes.loss)
        if not pairs:
            warnings.warn(
                "The model does not have any trainable weights.", stacklevel=3
            )

        def update() -> None:
            if pairs:
                jit = run.batch.traced.options.jit_compile
                update_on_devices(self.optimizer, pairs, jit)

        clock = self._notes.clock
        with clock.update(run.chain.last_op) if clock else _NOTHING:
            if guard is None:
                update()
            else:
                assigned = run.state.assigned_values
                guard.update(
                    self.optimizer, passes.total, pairs, update, assigned
                )

    def gradients_of(
        self, run: Pipeline, loss: Objective
    ) -> list[tuple[Any, keras.Variable]]:
        """Gradients, or None, and their weights."""
        gradients = run.gradients() if run.batch.is_training else {}
        add_direct(gradients, loss.direct_gradients)
        pairs = [(gradients.get(id(v)), v) for v in self.trainable_weights]
        taken = [(placement.as_device_takes(d, v), v) for d, v in pairs]
        changed = [v for (d, v), (t, _) in zip(pairs, taken) if d is not t]
        if changed and not updates_slices_alike(self.optimizer):
            warnings.warn(
                f"{type(self.optimizer).__name__} also moves rows of "
                f"'{changed[0].path}' that were not looked up, as XLA compiles "
                "it. Train with SGD or Lion, or on another device.",
                stacklevel=3,
            )
        if self._notes.tell_gradients is not None:
            self._notes.tell_gradients(taken)
        return taken

    def _guard(self, run: Pipeline, is_whole_step: bool) -> Guard | None:
        """Returns what undoes a mini-batch, or a user's step, or None."""
        skips, step = self._notes.skips, self._notes.own_step
        if skips is None:
            return None
        kept = [*self.metrics_variables, *run.state.assigned]
        if is_whole_step or step is None:
            return Guard([*self.non_trainable_variables, *kept], skips)
        step.check_graph()
        if step.guard is None:
            step.guard = Guard([*self.variables, *kept], skips)
        return step.guard

    def timed_by(self, clock: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, training steps are traced with a `run.Clock`."""
        return internals.replaced(self._notes, "clock", clock)

    def _logs(self, passes: Passes) -> dict[str, Any]:
        """Returns what `fit` shows: the loss and the metrics."""
        run = passes.run
        with tf.device(run.batch.device):
            internals.loss_tracker(self).update_state(
                passes.total, sample_weight=run.batch.micro_batches.num_rows
            )
        return self.updated_metrics(passes)

    def updated_metrics(self, passes: Passes) -> dict[str, Any]:
        """The metrics, of which the head has not updated all."""
        x, y, sample_weight = passes.batch
        batch = passes.run.batch
        added = batch.extra_losses()
        self._notes.added_losses = internals.current_graph(), added
        with tf.device(batch.device):
            if passes.head.metrics_add_up:
                return self.get_metrics_result()
            return self.compute_metrics(
                x, y, batch.joined_outputs(), sample_weight=sample_weight
            )

    def replaced_losses(
        self, losses: list[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, `self.losses` are these, the mini-batch's.

        So is what `self.add_loss` adds, and what is called besides `layers`;
        calls of those that add are refused.
        """
        internals.forget_added_losses(self)
        return internals.replaced(self._notes, "pending_losses", losses)

    @property
    def losses(self) -> list[Any]:
        """Losses of `add_loss` and regularisers, see `keras.Model`."""
        pending = self._notes.pending_losses
        graph, added = self._notes.added_losses
        if pending is None and graph is not internals.current_graph():
            return super().losses
        if (pending or added) and (layer := internals.adding_layer(self)):
            raise ValueError(
                "`self.losses` must be read before layers are called that add "
                f"to them. Received: a call of layer '{layer.name}'."
            )
        if pending is not None:
            return [*pending, *internals.added_losses(self)]
        return [*added, *super().losses]

    @contextlib.contextmanager
    def nothing_eager(self) -> Iterator[None]:
        """Inside, steps are traced, also in a model that runs eagerly."""
        was_eager = bool(self.run_eagerly), tf.config.functions_run_eagerly()
        self.run_eagerly = False
        tf.config.run_functions_eagerly(False)
        try:
            yield
        finally:
            self.run_eagerly = was_eager[0]
            tf.config.run_functions_eagerly(was_eager[1])
