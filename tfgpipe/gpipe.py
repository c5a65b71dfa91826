"""`GPipe`: a list of Keras layers as a model that spans several devices."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import cost as cost_lib
from tfgpipe import internals, placement, saving
from tfgpipe.arguments import Arguments
from tfgpipe.cell import Cell
from tfgpipe.cell_record import CellRecord, print_cells
from tfgpipe.loss import Head, Objective, streams_loss, streams_metrics
from tfgpipe.micro_batch import as_specs, check_rows
from tfgpipe.partition import partition
from tfgpipe.pipeline import Pipeline
from tfgpipe.schedule import SCHEDULES, forward_only
from tfgpipe.trace import Tracer


class _Plan:
    """What `build` found out. A plain object, which Keras does not track:
    names and files must not know about cells."""

    def __init__(self) -> None:
        self.input_spec: Any = None
        self.output_spec: Any = None
        self.cells: list[Cell] = []
        self.costs: list[float] = []
        self.random_state: saving.RandomState | None = None
        self.pending_losses: list[Any] | None = None


@keras.saving.register_keras_serializable(package="tfgpipe")
class GPipe(keras.Model):
    """A sequence of Keras layers that is trained on several devices.

    The layers are cut into `num_partitions` cells, one a device. A mini-batch
    is split into `num_micro_batches`, which follow each other through the
    cells, so that the devices work at the same time. Gradients are summed and
    applied once for the mini-batch: loss, metrics and weights are those of
    `keras.Sequential(layers)`.

    Args:
        layers: Keras layers, each called on the outputs of the one before, any
            nest of tensors. An item may be a pair (layer, cost), where the
            cost is a number or a function of (layer, input spec) that returns
            one; other costs are estimated, in FLOPs of one example, so the
            ones given must be in that unit too.
        num_partitions: K, the number of cells. Defaults to the number of
            devices.
        num_micro_batches: M, at least 1. A mini-batch of fewer rows is split
            into as many micro-batches as it has rows.
        devices: Names of K devices, such as "GPU:0". Defaults to the first K
            accelerators that TensorFlow lists: TPUs, or GPUs, or else CPUs.
        layers_per_cell: How many layers each cell has. By default the cells
            are balanced by cost.
        schedule: The order of the tasks on each device: "gpipe".
        remat: Which micro-batches the backward pass computes again instead of
            keeping their activations: "always", "never", or "except_last", all
            but the one whose backward pass comes first.
        name: Name of the model.

    Raises:
        ValueError: If an argument is out of range, or a layer cannot take the
            outputs of the one before.

    Example:

    >>> layers = [keras.layers.Dense(8, activation="relu") for _ in range(4)]
    >>> model = GPipe(layers, num_partitions=1, num_micro_batches=4)
    >>> model.compile("adam", "mse")
    >>> history = model.fit(np.ones((16, 8)), np.ones((16, 8)), verbose=0)

    Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965)
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_partitions: int | None = None,
        num_micro_batches: int = 1,
        *,
        devices: Sequence[str] | None = None,
        layers_per_cell: Sequence[int] | None = None,
        schedule: str = "gpipe",
        remat: str = "except_last",
        name: str | None = None,
        **kwargs: Any,
    ):
        arguments = Arguments(
            layers,
            num_partitions,
            num_micro_batches,
            devices,
            layers_per_cell,
            schedule,
            remat,
        )
        super().__init__(name=name, **kwargs)
        # XLA would compile the whole step, onto one device.
        self.supports_jit = False
        self._jit_cells = False
        self._arguments = arguments
        self._plan = _Plan()
        self.sequence = arguments.layers
        if arguments.input_spec is not None:
            self._plan.input_spec = arguments.input_spec
            self.build(_shapes(arguments.input_spec))

    @property
    def num_partitions(self) -> int:
        """K, the number of cells."""
        return self._arguments.num_partitions

    @property
    def num_micro_batches(self) -> int:
        """M, the number of micro-batches of a mini-batch."""
        return self._arguments.num_micro_batches

    # ------------------------------------------------------------------ build
    def build(self, input_shape: Any) -> None:
        """Cuts the layers into cells and creates their variables there.

        Args:
            input_shape: Nest of shapes (batch, ...) of the inputs.
        """
        if self._plan.cells:
            return
        if self._plan.input_spec is None:
            dtype = self.input_dtype
            self._plan.input_spec = tree.map_shape_structure(
                lambda shape: keras.KerasTensor(shape, dtype), input_shape
            )
        with tf.init_scope():
            self._plan.output_spec = self._infer_specs()
            self._make_cells()
        seeds = [s for cell in self._plan.cells for s in cell.seeds]
        self._plan.random_state = saving.RandomState(seeds)
        # tf.train.Checkpoint finds nothing in a list of layers.
        self._checkpointed = tf.Module()
        self._checkpointed.values = [v.value for v in self.variables]
        self.built = True

    def _infer_specs(self) -> Any:
        """Builds the layers without their variables; finds their costs."""
        spec = self._plan.input_spec
        before = "the inputs"
        costs = []
        with internals.deferred_variables():
            for layer, cost in zip(self.sequence, self._arguments.costs):
                shapes = _shapes(spec)
                try:
                    output = layer(spec)
                except Exception as error:
                    raise ValueError(
                        f"Layer '{layer.name}' must accept the outputs of "
                        f"{before}. Received: outputs of shape {shapes}, and "
                        f"this error: {error} Check the order of the layers "
                        "and their sizes."
                    ) from error
                costs.append(cost_lib.resolve_cost(layer, cost, spec))
                spec, before = output, f"layer '{layer.name}'"
        self._plan.costs = costs
        return spec

    def _make_cells(self) -> None:
        counts = self._arguments.layers_per_cell or partition(
            self._plan.costs, self.num_partitions
        )
        start = 0
        for k, count in enumerate(counts):
            layers = self.sequence[start : start + count]
            device = self._arguments.devices[k]
            self._plan.cells.append(Cell(k, layers, device))
            start += count
        owned: set[int] = set()
        for cell in self._plan.cells:
            variables = [v for layer in cell.weights_by_layer for v in layer]
            variables = [v for v in [*variables, *cell.state]]
            new = {id(v): v for v in variables if id(v) not in owned}
            placement.create_or_move(list(new.values()), cell.device)
            owned.update(new)

    @property
    def random_state(self) -> Any:
        """The random seeds, which Keras itself does not save."""
        return self._plan.random_state

    def cells(self) -> list[CellRecord]:
        """What each cell holds, in order. The model must be built."""
        self._check_built("cells()")
        records, start = [], 0
        counted: set[int] = set()
        for cell in self._plan.cells:
            weights = {id(w): w for la in cell.sequence for w in la.weights}
            sizes = [
                w.shape for key, w in weights.items() if key not in counted
            ]
            counted.update(weights)
            stop = start + len(cell.sequence)
            records.append(
                CellRecord(
                    index=cell.index,
                    layers=tuple(layer.name for layer in cell.sequence),
                    device=cell.device,
                    cost=sum(self._plan.costs[start:stop]),
                    num_params=sum(tf.TensorShape(s).num_elements() for s in sizes),
                )
            )
            start = stop
        return records

    def _check_built(self, what: str) -> None:
        if not self._plan.cells:
            raise ValueError(
                f"`{what}` needs a model that is built. Received: a model that "
                "has seen no data. Call `model.build(input_shape)` first, or "
                "let the list of layers begin with `keras.Input(shape)`."
            )

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints Keras's summary, and the cell of each layer.

        Takes the arguments of `keras.Model.summary`.
        """
        super().summary(*args, **kwargs)
        if self._plan.cells:
            print_cells(self.cells(), kwargs.get("print_fn"))

    # ------------------------------------------------------------- plain call
    @property
    def input_dtype(self) -> str:
        """As in `keras.Sequential`, floats are cast for the first layer."""
        return self.sequence[0].compute_dtype

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Runs the layers one after the other, without a pipeline."""
        for cell in self._plan.cells:
            with tf.device(cell.device):
                for layer in cell.sequence:
                    inputs = layer(inputs)
        return inputs

    # ------------------------------------------------------------------ steps
    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains on one mini-batch; called by `fit`."""
        x, y, sample_weight = self._unpack(data)
        head, objective = self._loss_for(x, y, sample_weight, training=True)
        run = self._pipeline(x, (y, sample_weight), head, training=True)
        tasks = SCHEDULES[self._arguments.schedule](
            len(run.cells), run.micro_batches.count
        )
        run.run(tasks, objective.start)
        if objective.total is None:  # nothing is trainable
            objective.start(run)
            warnings.warn("The model does not have any trainable weights.")
        else:
            self._update(run, objective)
        return self._logs(run, head, objective, (x, y, sample_weight))

    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluates one mini-batch; called by `evaluate`."""
        x, y, sample_weight = self._unpack(data)
        head, objective = self._loss_for(x, y, sample_weight, training=False)
        run = self._pipeline(x, (y, sample_weight), head, training=False)
        run.run(forward_only(len(run.cells), run.micro_batches.count))
        objective.start(run)
        return self._logs(run, head, objective, (x, y, sample_weight))

    def predict_step(self, data: Any) -> Any:
        """Computes one mini-batch's outputs; called by `predict`."""
        x, _, _ = self._unpack(data, with_loss=False)
        run = self._pipeline(x, None, None, training=False)
        run.run(forward_only(len(run.cells), run.micro_batches.count))
        run.assign_state()
        return run.joined_outputs()

    def _unpack(self, data: Any, with_loss: bool = True) -> Any:
        data = tree.map_structure(
            lambda t: t
            if t is None or isinstance(t, tf.__internal__.CompositeTensor)
            else tf.convert_to_tensor(t),
            data,
        )
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if with_loss:
            check_rows(x, y, sample_weight)
        self._prepare(x, y, sample_weight, with_loss)
        return x, y, sample_weight

    def _loss_for(
        self, x: Any, y: Any, sample_weight: Any, training: bool
    ) -> tuple[Head, Objective]:
        spec = self._plan.output_spec
        with_loss = streams_loss(self, spec)
        head = Head(self, with_loss, streams_metrics(self, spec))
        return head, Objective(self, (x, y, sample_weight), with_loss, training)

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
            self._arguments.remat,
            Tracer(self.run_eagerly, self._jit_cells),
        )

    def _update(self, run: Pipeline, objective: Objective) -> None:
        """Applies the gradients, each on the device of its variable."""
        gradients = run.gradients()
        objective.add_regularizers(gradients)
        variables = self.trainable_variables
        pairs = [(gradients.get(id(v)), v) for v in variables]
        with placement.update_on_devices(self.optimizer, variables):
            self.optimizer.apply_gradients(pairs)

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
                x, y, run.joined_outputs(), sample_weight=sample_weight
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
        with tf.init_scope():
            if not self.built:
                self._plan.input_spec = as_specs(x)
                self.build(_shapes(self._plan.input_spec))
            if not with_loss:
                return
            if self.optimizer is not None and not self.optimizer.built:
                self.optimizer.build(self.trainable_variables)
            with tf.device(self._plan.cells[-1].device):
                internals.build_losses_and_metrics(
                    self,
                    as_specs(x),
                    as_specs(y),
                    self._plan.output_spec,
                    as_specs(sample_weight),
                )

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        """Keras calls this before it traces a step. A step that creates
        variables would be traced twice."""
        if data_batch is None:
            data_batch = internals.element_spec(iterator)
        leaves = tree.flatten(data_batch)
        if not all(t is None or hasattr(t, "shape") for t in leaves):
            return  # the step itself builds
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data_batch)
        self._prepare(x, y, sample_weight, with_loss=True)

    # ------------------------------------------------------------- Keras's XLA
    @property
    def jit_compile(self) -> bool:
        """Always False: `compile(jit_compile=True)` compiles each cell."""
        return False

    @jit_compile.setter
    def jit_compile(self, value: Any) -> None:
        self._jit_cells = value is True

    # ----------------------------------------------------------------- config
    def get_config(self) -> dict[str, Any]:
        """The arguments; costs as numbers, if they are known."""
        costs = self._plan.costs or [
            c if not callable(c) else None for c in self._arguments.costs
        ]
        return {
            **super().get_config(),
            "layers": [
                keras.saving.serialize_keras_object(layer)
                for layer in self.sequence
            ],
            "costs": costs,
            **self._arguments.config(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None):
        """Makes a model of what `get_config` returned."""
        config = saving.overridden(dict(config))
        layers = [
            keras.saving.deserialize_keras_object(
                layer, custom_objects=custom_objects
            )
            for layer in config.pop("layers")
        ]
        costs = config.pop("costs")
        return cls(list(zip(layers, costs)), **config)

    def get_build_config(self) -> dict[str, Any] | None:
        """Shapes and dtypes of the inputs."""
        if not self._plan.cells:
            return None
        return saving.spec_config(self._plan.input_spec)

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds for what `get_build_config` returned."""
        if config is None or self.built:
            return
        self._plan.input_spec = saving.spec_from_config(config)
        self.build(_shapes(self._plan.input_spec))


def _shape(spec: Any) -> Any:
    return None if spec is None else tuple(spec.shape)


def _shapes(spec: Any) -> Any:
    return tree.map_structure(_shape, spec)
