"""What a `GPipe` does with one mini-batch: train, test and predict steps.

Keras's `fit`, `evaluate` and `predict` call the steps, and trace them into one
graph each.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import inputs, internals, placement
from tfgpipe import strategy as strategy_lib
from tfgpipe.cell_function import Borrows
from tfgpipe.failures import explained, one_step
from tfgpipe.loss import Head
from tfgpipe.micro_batch import as_specs, check_rows, shapes
from tfgpipe.objective import Objective
from tfgpipe.pipeline import Pipeline
from tfgpipe.row_wise import streams_loss, streams_metrics
from tfgpipe.trace import Tracer
from tfgpipe.update import update_on_devices


class Stepped(internals.BuiltBeforeTracing):
    """The part of `GPipe` that runs mini-batches through its cells."""

    train_function: Any
    test_function: Any
    predict_function: Any

    def make_train_function(self, force: bool = False) -> None:
        """Makes what Keras calls with each batch in `fit`."""
        self._check_storage()
        if self.train_function is None or force:
            self._check_scope()
            self._arguments.check_training()
            super().make_train_function(force)
            self.train_function = self._explained(self.train_function)

    def make_test_function(self, force: bool = False) -> None:
        """Makes what Keras calls with each batch in `evaluate`."""
        self._check_storage()
        if self.test_function is None or force:
            self._check_scope()
            super().make_test_function(force)
            self.test_function = self._explained(self.test_function)

    def make_predict_function(self, force: bool = False) -> None:
        """Makes what Keras calls with each batch in `predict`."""
        self._check_storage()
        if self.predict_function is None or force:
            self._check_scope()
            super().make_predict_function(force)
            self.predict_function = self._explained(self.predict_function)

    def _explained(self, function: Callable) -> Callable:
        is_alone = self.steps_per_execution == 1
        return explained(function, self._plan.cells, is_alone)

    def _check_storage(self) -> None:
        """Refuses layers that another model took over."""
        if self._plan.storage is not None:
            self._plan.storage.check()

    def _check_scope(self) -> None:
        """Refuses strategies that the model does not know of."""
        strategy = strategy_lib.current()
        if strategy not in (None, self._plan.strategy):
            raise ValueError(
                "A `GPipe` must be used in the scope of the strategy in whose "
                "scope it was made, or of none. Received: the scope of "
                f"{strategy}, and a model that was made in that of "
                f"{self._plan.strategy}. Make the model in the same scope."
            )

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains on one mini-batch; called by `fit`."""
        data, arrival = self._unpack(data)
        head, objective = self._loss_for(data, arrival, training=True)
        run = self._run(data[0], data[1:], head, True, objective)
        with tf.control_dependencies(arrival):
            objective.finish(run)
            if run.is_training and self.trainable_variables:
                self._update(run, objective)
            else:
                warnings.warn(
                    "The model does not have any trainable weights.",
                    stacklevel=2,
                )
            return self._logs(run, head, objective, data)

    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluates one mini-batch; called by `evaluate`."""
        data, arrival = self._unpack(data)
        head, objective = self._loss_for(data, arrival, training=False)
        run = self._run(data[0], data[1:], head, False)
        with tf.control_dependencies(arrival):
            objective.finish(run)
            return self._logs(run, head, objective, data)

    def predict_step(self, data: Any) -> Any:
        """Computes one mini-batch's outputs; called by `predict`."""
        (x, _, _), arrival = self._unpack(data, with_loss=False)
        run = self._run(x, None, None, False)
        with tf.control_dependencies(arrival):
            run.state.assign()
        return run.results.joined_outputs()

    def _unpack(
        self, data: Any, with_loss: bool = True
    ) -> tuple[tuple[Any, Any, Any], list[tf.Operation]]:
        """The mini-batch, and what has run once it is there."""
        kept = (type(None), tf.SparseTensor, tf.RaggedTensor)  # to be refused
        data = tree.map_structure(
            lambda t: t if isinstance(t, kept) else tf.convert_to_tensor(t),
            data,
        )
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if not with_loss:
            y = sample_weight = None
        checks = check_rows(x, y, sample_weight)
        self._prepare(x, y, sample_weight, with_loss)
        arrival = inputs.arrival((x, y, sample_weight), checks)
        return (self.cast_inputs(x), y, sample_weight), arrival

    def cast_inputs(self, x: Any) -> Any:
        """Data as the layers expect it, see `inputs.as_expected`."""
        is_declared = self._arguments.input_spec is not None
        return inputs.as_expected(x, self._plan.input_spec, is_declared)

    def _loss_for(
        self, data: Any, arrival: list[tf.Operation], training: bool
    ) -> tuple[Head, Objective]:
        _, y, sample_weight = data
        specs = as_specs(y), self._plan.output_spec, as_specs(sample_weight)
        with_loss = streams_loss(self, *specs)
        head = Head(self, with_loss, streams_metrics(self, *specs))
        return head, Objective(self, data, with_loss, training, arrival)

    @one_step
    def _run(
        self,
        x: Any,
        labels: Any,
        head: Any,
        training: bool,
        objective: Objective | None = None,
    ) -> Pipeline:
        """Runs a mini-batch through the cells."""
        while True:  # until it is known what each cell reads
            try:
                run = self._pipeline(x, labels, head, training)
                run.run(self._arguments.schedule_of, objective)
                return run
            except Borrows as found:
                found.note()

    def _pipeline(
        self, x: Any, labels: Any, head: Any, training: bool
    ) -> Pipeline:
        return Pipeline(
            self._plan.cells,
            x,
            labels,
            self.num_micro_batches,
            training,
            head,
            self._arguments.remat_by_cell(),
            Tracer(
                self.run_eagerly or tf.config.functions_run_eagerly(),
                self._jit_cells or self._is_on_tpu,
                self._arguments.gradient_dtype,
            ),
            self._plan.clock,
        )

    @property
    def _is_on_tpu(self) -> bool:
        return placement.has_tpu(
            device for cell in self._plan.cells for device in cell.devices
        )

    def _update(self, run: Pipeline, objective: Objective) -> None:
        """Applies the gradients, each on the device of its variable."""
        gradients = run.gradients()
        objective.add_direct(gradients)
        variables = self.trainable_variables
        pairs = [(gradients.get(id(v)), v) for v in variables]
        with contextlib.ExitStack() as stack:
            stack.enter_context(update_on_devices(self.optimizer, variables))
            if self._plan.clock is not None:
                stack.enter_context(self._plan.clock.update(run.turns.last_op))
            self.optimizer.apply_gradients(pairs)

    @contextlib.contextmanager
    def timed_by(self, clock: Any) -> Iterator[None]:
        """Inside, training steps are traced with a `timeline.Clock`."""
        self._plan.clock = clock
        try:
            yield
        finally:
            self._plan.clock = None

    def _logs(
        self, run: Pipeline, head: Head, objective: Objective, data: Any
    ) -> dict[str, Any]:
        x, y, sample_weight = data
        with tf.device(run.cells[-1].device):
            internals.loss_tracker(self).update_state(
                objective.total, sample_weight=run.micro_batches.num_rows
            )
            if head.streams_metrics:
                return self.get_metrics_result()
            return self.compute_metrics(
                x, y, run.results.joined_outputs(), sample_weight=sample_weight
            )

    @contextlib.contextmanager
    def replaced_losses(self, losses: list[Any]) -> Iterator[None]:
        """Inside, `self.losses` are these: those of the mini-batch."""
        self._plan.pending_losses = losses
        try:
            yield
        finally:
            self._plan.pending_losses = None

    @property
    def losses(self) -> list[Any]:
        """Losses of `add_loss` and regularisers, see `keras.Model`."""
        if self._plan.pending_losses is not None:
            return self._plan.pending_losses
        return super().losses

    def _prepare(
        self, x: Any, y: Any, sample_weight: Any, with_loss: bool
    ) -> None:
        """Creates all variables, before the step is traced if possible."""
        with internals.outside_functions(), internals.without_strategy():
            if not self.built:
                self._plan.input_spec = inputs.data_spec(x, self.input_dtype)
                self.build(shapes(self._plan.input_spec))
            if not with_loss:
                return
            self.build_optimizer()
            with tf.device(self._plan.cells[-1].device):
                internals.build_losses_and_metrics(
                    self,
                    as_specs(x),
                    as_specs(y),
                    self._plan.output_spec,
                    as_specs(sample_weight),
                )

    def build_optimizer(self) -> None:
        """Creates the optimizer's slots, each where its variable is.

        Keras does so in the first step, and puts all of them on device 0.
        """
        optimizer = getattr(self, "optimizer", None)
        if optimizer is None:
            return
        if self._plan.strategy is not None:
            internals.adopt(optimizer, self._plan.strategy)
        if not optimizer.built:
            with tf.init_scope(), internals.without_strategy():
                optimizer.build(self.trainable_variables)

    def build_for(self, data: Any) -> None:
        """Creates all variables before Keras traces a step.

        A step that creates some would be traced twice.

        Args:
            data: What the step will get; `tf.TensorSpec`s for tensors.
        """
        leaves = tree.flatten(data)
        if all(t is None or hasattr(t, "shape") for t in leaves):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            self._prepare(x, y, weight, with_loss=True)

    # ------------------------------------------------------------- Keras's XLA
    @property
    def jit_compile(self) -> bool:
        """Always False: `compile(jit_compile=True)` compiles each cell.

        On a TPU, cells are compiled in any case.
        """
        return False

    @jit_compile.setter
    def jit_compile(self, value: Any) -> None:
        self._jit_cells = value is True
