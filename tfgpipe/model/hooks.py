"""Prepares steps, as Keras calls for; subclasses may extend that.

Before a step is traced, variables and what it runs have to be there, and are
checked; and it is known which cells XLA compiles: all of a model, or none.
Keras compiles its step where a device is an accelerator and all layers support
it. A `GPipe` does the same with its cells, by default. XLA draws other random
numbers from a seed than TensorFlow does: if only some cells were compiled, bits
would follow from the number of cells.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfgpipe import failures, inputs, internals
from tfgpipe.arguments import Arguments
from tfgpipe.cells import Cell
from tfgpipe.devices import names, placement
from tfgpipe.devices import strategy as strategy_lib
from tfgpipe.failures import explained
from tfgpipe.generation import GroupedGeneration, install
from tfgpipe.graphs import NotCompilable, in_turn
from tfgpipe.inputs import as_specs, is_dense, shapes
from tfgpipe.internals import Nest
from tfgpipe.model.build import build
from tfgpipe.model.face import Face
from tfgpipe.model.nonfinite import Skips
from tfgpipe.model.own_step import Overrides, OwnStep, base, in_pipeline
from tfgpipe.sequence import is_task
from tfgpipe.state import RandomState
from tfgpipe.trial import Trial


@dataclasses.dataclass
class _Notes:
    """Notes for the next call. Plain, so that Keras tracks nothing.

    Attributes:
        input_spec: What `build` is called for, which gets the shapes alone.
        storage: Where the variables are; None before they are placed.
        skips: Counts mini-batches that were skipped, if they are.
        is_told_of_waiting: Whether it was warned of.
        base_calls: How often each method marked with `base` was called.
        functions: By kind of step, the function of an eager call, and what
            calls it, see `run_as_graph`.
        optimizer: Whose slots are where the weights are.
        generation: By what the model generates, if it does.
        compiled_as: What the task of KerasHub was compiled with when the
            pipeline was compiled as it; None if it was not.
        held_random_state: The seeds of what is held beside the layers.
        own_step: The `train_step` of a subclass that runs, or None.
        is_warned_of_tape: Whether it was said that a tape trains the model.
        trained: With which loss, and on what specs, it was trained last.
        pending_losses: Those of the mini-batch, while it is computed.
        clock: Times the steps that are traced, if any.
        tell_gradients: Is called with what they apply, if any.
        added_losses: Of the last step that was traced its graph, and what its
            layers add to the loss.
    """

    input_spec: Nest = None
    storage: placement.Storage | None = None
    skips: Skips | None = None
    is_told_of_waiting: bool = False
    base_calls: Any = dataclasses.field(default_factory=collections.Counter)
    functions: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: keras.Optimizer | None = None
    generation: GroupedGeneration | None = None
    compiled_as: dict[str, Any] | None = None
    held_random_state: RandomState | None = None
    own_step: OwnStep | None = None
    is_warned_of_tape: bool = False
    trained: tuple[Any, Any] | None = None
    pending_losses: list[Any] | None = None
    clock: Any = None
    tell_gradients: Callable | None = None
    added_losses: tuple[Any, Sequence[Any]] = (None, ())


class Hooks(Overrides, Face, internals.BuiltBeforeTracing):
    """The part of `GPipe` that Keras calls before it traces a step.

    `strategy` is the one in whose scope it is made, or None; `has_default_m` is
    whether nobody has asked for its M.
    """

    train_function: Any
    test_function: Any
    predict_function: Any

    def __init__(
        self,
        arguments: Arguments,
        strategy: strategy_lib.PipelineStrategy | None,
        has_default_m: bool,
        **kwargs: object,
    ):
        super().__init__(arguments, **kwargs)
        self._strategy = strategy
        self._has_default_m = has_default_m
        self._trial = Trial(arguments.trial)
        self._notes = _Notes()
        self._jit_cells: bool | str = False
        self._is_refused_by_xla = False

    # ------------------------------------------------------------------ build
    def build(self, input_shape: Any) -> None:
        """Cuts the layers into cells and creates their variables there.

        Args:
            input_shape: Nest of shapes (batch, ...) of the inputs.
        """
        if self._built is not None:
            return
        spec = self._notes.input_spec
        if spec is None:
            spec = self.specs_of_shapes(input_shape)
        with internals.outside_functions(), internals.without_strategy():
            self._built = build(self._arguments, spec, self.name, self.compiles)
            if not internals.variables_are_deferred():
                self.place()
        self.built = True

    def build_for_spec(self, spec: Nest) -> None:
        """Builds for inputs, a nest of specs, which tell more than shapes."""
        self._notes.input_spec = spec
        try:
            self.build(shapes(spec))
        finally:
            self._notes.input_spec = None

    # -------------------------------------------------- what XLA compiles
    @property
    def jit_compile(self) -> bool:
        """Always False, as XLA must not compile the step as a whole.

        `compile(jit_compile=...)` says whether it compiles each cell: True,
        False, or "auto", the default: where a cell is on an accelerator and
        Keras would compile the model. On a TPU, cells are compiled in any
        case.
        """
        return False

    @jit_compile.setter
    def jit_compile(self, value: Any) -> None:
        # Not called with what it is, False, which `compile` says once more.
        self.compile_cells(value)

    def compile_cells(self, value: bool | str) -> None:
        """Takes the `jit_compile` that the user says."""
        self._jit_cells = value
        self._is_refused_by_xla = False
        if value is True and not internals.supports_jit(self):
            self._jit_cells = False
            failures.warn(  # in Keras's words
                "Model doesn't support `jit_compile=True`. Proceeding with "
                "`jit_compile=False`."
            )
        self.group_for(self.compiles)

    def group_for(self, compiles: bool) -> None:
        """Gives cells the groups of layers that XLA compiles, or others."""
        if self._built is not None and self._built.compiles != compiles:
            self._built = self._built.regrouped(compiles)

    @property
    def compiles_by_default(self) -> bool:
        """Returns whether nobody has said if XLA compiles the cells."""
        return self._jit_cells == "auto"

    @property
    def compiles(self) -> bool:
        """Returns whether XLA compiles the cells, as far as is known."""
        if not self.compiles_by_default:
            return bool(self._jit_cells)
        devices = (d for row in self._arguments.grid for d in row)
        return (
            names.has_accelerator(devices)
            and not self._is_refused_by_xla
            and internals.supports_jit(self)
        )

    def compiled_if_possible(self, make: Callable[[bool], Any]) -> Any:
        """Returns what a function makes that is told whether XLA compiles.

        By default, a model that XLA cannot compile is left as it is, as a whole
        and from then on: XLA draws other random numbers from a seed, so bits
        would follow from the cells that it compiles.
        """
        compiles = self.compiles
        self.group_for(compiles)
        try:
            return make(compiles)
        except NotCompilable as error:
            if not self.compiles_by_default:
                raise
            failures.inform(
                f"XLA compiles no cell of '{self.name}'. {error.layer}: "
                f"{error.cause}."
            )
            self._is_refused_by_xla = True
            self.group_for(False)
            return make(False)

    # -------------------------------------------------------- before a step
    @base
    def make_train_function(self, force: bool = False) -> None:
        """Makes what Keras calls with each batch in `fit`."""
        self._make("train", super().make_train_function, force)
        self._warn_of_waiting()

    @base
    def make_test_function(self, force: bool = False) -> None:
        """Makes what Keras calls with each batch in `evaluate`."""
        self._make("test", super().make_test_function, force)

    @base
    def make_predict_function(self, force: bool = False) -> None:
        """Makes what Keras calls with each batch in `predict`."""
        self._make("predict", super().make_predict_function, force)

    def _make(self, kind: str, make: Callable, force: bool) -> None:
        self._check_storage()
        self._check_scope()
        name = f"{kind}_function"
        if force or getattr(self, name) is None:
            self._notes.functions.pop(kind, None)
            if kind == "train":
                self._arguments.check_training()
            make(force)
            setattr(self, name, self._explained(getattr(self, name)))

    def train_function_of(self, train_step: Callable) -> Callable:
        """Returns what `fit` would call with a batch, by this training step.

        It takes a mini-batch, and returns a nest of tensors.
        """
        function_of_fit = self.train_function
        with internals.replaced(self, "train_step", train_step):
            self.make_train_function(force=True)
        made, self.train_function = self.train_function, function_of_fit

        def function(iterator: Any) -> Any:
            with internals.replaced(self, "train_step", train_step):
                return made(iterator)  # in some versions it looks for the step

        return function

    def _explained(self, function: Callable) -> Callable:
        is_alone = self.steps_per_execution == 1
        around = functools.partial(in_turn, is_alone)

        def cells() -> Sequence[Cell]:  # the model may be built later
            return () if self._built is None else self._built.cells

        return explained(function, cells, around)

    def place(self) -> None:
        """Gives the variables storage on the devices of their cells.

        In a model around this one they are where that model puts them.
        """
        cells, notes = self.built_for("place()").cells, self._notes
        known = set() if notes.storage is None else notes.storage.known
        waiting = [v for v in self.variables if not internals.is_created(v)]
        placement.place_variables(cells, known, waiting)
        placement.settle_layers(cells, [*self.sequence, *self._source.models])
        num_groups = min(self.num_micro_batches, len(self._arguments.grid[0]))
        for model in self._source.models:
            notes.generation = install(model, num_groups)
        notes.storage = placement.Storage(self.name, self.sequence)
        # tf.train.Checkpoint finds nothing in a list of layers.
        self._checkpointed = tf.Module()
        self._checkpointed.values = [v.value for v in self.variables]
        if self._arguments.skip_nonfinite and notes.skips is None:
            spread = self._arguments.skip_outliers
            notes.skips = Skips(cells[-1].device, spread)

    def _check_storage(self) -> None:
        """Refuses layers that another model took over."""
        if self._notes.storage is not None:
            self._notes.storage.check()
            self._place_new()

    def _place_new(self) -> None:
        """Places what has come since: by `enable_lora`, or held by the model.

        That of layers goes to their devices, and what has storage stays.
        """
        storage = self._notes.storage
        if storage is None:
            return
        is_known = all(
            id(variable) in storage.known
            for layer in self.sequence
            for variable in layer.variables
        )
        if not is_known or not all(map(internals.is_created, self.variables)):
            self.place()

    def _check_scope(self) -> None:
        """Refuses strategies that the model does not know of."""
        strategy, known = strategy_lib.any_current(), self._strategy
        if strategy not in (None, known):
            raise ValueError(
                "A `GPipe` must be used in the scope in which it was made, or "
                f"in none. Received: {strategy}, and a model made in "
                f"{known or 'no scope'}. Leave the scope, and do without the "
                f"strategy's `run`. {strategy_lib.INSTEAD}"
            )

    def prepare(
        self, x: Nest, y: Nest, sample_weight: Nest, with_loss: bool
    ) -> None:
        """Creates all variables, before the step is traced if possible."""
        with internals.outside_functions(), internals.without_strategy():
            if not self.built:
                self.build_for_spec(inputs.data_spec(x, self.input_dtype))
            if not with_loss:
                return
            built = self.built_for("a step")
            x, y, weight = map(as_specs, (x, y, sample_weight))
            with tf.device(built.cells[-1].device):
                internals.build_losses_and_metrics(
                    self, x, y, built.output_spec, weight
                )
            self._place_new()  # an optimizer knows where they are
            if internals.has_all_weights(self):
                self.build_optimizer()  # else when the step has called them

    def _warn_of_waiting(self) -> None:
        """Warns, once, of devices that do not train at the same time."""
        m, is_told = self.num_micro_batches, self._notes.is_told_of_waiting
        self._notes.is_told_of_waiting = True
        if is_told:
            return
        num_devices = len({*self._arguments.grid[0]})
        if m > 1 and self._arguments.has_only_device:
            failures.warn(
                f"Nothing is pipelined: {self.devices[0]!r} trains all layers. "
                f"{names.why_no_more()} Pass num_partitions=1 if you want "
                f"that, to save memory; {names.SPLIT_CPU}."
            )
        elif self._has_default_m and num_devices > 1:
            failures.warn(
                f"Devices wait for each other: {num_devices} train one micro-"
                f"batch. Pass num_micro_batches={4 * num_devices}, say; or "
                "num_micro_batches=1 if it is their memory that you want."
            )

    def _follows_task(self) -> bool:
        """Tells whether it is compiled as the task of KerasHub is, or will be.

        A task is compiled when it is made. Who compiles the pipeline decides.
        """
        is_own = self.compiled and self._notes.compiled_as is None
        task = self._source.model
        return not is_own and is_task(task) and task.compiled

    def optimizer_to_be(self) -> Any:
        """Its optimizer, or that of the task that it follows; or None."""
        owner = self._source.model if self._follows_task() else self
        return getattr(owner, "optimizer", None)

    def compile_as_task(self) -> None:
        """Compiles as the task of KerasHub is, until the user compiles.

        With the task's own optimizer, loss and metrics; anew if the task was
        compiled since.
        """
        if not self._follows_task():
            return
        task = self._source.model
        arguments = internals.compile_arguments(task)
        if arguments is self._notes.compiled_as:
            return
        known = {**arguments, "optimizer": task.optimizer, "jit_compile": False}
        super().compile(**known, auto_scale_loss=False)
        self.compile_cells("auto")
        self._notes.compiled_as = arguments

    def build_optimizer(self) -> None:
        """Creates the optimizer's slots, each where its variable is."""
        optimizer = getattr(self, "optimizer", None)
        if optimizer is None:
            return
        if not optimizer.built or optimizer is not self._notes.optimizer:
            self._place_slots(optimizer, self.trainable_variables)
        self._notes.optimizer = optimizer

    def _place_slots(self, optimizer: keras.Optimizer, variables: Any) -> None:
        """Creates slots where variables are, or moves them there.

        Keras creates them in the first step, and puts all of them on device 0.
        Others are elsewhere if another model has trained with the optimizer, or
        it is one, as Adafactor, that makes slots without a word of weights.
        """
        if self._strategy is not None:
            internals.adopt(optimizer, self._strategy)
        with internals.outside_functions(), internals.without_strategy():
            if not optimizer.built and variables is not None:
                optimizer.build(variables)
            if not optimizer.built:
                return
            for one in internals.with_inner(optimizer):
                for variable in internals.trained_by(one):
                    slots = internals.slots(one, variable)
                    placement.create_or_move(slots, variable.value.device)

    def run_own_step(
        self, method: Callable, *args: object, **kwargs: object
    ) -> Any:
        """Runs a `train_step` of a subclass, or of a subclass of that one."""
        if self._notes.own_step is not None:
            return method(self, *args, **kwargs)
        step = OwnStep(self._place_slots)
        with internals.replaced(self._notes, "own_step", step), step.running():
            return step.ended(method(self, *args, **kwargs))

    def warn_of_tape(self) -> None:
        """Warns, once, that a tape trains the model without its pipeline."""
        notes = self._notes
        if (
            not self.is_split
            or notes.is_warned_of_tape
            or notes.own_step is not None
            or in_pipeline.get()
            or not internals.tapes_are_recording()
        ):
            return
        notes.is_warned_of_tape = True
        failures.warn(
            f"Nothing is pipelined: '{self.name}' is called inside a tape. Use "
            "its `fit`, or its `loss_and_gradients(x, y, sample_weight)`."
        )

    def cast_inputs(self, x: Nest) -> Any:
        """Data as the layers expect it, see `inputs.as_expected`."""
        return self.built_for("cast_inputs()").cast_inputs(x)

    @property
    def is_split(self) -> bool:
        """Returns whether a mini-batch may become several micro-batches."""
        return self.num_micro_batches * self.num_replicas > 1

    def note_data(self, data: Nest) -> None:
        """Keeps the first rows of data, on which layers are tried."""
        if data is None or not self.is_split:
            return
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        if all(map(is_dense, tree.flatten(x))):  # others are refused
            self._trial.note_data(x, self.cast_inputs)

    @property
    def num_skipped(self) -> int:
        """How many mini-batches were skipped, since it was new.

        Saved with the model. The optimizer's iterations and these are all that
        it has seen in training.
        """
        return self._skipped("total")

    @property
    def skipped_in_a_row(self) -> int:
        """How many of the last mini-batches were skipped, up to now."""
        return self._skipped("in_a_row")

    def _skipped(self, name: str) -> int:
        skips = self._notes.skips
        return 0 if skips is None else int(skips.counts[name].numpy())

    def epoch_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Tells what `fit` shows: NaN of an epoch that was skipped as a whole.

        Its loss would be 0 otherwise, and the best of all.
        """
        is_trained = isinstance(logs, dict) and "skipped_steps" in logs
        if not is_trained or int(internals.loss_tracker(self).count):
            return logs
        counts = {"skipped_steps", "outlier_steps"}
        return {k: v if k in counts else np.nan for k, v in logs.items()}

    def reset_metrics(self) -> None:
        """Starts the metrics anew, as `fit` does when an epoch begins."""
        super().reset_metrics()
        if self._notes.skips is not None:
            self._notes.skips.start_epoch()
