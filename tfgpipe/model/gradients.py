"""Gradients for training steps that users write, and steps called eagerly.

The same passes as in a step of the pipeline's, without its update:

    train_step            forward, backward, update, logs
    loss_and_gradients    forward, backward            the user's go on
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import failures, internals
from tfgpipe.graphs import is_continuous
from tfgpipe.internals import Nest
from tfgpipe.model.own_step import in_pipeline
from tfgpipe.model.step import TrainingSteps, as_graph


def _refuse_tapes(*_: Any) -> None:
    """Is called where a tape differentiates what has gone forward and back."""
    raise ValueError(
        "What `loss_and_gradients` returns must not be differentiated by a "
        "tape. Call the model inside the tape, `model(x, training=True)`."
    )


def _copied(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device(tensor.device):
        return tf.identity(tensor)


class OwnSteps(TrainingSteps):
    """The part of `GPipe` that gives training steps their gradients."""

    def loss_and_gradients(
        self,
        x: Nest,
        y: Nest = None,
        sample_weight: Nest = None,
        *,
        update_metrics: bool = True,
    ) -> tuple[tf.Tensor, list[Any]]:
        """Passes one mini-batch through the pipeline, forward and backward.

        For a training step of one's own: what it makes of the gradients, such
        as an update, is not this method's. It may be called in the `train_step`
        of a subclass, or of another model, once or several times, and eagerly.
        Weights are read when it is called: a second call sees what was assigned
        after the first one.

        As in `fit`, micro-batches go through the cells under the schedule.
        Moving statistics, random seeds and metrics of layers are assigned once
        for the mini-batch.

        Args:
            x: Inputs, a nest of tensors of shape (batch, ...).
            y: Labels, a nest of tensors of shape (batch, ...), or None.
            sample_weight: Weights of rows, as in `fit`; or None.
            update_metrics: Whether to update the metrics of `compile`, or to
                call an overridden `compute_metrics` with the outputs of the
                mini-batch. The metric "loss" of `self.metrics` is not updated,
                as `compute_loss` does not: do so where the logs shall have it.
                Where there are several outputs, the metrics of their losses are
                updated in any case, as by `compute_loss`.

        Returns:
            loss: That of `compute_loss`, a scalar, with all that layers add to
                it. It cannot be differentiated.
            gradients: A list in the order of `trainable_variables`: of each a
                tensor of its shape, `tf.IndexedSlices`, or None where the loss
                does not depend on it; on its device. Those of the loss itself,
                also where the optimizer scales it against underflow. As
                `LossScaleOptimizer.apply` divides by its scale, they must be
                multiplied first: by `optimizer.scale_loss`.

        Raises:
            ValueError: If there is no loss, or it cannot be computed under the
                schedule: one of whole mini-batches needs all outputs first.

        Example:

        >>> import keras
        >>> import numpy as np
        >>> import tfgpipe
        >>> class Clipped(tfgpipe.GPipe):
        ...     def train_step(self, data):
        ...         x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        ...         loss, gradients = self.loss_and_gradients(x, y, w)
        ...         gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        ...         self.optimizer.apply(gradients, self.trainable_variables)
        ...         return {"loss": loss, "norm": norm}
        >>> model = Clipped([keras.layers.Dense(2)], 1, num_micro_batches=2)
        >>> model.compile("sgd", "mse")
        >>> logs = model.train_on_batch(
        ...     np.ones((4, 3)), np.ones((4, 2)), return_dict=True
        ... )
        >>> sorted(logs)
        ['loss', 'norm']
        """
        self._notes.base_calls.update(["train_step", "loss_and_gradients"])
        self.compile_as_task()
        if self._notes.own_step is not None:
            self._notes.own_step.is_unscaled = True
        step = self._passed_with_metrics if update_metrics else self._passed
        data = x, y, sample_weight
        results = step(data)
        if internals.tapes_are_recording():
            if not tf.executing_eagerly():  # others are known to no tape
                with internals.not_recording():
                    results = tf.nest.map_structure(
                        _copied, results, expand_composites=True
                    )
            flat = tf.nest.flatten(results, expand_composites=True)
            sources = [v.value for v in self.trainable_variables]
            sources += filter(tf.is_tensor, tree.flatten(data))
            internals.refuse_tapes(
                [t for t in flat if is_continuous(t)], sources, _refuse_tapes
            )
        return results

    @as_graph("train")
    def _passed_with_metrics(self, data: Nest) -> tuple[tf.Tensor, list[Any]]:
        return self._loss_and_gradients(data, updates_metrics=True)

    @as_graph("train")
    def _passed(self, data: Nest) -> tuple[tf.Tensor, list[Any]]:
        return self._loss_and_gradients(data, updates_metrics=False)

    def _loss_and_gradients(
        self, data: Nest, updates_metrics: bool
    ) -> tuple[tf.Tensor, list[Any]]:
        passes = self.passes_of(data, True, False, updates_metrics)
        with tf.control_dependencies(passes.arrival):
            run, loss, guard = passes.run, passes.loss, passes.guard
            pairs = self.gradients_of(run, loss)
            known = {id(v): loss.unscaled(d, v) for d, v in pairs}
            if updates_metrics:
                self.updated_metrics(passes)
            if guard is not None:
                assigned = run.state.assigned_values
                guard.look(passes.total, pairs, assigned)
                if self._notes.own_step is None:  # that ends it
                    guard.end()
            variables = self.trainable_variables
            return passes.total, [known.get(id(v)) for v in variables]

    # -------------------------------------------------------- called eagerly
    def run_as_graph(self, step: Callable, data: Nest, kind: str) -> Any:
        """Runs a step that was called eagerly, as `as_graph` has it."""
        getattr(self, f"make_{kind}_function")()  # what Keras checks before
        self.note_data(data)
        batch, _ = self._unpack(data, with_loss=kind != "predict")
        name = step.__name__
        if self.run_eagerly or tf.config.functions_run_eagerly():
            return self._run_keras_step(name, batch)
        known = self._notes.functions.setdefault(kind, {})
        key = name, *(v.trainable for v in self.variables)
        if key not in known:
            # Traced anew for other numbers of rows: where they are known, as
            # eagerly, Keras weighs the losses of several outputs by them.
            traced = tf.function(functools.partial(step, self), autograph=False)
            call = self._explained(lambda function, data: function(data))
            known[key] = traced, call
        traced, call = known[key]
        if not internals.tapes_are_recording():
            return call(traced, data)
        # Tapes are needed in the graph, and of no use around it.
        call(traced.get_concrete_function, data)
        with internals.not_recording():
            return call(traced, data)

    def _run_keras_step(self, name: str, batch: tuple[Any, Any, Any]) -> Any:
        """Runs Keras's own step, on the whole mini-batch, for debugging."""
        if self._notes.skips is not None:
            raise ValueError(
                "`skip_nonfinite` must be left out with run_eagerly=True."
            )
        with failures.setting(in_pipeline, True):
            if hasattr(keras.Model, name):
                return getattr(keras.Model, name)(self, batch)
            with tf.GradientTape() as tape:
                y_pred = self(batch[0], training=True)
                loss = self.compute_loss(*batch[:2], y_pred, batch[2])
            if name == "_passed_with_metrics":
                self.compute_metrics(*batch[:2], y_pred, batch[2])
            weights = [v.value for v in self.trainable_variables]
            return loss, tape.gradient(loss, weights)
