"""`GPipe`: a list of Keras layers as a model that spans several devices."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.arguments import Arguments
from tfgpipe.checks import check_names
from tfgpipe.devices import strategy as strategy_lib
from tfgpipe.model.rehearsal import Rehearsals
from tfgpipe.model.saving import Saving
from tfgpipe.model.texts import Texts
from tfgpipe.profiles import Profile
from tfgpipe.schedules import Schedule

# What other libraries call what `GPipe` has an argument for.
_ELSEWHERE = {
    "balance": "layers_per_cell",
    "checkpoint": "remat",
    "chunks": "num_micro_batches",
    "micro_batches": "num_micro_batches",
    "n_microbatches": "num_micro_batches",
    "num_stages": "num_partitions",
    "recompute": "remat",
}


def _argument_names() -> list[str]:
    """The names of `GPipe`'s arguments, and of those that any layer has."""
    found = [
        name
        for cls in (GPipe, keras.layers.Layer)
        for name, one in inspect.signature(cls.__init__).parameters.items()
        if name != "self" and one.kind is not one.VAR_KEYWORD
    ]
    return [*dict.fromkeys(found), "input_shape", "input_dim"]


@keras.saving.register_keras_serializable(package="tfgpipe")
class GPipe(Texts, Saving, Rehearsals):
    """A sequence of Keras layers that is trained on several devices.

    The layers are cut into `num_partitions` cells, one a device. A mini-batch
    is split into `num_micro_batches`, which follow each other through the
    cells, so that the devices work at the same time. Gradients are summed and
    applied once for the mini-batch: loss, metrics and weights are those of
    `keras.Sequential(layers)`.

    Args:
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
        layers_per_cell: How many layers each cell has. By default the cells
            are balanced by cost.
        schedule: The order of the tasks on each device: "gpipe", "1f1b",
            "interleaved", "zero_bubble", "zero_bubble_2p", "zero_bubble_v",
            "v_half", "v_min", "dualpipe_v", a `Schedule`, or "auto" for the
            shortest found for `costs`, which must be a profile then. Under
            "interleaved", K is a multiple of the number of devices D, and cell
            k is on device k modulo D. Under those with a v, K is 2 D, and cell
            k is on device k, or 2 D - 1 - k from k = D on.
        remat: Which micro-batches the backward pass computes again instead of
            keeping their activations: "always", "never", or "except_last", all
            but the one whose backward pass comes first. Or a dict from the
            index of a cell to its rule; "except_last" for those left out.
        remat_groups: In how many groups of layers a cell is computed again,
            one after the other. With more, a device holds the activations of a
            smaller group, and the inputs of more of them.
        gradient_dtype: Dtype in which the gradients of weights are summed over
            micro-batches, such as "bfloat16" to halve the memory of the sums.
            None for that of each weight.
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
        costs: By what cells are balanced, if no layer has a cost of its own:
            "flops", as above; what `tfgpipe.profile` measured of these layers,
            in seconds for the largest of its micro-batches; "bytes", of their
            weights, gradients and slots (Adam's) and of what the backward pass
            keeps of one row; or a list of numbers, one a layer.
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
        remat: str | Mapping[int, str] = "except_last",
        remat_groups: int = 1,
        gradient_dtype: str | None = None,
        skip_nonfinite: bool = False,
        skip_outliers: float | None = None,
        costs: str | Profile | Sequence[float] = "flops",
        trial: str = "warn",
        name: str | None = None,
        **kwargs: Any,
    ):
        check_names(kwargs, _argument_names(), _ELSEWHERE)
        strategy = strategy_lib.current()
        arguments = Arguments(
            layers,
            num_partitions,
            1 if num_micro_batches is None else num_micro_batches,
            devices,
            layers_per_cell,
            schedule,
            remat,
            remat_groups,
            gradient_dtype,
            skip_nonfinite,
            skip_outliers,
            costs,
            None if strategy is None else strategy.devices,
            trial,
        )
        for own in ("call", "__call__"):
            if getattr(type(self), own) is not getattr(GPipe, own):
                raise TypeError(
                    f"A subclass of `GPipe` must not override `{own}`, which a "
                    f"pipeline does not use. Received: {type(self).__name__}. "
                    "Put what it does into a layer of the list."
                )
        super().__init__(
            arguments, strategy, num_micro_batches is None, name=name, **kwargs
        )
        # XLA would compile the whole step, onto one device.
        self.supports_jit = False
        if self._source.input_spec is not None:
            self.build_for_spec(self._source.input_spec)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Runs the layers one after the other, without a pipeline."""
        inputs = self.cast_inputs(inputs)
        if self._source.model is not None:
            return self._source.model(inputs, training=training)
        # Each layer is told, or it is what the last layer left to others.
        kwargs = {} if training is None else {"training": training}
        self.built_for("a call")
        for layer in self.sequence:  # each where its weights are
            inputs = layer(inputs, **kwargs)
        return inputs
