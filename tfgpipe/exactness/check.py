"""Is it exact on my model? One step, beside plain Keras on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.exactness.fit_step import (
    WeightPlaces,
    compare_loss,
    compare_state,
    compare_step,
    compare_update,
    compare_weights,
    run_graph_step,
)
from tfgpipe.exactness.layers import OnHost, Recorded
from tfgpipe.exactness.report import Report, Tally
from tfgpipe.micro_batches import check_rows, first_tensor
from tfgpipe.model import ByLayers, GPipe, Rehearsal, all_finite
from tfgpipe.sequence import inputs
from tfgpipe.state import is_synchronized
from tfgpipe.trial import try_all

_MOST_SCALES = 20  # of the loss: from 2^15 to under 1


def check(
    model: Any, x: Any, y: Any = None, sample_weight: Any = None
) -> Report:
    """Compares a training step of a model with plain Keras on the host.

    One mini-batch goes through the pipeline, on its own devices. Each layer is
    compared with the same layer on the host, given the very inputs, weights and
    gradients that it got there, so that a difference is that layer's own. Then
    what one layer hands on with what the next one gets, the micro-batches of
    a layer with the whole mini-batch, as `GPipe` tries it before a first step,
    the loss, the step in the graph that `fit` runs, and what it makes of each
    weight, slot and other variable.

    Nothing is trained: all variables, metrics and random states are put back.
    The devices hold what each layer gets and gives of all micro-batches
    meanwhile, and the host that of the whole mini-batch, and of its parts.

    Args:
        model: A compiled `GPipe`. It is built if it is not yet.
        x: The inputs of one mini-batch, as for `train_on_batch`.
        y: Its labels, or None.
        sample_weight: Weights of its rows, or None.

    Returns:
        What differs by more than rounding. `print` shows it as tables;
        `is_exact` says whether all of it is documented, `first` has what is
        not.

    Raises:
        ValueError: If the model is no compiled `GPipe`, or the data are not
            those of one mini-batch.

    Example:

    >>> import numpy as np
    >>> import tfgpipe
    >>> layers = [
    ...     keras.Input((4,)),
    ...     keras.layers.Dense(3),
    ...     keras.layers.Dense(1),
    ... ]
    >>> model = tfgpipe.GPipe(layers, num_partitions=2, num_micro_batches=2)
    >>> model.compile("adam", "mse")
    >>> report = tfgpipe.check(model, np.ones((8, 4)), np.ones((8, 1)))
    >>> report.is_exact
    True
    """
    _check_model(model)
    data = _as_tensors(x, y, sample_weight)
    with (
        internals.outside_functions(),
        internals.without_strategy(),
        internals.random_state_kept(),
        internals.random_numbers_kept(),
    ):
        model.prepare(*data, with_loss=True)
        with model.unchanged():
            model.reset_metrics()
            step, rehearsal = _rehearsed(model, data)
            with model.unchanged() as put_back:
                return _compared(model, data, step, rehearsal, put_back)


def _rehearsed(
    model: Any, data: tuple[Any, Any, Any]
) -> tuple[ByLayers, Rehearsal]:
    """A step by layers, after as many as a loss scale needs."""
    packed = keras.utils.pack_x_y_sample_weight(*data)
    optimizer = model.optimizer
    has_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    step = model.by_layers(lambda _, call: call)
    # A loss scale may be too high at first: it falls until all is finite.
    for _ in range(_MOST_SCALES):
        rehearsal = step(packed)
        is_finite = all_finite([rehearsal.total, *rehearsal.gradients])
        loss_is_finite = all_finite([rehearsal.total])
        if is_finite or not has_scale or not loss_is_finite:
            break
        internals.lower_loss_scale(optimizer)
    return step, rehearsal


def _compared(
    model: Any,
    data: tuple[Any, Any, Any],
    by_layers: ByLayers,
    rehearsal: Rehearsal,
    put_back: Callable[[], None],
) -> Report:
    tally, recorded = Tally(), Recorded(by_layers, rehearsal)
    total, gradients = recorded.total, recorded.gradients
    pairs = [*zip(gradients, model.trainable_weights)]
    sums_in = model.gradient_dtype
    num_rows = first_tensor(data[0]).shape[0]
    places = WeightPlaces(model, recorded)
    is_finite = bool(all_finite([total, *gradients]))
    on_host = OnHost(tally, recorded)
    on_host.forward(is_finite)
    if is_finite and len(recorded.shares) > 1:
        _compare_rows(tally, model, data[0], recorded)
    direct = compare_loss(tally, model, data, recorded)
    on_host.backward()
    dw = _sum(on_host.dw, direct)
    compare_weights(tally, "gradient", places, pairs, dw, sums_in)
    if is_finite:  # or all that follows is not
        step = run_graph_step(model, data)
        compare_step(tally, places, step, total, pairs, sums_in)
        put_back()
        compare_update(tally, model, places, step, on_host.assigned)
        compare_state(tally, places, step, recorded, on_host)
    return tally.report(_title(model, num_rows, recorded))


def _compare_rows(tally: Tally, model: Any, x: Any, recorded: Recorded) -> None:
    """Has a trial compare parts of a mini-batch with the whole."""
    for layer in recorded.layers:
        if why := layer.by_design:
            what = f"outputs, by {why}"
            tally.note("rows", layer.name, what, math.inf, is_documented=True)
    cells = model.built_for("check()").cells
    x = model.built_for("check()").as_taken(x)
    phase = try_all(recorded.batch.call, cells, x, len(recorded.shares))
    for i in phase.tried - {i for i, _ in phase.said}:
        cell, name = phase.place(i)
        tally.note("rows", cell.describe(name), "", 0.0)
    said = sorted(phase.said.items(), key=lambda pair: pair[0][0])
    untried = [
        (c, name, f"was not tried: {w}") for c, name, w in phase.untried()
    ]
    for cell, name, what in [*(own for _, own in said), *untried]:
        tally.note("rows", cell.describe(name), what, math.inf)


def _sum(
    first: Mapping[int, tf.Tensor], second: Mapping[int, tf.Tensor]
) -> dict[int, tf.Tensor]:
    """What either has, added up."""
    both = {key: first[key] + second[key] for key in {*first} & {*second}}
    return {**first, **second, **both}


def _title(model: Any, num_rows: int, recorded: Recorded) -> str:
    count = len(recorded.shares)
    cells = model.num_partitions
    replicas = model.num_replicas
    return (
        f"A step of '{model.name}': {num_rows} rows in {count} micro-batches, "
        f"{len(recorded.layers)} layers in {cells} cells"
        + (f", {replicas} replicas" if replicas > 1 else "")
    )


def _check_model(model: Any) -> None:
    if not isinstance(model, GPipe):
        kind = type(model).__name__
        raise ValueError(
            "`model` must be a compiled `GPipe`: it is compared with plain "
            f"Keras. Received: model={getattr(model, 'name', model)!r}, a "
            f"{kind}. Pass `tfgpipe.GPipe(layers)`, after its `compile`."
        )
    model.compile_as_task()
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            "`model` must be compiled, with an optimizer and a loss, for a "
            f"training step. Received: '{model.name}', which is not. Call "
            "`model.compile(optimizer, loss)` first."
        )

    together = [
        layer.name
        for layer in internals.flat_layers(model)
        if is_synchronized(layer)
    ]
    if model.num_replicas > 1 and together:
        raise ValueError(
            "`model` must have one replica to be checked, if it normalises "
            "over replicas: layers are compared one by one. Received: "
            f"{model.num_replicas} replicas, and synchronized=True of "
            f"{together}. Make the model outside of the strategy's scope, or "
            "check it with synchronized=False."
        )


def _as_tensors(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """One mini-batch, checked before any work."""
    x, y = inputs.as_tensors(x, y)
    _, sample_weight = inputs.as_tensors(x, sample_weight)
    check_rows(x, y, sample_weight)
    return x, y, sample_weight
