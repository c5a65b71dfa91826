"""`GPipe`: a list of Keras layers as a model that spans several devices.

A `GPipe` of a KerasHub task takes texts, as the task does. A task prepares data
by its preprocessor, in methods of its own, which then call Keras's. Here
these are the pipeline's:

    pipeline.fit(texts) -> task.fit(texts) -> keras.Model.fit(pipeline, tokens)

`compile` goes the same way: the task chooses the arguments that are left out,
and a sampler.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.arguments import DEFAULTS, Arguments
from tfgpipe.checks import checked_counts, checked_path
from tfgpipe.devices import strategy as strategy_lib
from tfgpipe.internals import Nest
from tfgpipe.model.gradients import OwnSteps
from tfgpipe.model.rehearsal import Rehearsals
from tfgpipe.model.saving import Saving
from tfgpipe.profiles import Profile
from tfgpipe.schedules import Schedule
from tfgpipe.sequence import is_task, prepares_data


def _by_task(name: str, does: Callable[[Any], bool]) -> Callable:
    """Wraps a method of `keras.Model`.

    Where `does(task)` holds, the task's own method runs first. What uses the
    model finds it compiled as the task is.
    """
    plain = internals.Replaceable(keras.Model, name)

    @functools.wraps(plain.original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        task = self._source.model
        if name != "compile":
            self.compile_as_task()
        if not does(task):
            return plain.original(self, *args, **kwargs)

        def of_pipeline(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            model = self if model is task else model
            return plain.original(model, *args, **kwargs)

        with plain.by(of_pipeline):
            return getattr(task, name)(*args, **kwargs)

    return method


_compile = _by_task("compile", is_task)
_COMPILE_ARGUMENTS = [*inspect.signature(keras.Model.compile).parameters][1:]


@keras.saving.register_keras_serializable(package="tfgpipe")
class GPipe(Saving, Rehearsals, OwnSteps):
    """A sequence of Keras layers that is trained on several devices.

    The layers are cut into `num_partitions` cells, one a device. A mini-batch
    is split into `num_micro_batches`, which follow each other through the
    cells, so that the devices work at the same time. Gradients are summed and
    applied once for the mini-batch: loss, metrics and weights are those of
    `keras.Sequential(layers)`.

    Args: What every user sets
        layers: Keras layers, each called on the outputs of the one before, any
            nest of tensors; or a functional model; or a `keras.Sequential`. An
            item may be a pair (layer, cost), where the cost is a number or a
            function of (layer, input spec) that returns one; other costs are
            estimated, in FLOPs of one example, so the ones given must be in
            that unit too. See `layers_of` for the costs of a model's calls.
        num_partitions: K, the number of cells. Defaults to the number of
            devices, or as many as the schedule needs for them.
        num_micro_batches: M, at least 1, which is the default: then devices
            do not work at the same time, of which the first `fit` warns where
            it was not asked for. A mini-batch of fewer rows is split into as
            many micro-batches as it has rows. In the scope of a
            `PipelineStrategy`, the micro-batches of each replica.
        devices: Names, such as "GPU:0", or `tf.config.LogicalDevice`s, as many
            as the schedule needs for K cells. Defaults to the first of the
            accelerators: TPUs, or GPUs, or else CPUs; in the scope of a
            `PipelineStrategy`, to those of the strategy.

    Args: How the model is cut, and in which order it runs
        layers_per_cell: How many layers each cell has. By default the cells
            are balanced by cost.
        costs: By what cells are balanced, if no layer has a cost of its own:
            "flops", as above; what `tfgpipe.profile` measured of these layers,
            in seconds for the largest of its micro-batches; "bytes", of their
            weights, gradients and slots (Adam's) and of what the backward pass
            keeps of one row; or a list of numbers, one a layer.
        schedule: The order of the tasks on each device: "gpipe", "1f1b",
            "interleaved", "breadth_first", "zero_bubble", "zero_bubble_2p",
            "zero_bubble_v", "v_half", "v_min", "dualpipe_v", a `Schedule`, or
            "auto" for the shortest found for `costs`, which must be a profile
            then. Under "interleaved" and "breadth_first", K is a multiple of
            the number of devices D, and cell k is on device k modulo D. Under
            those with a v, K is 2 D, and cell k is on device k, or 2 D - 1 - k
            from k = D on.

    Args: How a device holds less
        remat: Which micro-batches the backward pass computes again instead of
            keeping their activations: "always", "never", or "except_last", all
            but the one whose backward pass comes first. "offload" keeps all,
            as "never" does, in the host's memory, where a device holds less by
            it: sent after a forward pass, and fetched while the task before
            the backward pass runs. Or a number between 0 and 1: of every
            micro-batch, this share of what "never" keeps is kept, and what is
            cheapest is computed again. Or a dict from the index of a cell to
            its rule; "except_last" for those left out.
        remat_groups: In how many groups of layers a cell is computed again,
            one after the other. With more, a device holds the activations of a
            smaller group, and the inputs of more of them. None for what holds
            least of all cells whose layers make much, and 1 of others.
        head_parts: In how many parts rows of a micro-batch go through the head,
            forward and back at once: the layers, at the end of the last cell,
            from the last narrow activations on, with the loss. Of outputs such
            as logits over many words, and of their gradients, only those of a
            part exist at a time. For losses that add up over rows, and more
            than one micro-batch.
        gradient_dtype: Dtype in which the gradients of weights are summed over
            micro-batches, such as "bfloat16" to halve the memory of the sums.
            None for the weight's own.
        weights_on: Where weights are, frozen ones too, with what the optimizer
            keeps of them and its update: on the "devices" of their cells; on
            the "host", in its memory; or the name of a device. They are sent to
            a cell's device before a task that needs them, which holds those of
            two cells at most; sums of gradients go back. Not for TPUs.
        shards: Layers that are too large for one device, or too slow on it: a
            dict from a layer's name, with those around it where others have the
            same ("block_0/dense"), to the number of devices that compute its
            columns at the same time, the one of its cell and those that follow;
            or to their names, one replica's after the other's. For `Dense`,
            `EinsumDense`, `Embedding`, `ReversibleEmbedding`, and, by its
            heads, `MultiHeadAttention` without dropout. The weights stay whole
            in the host's memory, with what the optimizer keeps of them and its
            update; their columns are sent when a step begins. Not for TPUs.

    Args: What is trained, and what is told
        skip_nonfinite: Whether a mini-batch with a loss or a gradient that is
            not finite changes nothing: no weight, slot, state, seed or metric,
            and no iteration is counted. Nor one whose gradients have squares
            that are not, or that would make state infinite. `fit`'s logs get
            `skipped_steps`, the number of those in the epoch. A loss scale is
            lowered all the same.
        skip_outliers: From when on a mini-batch that is finite changes nothing
            either: if its loss, the norm of its gradients, or that of what it
            changes of state, is so many times as far above the median of the
            last 128 mini-batches as their 90% quantile is. 10, say. Logs get
            `outlier_steps`. None for never.
        trial: What happens where a layer treats a mini-batch otherwise than
            its micro-batches, which is tried before the first step: "warn",
            "error", or "off", which says nothing. Layers are tried all the
            same: it tells which slices of sparse gradients belong to rows.
        name: Name of the model.

    Raises:
        ValueError: If an argument is out of range, or a layer cannot take the
            outputs of the one before.
        TypeError: If a subclass overrides `call`.

    Example:

    >>> import numpy as np
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
        num_micro_batches: int | None = None,
        *,
        devices: Sequence[str | tf.config.LogicalDevice] | None = None,
        layers_per_cell: Sequence[int] | None = None,
        schedule: str | Schedule = "gpipe",
        remat: str | float | Mapping[int, str | float] = "except_last",
        remat_groups: int | None = None,
        gradient_dtype: str | None = None,
        skip_nonfinite: bool = False,
        skip_outliers: float | None = None,
        costs: str | Profile | Sequence[float] = "flops",
        trial: str = "warn",
        weights_on: str | tf.config.LogicalDevice = "devices",
        head_parts: int = 1,
        shards: Mapping[str, int | Sequence[Any]] | None = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        given = {**locals()}
        strategy = strategy_lib.current()
        arguments = Arguments(
            layers,
            None if strategy is None else strategy.devices,
            costs,
            **{name: given[name] for name in DEFAULTS},
        )
        for method in ("call", "__call__"):
            if getattr(type(self), method) is not getattr(GPipe, method):
                raise TypeError(
                    f"`{type(self).__name__}` must not override `{method}`. "
                    "Put what it does into a layer."
                )
        super().__init__(
            arguments, strategy, num_micro_batches is None, name=name, **kwargs
        )
        self._source.trainer = weakref.ref(self)
        # XLA would compile the whole step, onto one device.
        self.supports_jit = False
        if self._source.input_spec is not None:
            self.build_for_spec(self._source.input_spec)

    def call(self, inputs: Nest, training: bool | None = None) -> Any:
        """Calls the model without a pipeline, each layer on its device."""
        if training:
            self.warn_of_tape()
        return self._source.call(self.cast_inputs(inputs), training)

    # ------------------------------------------------ what a user hands data to
    fit = _by_task("fit", prepares_data)
    evaluate = _by_task("evaluate", prepares_data)
    predict = _by_task("predict", prepares_data)
    train_on_batch = _by_task("train_on_batch", prepares_data)
    test_on_batch = _by_task("test_on_batch", prepares_data)
    predict_on_batch = _by_task("predict_on_batch", prepares_data)

    @functools.wraps(_compile)
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """See `keras.Model.compile`, or that of a task of KerasHub.

        `jit_compile` is for each cell: "auto", the default, has XLA compile all
        of them if one is on an accelerator and Keras would compile the model.
        """
        _compile(self, *args, **kwargs)
        self._notes.compiled_as = None
        known = {**dict(zip(_COMPILE_ARGUMENTS, args)), **kwargs}
        value = known.get("jit_compile", "auto")
        if value is not True:  # which Keras has set
            self.compile_cells(value)

    def get_compile_config(self) -> dict[str, Any]:
        """See `keras.Model`. "auto" stays so: another machine decides anew."""
        config: dict[str, Any] = super().get_compile_config()
        if "jit_compile" in config and self.compiles_by_default:
            config["jit_compile"] = "auto"
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles as a file says, in which a task has chosen all."""
        is_own = type(self).compile is not GPipe.compile
        as_keras = internals.replaced(GPipe, "compile", keras.Model.compile)
        # Keras looks for its own.
        with contextlib.nullcontext() if is_own else as_keras:
            super().compile_from_config(config)
        jit_compile = config.get("jit_compile", "auto")
        if jit_compile is not True:
            self.compile_cells(jit_compile)

    def save_to_preset(
        self,
        preset_dir: str | os.PathLike[str],
        max_shard_size: float | None = 10,
    ) -> None:
        """Writes a preset, as the task of KerasHub that it was made of.

        `tfgpipe.load_preset` loads it, and `from_preset` without tfgpipe. The
        weights are written one after the other.

        Args:
            preset_dir: The folder.
            max_shard_size: Size in GB from which on a backbone is written to
                several files, each of at most this size. None for one file.

        Raises:
            ValueError: If the `GPipe` was not made of a task or a backbone.
        """
        folder = str(checked_path("preset_dir", preset_dir))
        self._check_storage()
        model = self._source.model
        if not hasattr(model, "save_to_preset"):
            raise ValueError(
                "`save_to_preset` needs a task or a backbone of KerasHub."
            )
        model.save_to_preset(folder, max_shard_size=max_shard_size)

    def generate(
        self,
        inputs: Nest,
        max_length: int | None = None,
        stop_token_ids: Any = "auto",
        num_groups: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generates as the task of KerasHub that the `GPipe` was made of.

        Prompts go through the devices in groups, whose tokens do not depend on
        each other. The same tokens come out as of the task by itself, up to
        the one that stops a prompt. The caches of layers stay on the devices
        of the layers.

        Args:
            inputs: Prompts, as the task takes them: texts, if it has a
                preprocessor.
            max_length: Tokens of a prompt and what follows it, at most.
            stop_token_ids: Tokens at which to stop; None for none. Defaults to
                the end of a text.
            num_groups: In how many groups prompts go through, each of at least
                one prompt. Defaults to M, `num_micro_batches`, and to no more
                than there are devices: for each token of a group, a device
                reads its weights, which takes as long for few prompts as for
                many.
            **kwargs: Other arguments of the task's `generate`, such as
                `strip_prompt`.

        Returns:
            What the task's `generate` returns.

        Raises:
            ValueError: If the `GPipe` was not made of a task that generates.
        """
        self._check_storage()
        generation = self._notes.generation
        if generation is None:
            raise ValueError(
                "`generate` needs a task of KerasHub with a `generate_step`."
            )
        if num_groups is not None:
            (num_groups,) = checked_counts(num_groups=num_groups)
        with generation.in_groups(num_groups):
            return self._source.model.generate(
                inputs,
                max_length=max_length,
                stop_token_ids=stop_token_ids,
                **kwargs,
            )
