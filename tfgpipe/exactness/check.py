"""Is it exact on my model? One step, beside plain Keras on the host.

    the step of `fit`, on its devices
    Keras, micro-batch by micro-batch, on the host

Where loss or gradients differ, the first layer is named whose outputs are
others than on the host. Given the gradients of the step, Keras's optimizer
updates the same variables. Whether layers treat micro-batches as they treat the
mini-batch, the trial tells.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import inputs, internals
from tfgpipe.exactness.report import Report
from tfgpipe.graphs import is_continuous, stateful_kinds
from tfgpipe.inputs import MicroBatches, check_rows, first_tensor
from tfgpipe.internals import Nest
from tfgpipe.model import HOST, GPipe, all_finite
from tfgpipe.state import weighted_mean
from tfgpipe.trial import (
    Trial,
    change_distance,
    gradient_distance,
    largest,
    limit_of,
    output_distance,
)

# Gradients of weights that are this share of what is rounding of the largest
# are zero but for rounding, as of the bias of the keys of an attention.
_TINY = 0.1

_MOST_SCALES = 20  # of the loss: from 2^15 to under 1

# Inputs, labels and weights of the rows: nests of tensors.
MiniBatchData = tuple[Any, Any, Any]

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

# Values of variables, by their ids.
Values = Mapping[int, Any]


def check(
    model: keras.Model, x: Nest, y: Nest = None, sample_weight: Nest = None
) -> Report:
    """Compares a training step of a model with plain Keras on the host.

    Loss and gradients of the step that `fit` runs are compared with plain
    Keras's: where they differ, the first layer is named whose outputs are
    others than on the host. What the step makes of each weight and slot is
    compared with Keras's optimizer, and the micro-batches of layers with the
    whole mini-batch, as `GPipe` tries it before a first step.

    Nothing is trained: all variables, metrics and random states are put back.

    Args:
        model: A compiled `GPipe`. It is built if it is not yet.
        x: The inputs of one mini-batch, as for `train_on_batch`.
        y: Its labels, or None.
        sample_weight: Weights of its rows, or None.

    Returns:
        What differs by more than rounding, but for random numbers and batch
        normalisations of micro-batches. `print` shows it as tables; `is_exact`
        says whether nothing does, `first` has the first finding.

    Raises:
        ValueError: If the model is no compiled `GPipe`, or the data are not
            one mini-batch.

    Example:

    >>> import keras
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
    is_split = model.num_micro_batches * model.num_replicas > 1
    data = (*inputs.as_tensors(x, y), inputs.as_tensors(x, sample_weight)[1])
    check_rows(*data, is_split)
    with (
        internals.outside_functions(),
        internals.without_strategy(),
        internals.random_state_kept(),
        internals.random_numbers_kept(),
    ):
        model.prepare(*data, with_loss=True)
        with model.unchanged():
            model.reset_metrics()
            if not model.optimizer.built:
                model.loss_and_gradients(*data)  # all has weights then
            return _compared(model, data)


class Step(NamedTuple):
    """A training step, and what it has left.

    Attributes:
        loss: As `fit` would show it, or None.
        gradients: By each trainable weight, or None.
        before: Values of weights and of what the optimizer keeps, by id.
        after: The same after the step.
    """

    loss: tf.Tensor | None
    gradients: Sequence[Gradient]
    before: Values
    after: Values


def _run_step(model: GPipe, data: MiniBatchData) -> Step:
    """Trains on a mini-batch, as `fit` does without a step of a subclass."""
    told: list[list[tuple[Gradient, keras.Variable]]] = []

    def step(batch: Nest) -> Any:
        with model.telling_gradients(told.append):
            logs = GPipe.train_step(model, batch)
        return logs, [d for d, _ in told[-1]]

    with model.nothing_eager(), model.unchanged():
        before = {id(v): v.numpy() for v in _updated(model)}
        function = model.train_function_of(step)
        logs, gradients = function(iter([_packed(data)]))
        after = {id(v): v.numpy() for v in _updated(model)}
    return Step(logs.get("loss"), gradients, before, after)


