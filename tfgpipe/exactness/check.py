"""Is it exact on my model? One step, beside plain Keras on the host.

Layers are compared one by one, see `layers.py`; then the step that `fit` runs:
its loss, gradients, update and state. It is traced as for `fit`, and tells its
gradients. Given these, Keras's optimizer updates the same variables on the
host:

    graph step      gradients --> weights, slots
                        |              |
    layers, Keras   gradients      weights', slots'

The loss of the whole mini-batch is computed by Keras on the host, from what the
last layer has made on its device: so what differs is the loss itself, its sum
over micro-batches, or where its gradients start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import inputs, internals
from tfgpipe.exactness.layers import HOST, OnHost, Recorded, summed
from tfgpipe.exactness.report import (
    Report,
    Tally,
    largest,
    limit_of,
    of_change,
    of_gradients,
    of_outputs,
    without_tiny,
)
from tfgpipe.graphs import as_tensor, is_continuous, tensors
from tfgpipe.inputs import check_rows, first_tensor
from tfgpipe.model import ByLayers, GPipe, Rehearsal, all_finite
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
    is_split = model.num_micro_batches * model.num_replicas > 1
    data = _as_tensors(x, y, sample_weight, is_split)
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
            model.build_optimizer()  # all that is called has weights now
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
    phase = try_all(
        recorded.batch.call.with_whole_layers(), cells, x, len(recorded.shares)
    )
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


def _as_tensors(
    x: Any, y: Any, sample_weight: Any, is_split: bool
) -> tuple[Any, Any, Any]:
    """One mini-batch, checked before any work."""
    x, y = inputs.as_tensors(x, y)
    _, sample_weight = inputs.as_tensors(x, sample_weight)
    check_rows(x, y, sample_weight, is_split)
    return x, y, sample_weight


# -------------------------------------------------------------- the step of fit
class FitStep(NamedTuple):
    """A training step in a graph, and what it has left.

    Attributes:
        logs: What `fit` would show.
        pairs: Gradients, or None, and their weights.
        before: Values of all variables, by id.
        after: The same after the step.
    """

    logs: Mapping[str, Any]
    pairs: Gradients
    before: Mapping[int, np.ndarray]
    after: Mapping[int, np.ndarray]


def run_graph_step(model: Any, data: tuple[Any, Any, Any]) -> FitStep:
    """Trains on a mini-batch, as `fit` does without a step of a subclass."""
    told: list[Any] = []

    def step(batch: Any) -> Any:
        with model.telling_gradients(told.append):
            logs = GPipe.train_step(model, batch)
        return logs, [d for d, _ in told[-1]] if told else []

    packed = keras.utils.pack_x_y_sample_weight(*data)
    packed = packed if isinstance(packed, tuple) else (packed,)
    before = _values(model)
    with model.nothing_eager():
        function = model.train_function_of(step)
        logs, gradients = function(iter([packed]))
    variables = [v for _, v in told[-1]] if told else []
    return FitStep(logs, [*zip(gradients, variables)], before, _values(model))


def _values(model: Any) -> dict[int, np.ndarray]:
    return {id(v): v.numpy() for v in _variables(model)}


def _variables(model: Any) -> list[keras.Variable]:
    return [
        *model.variables,
        *model.metrics_variables,
        *_of_optimizer(model),
    ]


def _of_optimizer(model: Any) -> list[keras.Variable]:
    optimizer = model.optimizer
    return [*optimizer.variables, *internals.unlisted(optimizer)]


def compare_step(
    tally: Tally,
    places: WeightPlaces,
    step: FitStep,
    total: tf.Tensor,
    pairs: Gradients,
    sums_in: str | None,
) -> None:
    """Compares the step in the graph with the loss and gradients by layers.

    `sums_in` is the dtype in which gradients are summed, or None.
    """
    if "loss" in step.logs:
        difference = of_outputs([step.logs["loss"]], [total])
        tally.note("step", "the graph", "loss", difference, places.worst)
    expected = {id(v): d for d, v in pairs}
    compare_weights(tally, "step", places, step.pairs, expected, sums_in)


def compare_update(
    tally: Tally,
    model: Any,
    places: WeightPlaces,
    step: FitStep,
    assigned: Mapping[int, Any],
) -> None:
    """Compares what the graph has made of weights and slots with Keras.

    The model has the variables that it had before the step; `assigned` is what
    layers themselves assign, by id.
    """
    optimizer = model.optimizer
    weights = model.trainable_variables
    with tf.device(HOST), internals.without_all_reduce(optimizer):
        for weight in weights:
            if id(weight) in assigned:
                weight.assign(assigned[id(weight)])
        if step.pairs:
            optimizer.apply_gradients(step.pairs)
    trained = {id(v) for gradient, v in step.pairs if gradient is not None}
    for variable in [*weights, *_of_optimizer(model)]:
        key = id(variable)
        is_weight = any(variable is weight for weight in weights)
        if is_weight and key not in trained and not places.has(variable):
            continue  # such as an average, which a `train_step` assigns
        difference = of_change(
            step.after[key], variable.numpy(), step.before[key]
        )
        limit = limit_of([variable.dtype])
        tally.note("update", places.name(variable), "update", difference, limit)


def compare_state(
    tally: Tally,
    places: WeightPlaces,
    step: FitStep,
    recorded: Recorded,
    on_host: OnHost,
) -> None:
    """Compares what the graph has made of other variables with Keras."""
    state = {
        id(v): v
        for layer in recorded.layers
        for v in layer.place.variables
        if not v.trainable
    }
    seeds = {id(v) for v in recorded.batch.call.seeds}
    for key, variable in state.items():
        if key in seeds | {*recorded.traced.draws} | on_host.unknown:
            continue
        before = step.before[key]
        expected = on_host.assigned.get(key, before)
        scale = places.scale(variable)
        difference = of_change(step.after[key], expected, before, scale)
        limit = places.limit(variable)
        tally.note("state", places.name(variable), "value", difference, limit)


# Gradients, or None, and their weights.
Gradients = Sequence[tuple[Any, keras.Variable]]


class WeightPlaces:
    """Where variables are, in words, and what is rounding there.

    Attributes:
        worst: What is rounding where most is.
    """

    def __init__(self, model: Any, recorded: Recorded):
        self._names: dict[int, str] = {}
        self._limits: dict[int, float] = {}
        self._scales: dict[int, float] = {}
        # Of layers inside of others, the innermost has the variable.
        inner_first = sorted(
            recorded.layers, key=lambda one: -len(one.place.section.around)
        )
        for layer in inner_first:
            limit, taken = layer.limit(), tensors(layer.part.takes)
            scale = max(
                (
                    largest(values[t.ref()])
                    for values in layer.taken
                    for t in taken
                    if is_continuous(t)
                ),
                default=0.0,
            )
            for variable in layer.place.variables:
                self._names.setdefault(id(variable), layer.name)
                known = self._limits.get(id(variable), 0.0)
                self._limits[id(variable)] = max(known, limit)
                known = self._scales.get(id(variable), 0.0)
                self._scales[id(variable)] = max(known, scale)
        self.worst = max(layer.limit() for layer in recorded.layers)
        for weight in model.trainable_variables:
            for optimizer in internals.with_inner(model.optimizer):
                for slot in internals.slots(optimizer, weight):
                    self._names[id(slot)] = self._names.get(id(weight), "")

    def has(self, variable: keras.Variable) -> bool:
        """Returns whether a layer of the pipeline has a variable."""
        return id(variable) in self._limits

    def name(self, variable: keras.Variable) -> str:
        """A variable and its layer."""
        place = self._names.get(id(variable))
        path = f"'{variable.path}'"
        return f"{path} of {place}" if place else path

    def limit(self, variable: keras.Variable) -> float:
        """From where on its gradient differs by more than rounding."""
        return self._limits.get(id(variable), limit_of([variable.dtype]))

    def scale(self, variable: keras.Variable) -> float:
        """The largest input of its layer."""
        return self._scales.get(id(variable), 0.0)


def compare_weights(
    tally: Tally,
    kind: str,
    places: WeightPlaces,
    found: Gradients,
    expected: Mapping[int, Any],
    sums_in: str | None,
) -> None:
    """Compares gradients of weights with those expected, which are by id.

    `sums_in` is the dtype in which they are summed, None for that of each
    weight; `kind` is that of a `Finding`.
    """
    pairs = [
        (as_tensor(d), as_tensor(expected.get(id(v))), v) for d, v in found
    ]
    rounded = 0.0 if sums_in is None else limit_of([sums_in])
    for d, own, variable in without_tiny(pairs):
        d, own = (_or_zeros(d, own), _or_zeros(own, d))
        limit = max(places.limit(variable), rounded)
        difference = of_gradients([d], [own])
        tally.note(kind, places.name(variable), "gradient", difference, limit)


def _or_zeros(gradient: Any, other: Any) -> tf.Tensor:
    return tf.zeros_like(other) if gradient is None else gradient


_WHERE = "the whole mini-batch"


def compare_loss(
    tally: Tally,
    model: Any,
    data: tuple[Any, Any, Any],
    recorded: Recorded,
) -> dict[int, tf.Tensor]:
    """Compares the loss, and where its gradients start, with Keras's.

    `data` is (x, y, sample_weight). Returns gradients of weights that do not
    come through layers, by id: those of regularisers, and of a loss that reads
    weights.
    """
    variables = model.trainable_variables
    run = recorded.loss
    with tf.device(HOST):
        flat = [None if t is None else tf.identity(t) for t in run.outputs]
        added = _added(recorded)
        weights = [tf.identity(v.value) for v in variables]
        # Where the backward pass starts: outputs, layers' losses, weights.
        sources = [
            t
            for t in [*flat, *(loss for loss, _ in added), *weights]
            if is_continuous(t)
        ]
        with (
            tf.GradientTape(watch_accessed_variables=False) as tape,
            keras.StatelessScope([*zip(variables, weights)]),
        ):
            tape.watch(sources)
            y_pred = recorded.batch.results.nest(flat)
            losses = [loss for loss, _ in added] + _penalties(model)
            own = _loss(model, data, y_pred, losses)
            limit = max(
                recorded.layers[-1].limit(),
                limit_of(_dtypes(lambda: _loss(model, data, y_pred, losses))),
            )
            scaled = model.optimizer.scale_loss(own)
        found = dict(zip(map(id, sources), tape.gradient(scaled, sources)))

        def compared(what: str, pairs: list[tuple[Any, Any]]) -> None:
            """Pairs of what is found, and a source for what is expected."""
            expected = [
                tf.zeros_like(t) if found[id(t)] is None else found[id(t)]
                for _, t in pairs
            ]
            difference = of_gradients([d for d, _ in pairs], expected)
            tally.note("loss", _WHERE, what, difference, limit)

        difference = of_outputs([recorded.total], [own])
        tally.note("loss", _WHERE, "loss", difference, limit)
        dy = [
            (tf.concat([*map(as_tensor, parts)], 0), t)
            for parts, t in zip(zip(*run.dy), flat)
            if all(d is not None for d in parts)
        ]
        if dy:
            compared("gradient of the loss with respect to outputs", dy)
        if pairs := [(d, loss) for loss, d in added if d is not None]:
            compared(
                "gradient of the loss with respect to layers' losses", pairs
            )
        return {
            id(v): as_tensor(found[id(t)])
            for v, t in zip(variables, weights)
            if found.get(id(t)) is not None
        }


def _dtypes(function: Callable[[], Any]) -> set[str]:
    """Returns the names of the dtypes in which a function computes."""
    traced = tf.function(function, autograph=False).get_concrete_function()
    return {
        t.dtype.name
        for op in traced.graph.get_operations()
        for t in op.outputs
        if is_continuous(t)
    }


def _added(recorded: Recorded) -> list[tuple[tf.Tensor, Any]]:
    """What layers add to the loss, of all rows, with its gradients."""
    run, shares = recorded.loss, recorded.shares
    return [
        (
            tf.add_n(
                [
                    tf.constant(share, loss.dtype) * loss
                    for share, loss in zip(shares, losses)
                ]
            ),
            summed(gradients),
        )
        for losses, gradients in zip(zip(*run.losses), zip(*run.dlosses))
    ]


def _penalties(model: Any) -> list[tf.Tensor]:
    """What weight regularisers add to the loss."""
    return [
        tf.reduce_sum(v.regularizer(v))
        for v in model.trainable_weights
        if v.regularizer is not None
    ]


def _loss(
    model: Any, data: tuple[Any, Any, Any], y_pred: Any, losses: list[Any]
) -> tf.Tensor:
    x, y, sample_weight = data
    with model.replaced_losses(losses):
        return internals.compute_loss(
            model, x, y, y_pred, sample_weight, training=True
        )