def _finite_step(model: GPipe, data: MiniBatchData) -> tuple[Step, bool]:
    """Runs a step, after as many as a loss scale needs; says if finite."""
    optimizer = model.optimizer
    has_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    # A loss scale may be too high at first: it falls until all is finite.
    for _ in range(_MOST_SCALES if has_scale else 1):
        step = _run_step(model, data)
        losses = [] if step.loss is None else [step.loss]
        if all_finite([*losses, *step.gradients]):
            return step, True
        internals.lower_loss_scale(optimizer)
    return step, False


def _updated(model: GPipe) -> list[keras.Variable]:
    optimizer = model.optimizer
    slots = [*optimizer.variables, *internals.unlisted(optimizer)]
    return [*model.trainable_variables, *slots]


def _packed(data: MiniBatchData) -> tuple[Any, ...]:
    packed = keras.utils.pack_x_y_sample_weight(*data)
    return packed if isinstance(packed, tuple) else (packed,)


def _compared(model: GPipe, data: MiniBatchData) -> Report:
    rows, replicas = first_tensor(data[0]).shape[0], model.num_replicas
    count = min(model.num_micro_batches * replicas, rows)
    report = Report(
        f"A step of '{model.name}': {rows} rows in {count} micro-batches, "
        f"{model.num_partitions} cells, replicas: {replicas}"
    )
    trial = Trial("keep")
    with model.tried_by(trial):
        model.note_data(_packed(data))
        step, is_finite = _finite_step(model, data)
    for phase in trial.tried:
        report.note("rows", "the whole mini-batch", "", 0.0)
        for _, cell, name, what in phase.facts:
            report.note("rows", cell.describe(name), what, math.inf)
    if is_finite:
        _compare(report, model, data, step)
    else:
        what = "it is not finite: `callbacks.StopOnNonFinite` names the layer"
        report.note("loss", "the whole mini-batch", what, math.inf)
    return report


def _check_model(model: GPipe) -> None:
    if not isinstance(model, GPipe):
        raise ValueError(
            "`model` must be a compiled `GPipe`: it is compared with plain "
            f"Keras. Received: {getattr(model, 'name', model)!r}, a "
            f"{type(model).__name__}. Pass `tfgpipe.GPipe(layers)`."
        )
    model.compile_as_task()
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            "`model` must be compiled for a training step. Received: "
            f"'{model.name}'. Call `model.compile(optimizer, loss)` first."
        )


# -------------------------------------------------------------------- Keras
class KerasStep(NamedTuple):
    """The micro-batches as Keras runs them, on the host.

    Attributes:
        loss: The loss of the mini-batch; None if it draws without a seed: then
            it draws something else than the step.
        gradients: By each trainable weight, or None.
        assigned: The trained weights that layers assign, by id.
        dtypes: In which it computes, and gradients are summed.
    """

    loss: tf.Tensor | None
    gradients: Sequence[Gradient]
    assigned: Values
    dtypes: set[str]


def _run_keras(model: GPipe, data: MiniBatchData) -> KerasStep:
    """Has Keras run the micro-batches, and the loss of the mini-batch.

    Seeds go on from one to the next; all other state is as it was before.
    """
    built, weights = model.built_for("a step"), model.trainable_weights
    seeds = {id(v): v for cell in built.cells for v in cell.seeds}
    x = built.as_taken(data[0])
    sizes = MicroBatches(x, model.num_micro_batches * model.num_replicas)

    def run() -> Any:
        variables = [*model.variables, *seeds.values()]
        values = {id(v): (v, tf.identity(v.value)) for v in variables}
        watched = [values[id(v)][1] for v in weights]
        outputs, losses = [], []
        assigned: dict[int, tf.Tensor] = {}
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            for part in sizes.split(x):
                scope = keras.StatelessScope(
                    [*values.values()], collect_losses=True
                )
                with scope:
                    outputs.append(built.source.call(part, True))
                losses.append(scope.losses)
                after = {
                    k: scope.get_current_value(v) for k, v in seeds.items()
                }
                values |= {key: (seeds[key], t) for key, t in after.items()}
                assigned = assigned or {
                    id(v): scope.get_current_value(v) for v in weights
                }
            with keras.StatelessScope([*zip(weights, watched)]):
                added = [
                    weighted_mean([*map(tf.reduce_sum, parts)], sizes)
                    for parts in zip(*losses)
                ]
                total = _loss(model, data, _joined(outputs), added)
                scaled = model.optimizer.scale_loss(total)
        return total, tape.gradient(scaled, watched), assigned

    with tf.device(HOST), _as_written():
        function = tf.function(run, autograph=False).get_concrete_function()
        operations = function.graph.get_operations()
        total, gradients, assigned = function()
    dtypes = {
        t.dtype.name
        for op in operations
        for t in op.outputs
        if is_continuous(t)
    }
    if stateful_kinds(operations):
        total, gradients, assigned = None, [], {}
    if built.arguments.gradient_dtype is not None:
        dtypes.add(built.arguments.gradient_dtype)
    return KerasStep(total, gradients, assigned, dtypes)


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """Inside, TensorFlow's graph optimiser is off, as it is in cells."""
    name = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(name, False)
    tf.config.optimizer.set_experimental_options({name: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: before})


def _joined(outputs: Sequence[Any]) -> Any:
    """Joins the outputs of micro-batches, with tensors attached to them."""
    if len(outputs) == 1:
        return outputs[0]

    def joined(*parts: Any) -> Any:
        if parts[0] is None:
            return None
        attached = [internals.attached_to(t) for t in parts]
        named = {
            name: tf.concat([tensors[name] for tensors in attached], 0)
            for name in attached[0]
        }
        return internals.attach(tf.concat(parts, 0), named)

    return tree.map_structure(joined, *outputs)


def _loss(
    model: GPipe, data: MiniBatchData, y_pred: Nest, losses: list[tf.Tensor]
) -> tf.Tensor:
    x, y, sample_weight = data
    penalties = [
        tf.reduce_sum(v.regularizer(v))
        for v in model.trainable_weights
        if v.regularizer is not None
    ]
    with model.replaced_losses([*losses, *penalties]):
        return internals.compute_loss(
            model, x, y, y_pred, sample_weight, training=True
        )


# ---------------------------------------------------------------- comparisons
def _compare(
    report: Report, model: GPipe, data: MiniBatchData, step: Step
) -> None:
    """Compares a step with Keras's, and its update with the optimizer's."""
    names, expected = _names(model), _run_keras(model, data)
    limit = max(limit_of(expected.dtypes, d) for d in model.devices)
    worst = 0.0
    if step.loss is not None and expected.loss is not None:
        worst = output_distance([step.loss], [expected.loss])
        report.note("loss", "the whole mini-batch", "loss", worst, limit)
    weights = model.trainable_weights
    triples = [*zip(step.gradients, expected.gradients, weights)]
    sizes = [largest(d) for *pair, _ in triples for d in pair]
    # Those are left out that are zero but for rounding.
    floor = _TINY * limit * max(sizes, default=0.0)
    for d, other, v in reversed(triples):
        apart = gradient_distance(d, other, floor)
        report.note("loss", names[id(v)], "gradient", apart, limit)
        worst = max(worst, apart)
    if worst > limit:
        here = model.rehearse(_packed(data)).sections
        with model.on_host():
            there = model.rehearse(_packed(data)).sections
        for section, host in zip(here, there, strict=True):
            apart = max(map(output_distance, section.gives, host.gives))
            report.note("forward", section.name, "outputs", apart, limit)
            if apart > limit:
                break  # all that follows differs, too
    with model.unchanged(), tf.device(HOST):
        for weight in weights:
            if id(weight) in expected.assigned:
                weight.assign(expected.assigned[id(weight)])
        if weights:
            with internals.without_all_reduce(model.optimizer):
                pairs = [*zip(step.gradients, weights)]
                model.optimizer.apply_gradients(pairs)
        for variable in _updated(model):
            key = id(variable)
            apart = change_distance(
                step.after[key], variable.numpy(), step.before[key]
            )
            limit = limit_of([variable.dtype])
            report.note("update", names[key], "update", apart, limit)


def _names(model: GPipe) -> dict[int, str]:
    """Returns each variable, with its layer if it is a cell's, in words."""
    names = {id(v): f"'{v.path}'" for v in _updated(model)}
    cells = model.built_for("a step").cells
    places = {
        id(variable): f" of {cell.describe(step.layer)}"
        for cell in reversed(cells)
        for step in reversed(cell.steps)
        for variable in step.variables
    }
    return {key: name + places.get(key, "") for key, name in names.items()}
