"""Is it exact on my model? One step, beside plain Keras on the host.

    devices    x --> layer --> layer --> loss      the cells' devices
    host       x --> layer --> layer --> loss      the same cells, bits
    Keras      x --> model --------------> loss    rounding

The step runs layer by layer on its devices and on the host: the first layer
that differs is named. Keras runs the micro-batches on the host, one after the
other: given what each one draws, loss, gradients and state follow. The step
that `fit` runs is compared with that by layers; given its gradients, Keras's
optimizer updates the same variables on the host.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfgpipe import inputs, internals
from tfgpipe.exactness.report import Report, Tally
from tfgpipe.graphs import as_tensor, is_continuous, stateful_kinds
from tfgpipe.inputs import check_rows, first_tensor
from tfgpipe.internals import Nest
from tfgpipe.model import HOST, GPipe, Rehearsal, Section, all_finite
from tfgpipe.run import MiniBatch
from tfgpipe.state import is_synchronized, weighted_mean
from tfgpipe.trial import (
    TINY_INPUTS,
    change_distance,
    gradient_distance,
    largest,
    limit_of,
    output_distance,
    try_all,
)

# Gradients of weights that are this share of what is rounding of the largest
# are zero but for rounding, as of the bias of the keys of an attention.
_TINY = 0.1

_MOST_SCALES = 20  # of the loss: from 2^15 to under 1

# Inputs, labels and weights of the rows: nests of tensors.
MiniBatchData = tuple[Any, Any, Any]

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None

Gradients = Sequence[tuple[Gradient, keras.Variable]]

# Values of variables, by their ids.
Values = Mapping[int, Any]


def check(
    model: keras.Model, x: Nest, y: Nest = None, sample_weight: Nest = None
) -> Report:
    """Compares a training step of a model with plain Keras on the host.

    One mini-batch goes through the pipeline on its devices, layer by layer, and
    through the same on the host: the first layer that differs is named, forward
    and backward. Then the micro-batches of a layer are compared with the whole
    mini-batch, as `GPipe` tries it before a first step, loss and gradients with
    plain Keras, the step in the graph that `fit` runs with all that, and what
    it makes of each weight, slot and other variable with Keras's.

    Nothing is trained: all variables, metrics and random states are put back.
    The devices hold what each layer gets and gives of all micro-batches
    meanwhile, and the host the same.

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
            one mini-batch.

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
            on_devices = _rehearsed(model, data)
            model.build_optimizer()  # all that is called has weights now
            with model.unchanged() as put_back:
                return _compared(model, data, on_devices, put_back)


def _rehearsed(model: GPipe, data: MiniBatchData) -> Rehearsal:
    """Runs a step by layers, after as many as a loss scale needs."""
    optimizer = model.optimizer
    has_scale = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    # A loss scale may be too high at first: it falls until all is finite.
    for _ in range(_MOST_SCALES):
        rehearsal: Rehearsal = model.rehearse(_packed(data))
        is_finite = all_finite([rehearsal.total, *rehearsal.gradients])
        loss_is_finite = all_finite([rehearsal.total])
        if is_finite or not has_scale or not loss_is_finite:
            break
        internals.lower_loss_scale(optimizer)
    return rehearsal


def _packed(data: MiniBatchData) -> tuple[Any, ...]:
    packed = keras.utils.pack_x_y_sample_weight(*data)
    return packed if isinstance(packed, tuple) else (packed,)


def _compared(
    model: GPipe,
    data: MiniBatchData,
    on_devices: Rehearsal,
    put_back: Callable[[], None],
) -> Report:
    tally, sizes = Tally(), on_devices.batch.micro_batches
    is_finite = bool(all_finite([on_devices.total, *on_devices.gradients]))
    if not is_finite:
        _look_for_nonfinite(tally, data[0], on_devices)
    else:
        places = Places(model, on_devices)
        on_host = model.rehearse(_packed(data), on_host=True)
        _compare_layers(tally, model, on_devices, on_host, places)
        if sizes.count > 1:
            _compare_rows(tally, model, data[0], on_devices)
        # What draws without a seed draws something else in another graph.
        is_known = not stateful_kinds(on_devices.batch.traced.operations)
        expected = _run_keras(model, data, on_host) if is_known else None
        if expected is not None:
            _compare_keras(tally, model, on_host, expected, places)
        step = _run_graph_step(model, data)
        _compare_step(tally, model, step, on_devices, places)
        put_back()
        assigned = {} if expected is None else expected.assigned
        _compare_update(tally, model, places, step, assigned)
        if expected is not None:
            _compare_state(tally, places, step, on_devices, expected)
    replicas = model.num_replicas
    title = (
        f"A step of '{model.name}': {first_tensor(data[0]).shape[0]} rows in "
        f"{sizes.count} micro-batches, {len(on_devices.sections)} layers in "
        f"{model.num_partitions} cells"
    )
    return tally.report(title + (f", {replicas} replicas" * (replicas > 1)))


def _look_for_nonfinite(tally: Tally, x: Nest, on_devices: Rehearsal) -> None:
    """Names the first layer that makes what is not finite of what is."""
    for section in on_devices.sections:
        made = [t for values in section.gives for t in values]
        taken = [t for values in section.takes for t in values]
        is_first = _are_finite(taken) and not _are_finite(made)
        difference = math.inf if is_first else 0.0
        what = "outputs that are not finite, of inputs that are"
        tally.note("forward", section.name, what, difference)


def _are_finite(tensors: Sequence[tf.Tensor]) -> bool:
    numbers = [*filter(is_continuous, tensors)]
    return not numbers or bool(all_finite(numbers))


def _compare_layers(
    tally: Tally,
    model: GPipe,
    on_devices: Rehearsal,
    on_host: Rehearsal,
    places: Places,
) -> None:
    """Compares layers up to the first that differs, forward and backward."""
    both = [*zip(on_devices.sections, on_host.sections, strict=True)]
    for section, expected in both:
        difference = max(map(output_distance, section.gives, expected.gives))
        limit = places.limit(section)
        tally.note("forward", section.name, "outputs", difference, limit)
        if difference > limit:
            return  # all that follows differs, too
    floor = (
        _TINY * places.worst * max(map(largest, on_host.gradients), default=0.0)
    )
    gradients = zip(on_devices.gradients, on_host.gradients, strict=True)
    by_weight = dict(zip(map(id, model.trainable_weights), gradients))
    uses = [(i, use) for i, (s, _) in enumerate(both) for use in s.part.uses]
    # A weight is compared where it is used first: there, all has come back.
    first_use = {id(use.variable): i for i, use in reversed(uses)}
    coming_back = 0.0
    for i, (section, expected) in reversed([*enumerate(both)]):
        rounding = TINY_INPUTS * coming_back
        difference = max(
            gradient_distance(gradient, other, rounding)
            for gradient, other in zip(section.gradients, expected.gradients)
        )
        limit, what = places.limit(section), "gradient with respect to inputs"
        if any(section.gradients):
            tally.note("gradient", section.name, what, difference, limit)
            coming_back = max(
                largest(t) for values in expected.gradients for t in values
            )
        is_wrong = difference > limit
        limit = max(limit, places.rounding_of_sums)
        for variable in {
            id(u.variable): u.variable for u in section.part.uses
        }.values():
            if first_use[id(variable)] == i and id(variable) in by_weight:
                gradient, other = (
                    [as_tensor(d)] for d in by_weight[id(variable)]
                )
                difference = gradient_distance(gradient, other, floor)
                name = places.name(variable)
                tally.note("gradient", name, "gradient", difference, limit)
                is_wrong |= difference > limit
        if is_wrong:
            return


def _compare_rows(
    tally: Tally, model: GPipe, x: Nest, on_devices: Rehearsal
) -> None:
    """Has a trial compare parts of a mini-batch with the whole."""
    batch = on_devices.batch
    for section in on_devices.sections:
        if reasons := _documented(section):
            what = "outputs, by " + " and ".join(reasons)
            tally.note("rows", section.name, what, math.inf, is_documented=True)
    built = model.built_for("check()")
    phase = try_all(
        batch.call.with_whole_layers(),
        built.cells,
        built.as_taken(x),
        batch.micro_batches.count,
    )
    for i in phase.tried - {i for i, _ in phase.said}:
        cell, name = phase.place(i)
        tally.note("rows", cell.describe(name), "", 0.0)
    said = sorted(phase.said.items(), key=lambda pair: pair[0][0])
    untried = [
        (c, name, f"was not tried: {w}") for c, name, w in phase.untried()
    ]
    for cell, name, what in [*(told for _, told in said), *untried]:
        tally.note("rows", cell.describe(name), what, math.inf)


def _documented(section: Section) -> list[str]:
    """Returns what micro-batches do otherwise on purpose, as the guide says."""
    traced = section.part.traced
    moments = {call[0].op.name for calls in traced.moments for call in calls}
    seeds = {t.ref() for v, t in traced.state if id(v) in traced.draws}
    alike = {(t.dtype, t.shape.rank) for v, t in traced.state}
    for op in traced.operations if seeds else ():  # a seed, plus constants
        if any(t.ref() in seeds for t in op.inputs):
            seeds |= {
                t.ref() for t in op.outputs if (t.dtype, t.shape.rank) in alike
            }
    has_moments = any(name in moments for name in section.part.forward)
    draws = any(t.ref() in seeds for t in section.part.forward_inputs)
    return ["the moments of each micro-batch"] * has_moments + [
        "random numbers for each micro-batch"
    ] * draws


def _check_model(model: GPipe) -> None:
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


# -------------------------------------------------------------------- Keras
class KerasStep(NamedTuple):
    """The micro-batches as Keras runs them, on the host.

    Attributes:
        total: The loss of the mini-batch.
        gradients: By each trainable weight, or None.
        limit: From where on other numbers differ by more than rounding.
        assigned: What becomes of variables that layers assign, by id; without
            variables of which that cannot be said.
    """

    total: tf.Tensor
    gradients: list[Gradient]
    limit: float
    assigned: Values


def _run_keras(
    model: GPipe, data: MiniBatchData, rehearsal: Rehearsal
) -> KerasStep:
    """Has Keras run the micro-batches, and the loss of the mini-batch.

    Each begins with the state that it has in the step: it draws the same.
    """
    batch, built = rehearsal.batch, model.built_for("check()")
    weights, metrics = model.trainable_weights, batch.call.metric_state
    variables = {id(v): v for v in [*model.variables, *metrics]}
    sizes = batch.micro_batches

    def run() -> Any:
        values = {key: tf.identity(v.value) for key, v in variables.items()}
        watched = [values[id(v)] for v in weights]
        outputs, losses, after = [], [], []
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            split = sizes.split(built.as_taken(data[0]))
            for x, seeds in zip(split, rehearsal.seeds, strict=True):
                start = {**values, **seeds}
                scope = keras.StatelessScope(
                    [(v, start[key]) for key, v in variables.items()],
                    collect_losses=True,
                )
                with scope:
                    outputs.append(built.source.call(x, True))
                losses.append(scope.losses)
                after.append(
                    {
                        key: scope.get_current_value(v)
                        for key, v in variables.items()
                    }
                )
                # Metrics run on from micro-batch to micro-batch.
                values |= {id(v): after[-1][id(v)] for v in metrics}
            with keras.StatelessScope([*zip(weights, watched)]):
                added = [
                    weighted_mean([*map(tf.reduce_sum, parts)], sizes)
                    for parts in zip(*losses)
                ]
                total = _loss(model, data, _joined(outputs), added)
                scaled = model.optimizer.scale_loss(total)
        return total, tape.gradient(scaled, watched), after

    with tf.device(HOST), _as_written():
        function = tf.function(run, autograph=False).get_concrete_function()
        total, gradients, after = function()
    dtypes = {
        t.dtype.name
        for op in function.graph.get_operations()
        for t in op.outputs
        if is_continuous(t)
    }
    assigned = _assigned(model, batch, after)
    return KerasStep(total, gradients, limit_of(dtypes), assigned)


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
        attached = [internals.attached_to(t, True) for t in parts]
        named = {
            name: tf.concat([tensors[name] for tensors in attached], 0)
            for name in attached[0]
        }
        constants = internals.constants_on(parts[0])
        return internals.attach(tf.concat(parts, 0), constants | named)

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


def _as_array(tensor: tf.Tensor) -> np.ndarray:
    wide = "float64" if is_continuous(tensor) else None
    return np.asarray(tensor, wide)


def _assigned(
    model: GPipe, batch: MiniBatch, after: Sequence[Values]
) -> dict[int, np.ndarray]:
    """Returns what becomes of variables, by the rules of `state/rules.py`.

    `after` are their values after each micro-batch.
    """
    traced, sizes = batch.traced, batch.micro_batches
    shares = [sizes.size(m) / sizes.num_rows for m in range(sizes.count)]
    metrics = {id(v) for v in batch.call.metric_state}
    trained = {id(use.variable) for use in traced.trained_uses}
    assigned: dict[int, np.ndarray] = {}

    def mean_of(values: Sequence[np.ndarray]) -> np.ndarray:
        return sum(share * v for share, v in zip(shares, values))

    for variable, tensor in traced.new_state:
        key = id(variable)
        values = [_as_array(new[key]) for new in after]
        if key in metrics:
            if model.num_replicas == 1 or variable.aggregation == "sum":
                assigned[key] = values[-1]
        elif is_continuous(tensor) and key not in trained:
            assigned[key] = mean_of(values)
        else:
            assigned[key] = values[0]
    for layer, calls in zip(traced.normalizations, traced.moments):
        keys = id(layer.moving_mean), id(layer.moving_variance)
        if len(calls) != 1 or calls[0][2] is not None:  # called twice, masked
            continue
        means, variances = ([_as_array(new[k]) for new in after] for k in keys)
        mean, fresh = mean_of(means), 1 - layer.momentum
        deviations = [(m - mean) ** 2 for m in means]
        assigned[keys[0]] = mean
        if fresh:
            between = mean_of(deviations) / fresh
            assigned[keys[1]] = mean_of(variances) + between
    return assigned


def _compare_keras(
    tally: Tally,
    model: GPipe,
    on_host: Rehearsal,
    expected: KerasStep,
    places: Places,
) -> None:
    """Compares loss and gradients on the host with Keras's."""
    difference = output_distance([on_host.total], [expected.total])
    limit = max(expected.limit, places.rounding_of_sums)
    tally.note("loss", "the whole mini-batch", "loss", difference, limit)
    gradients = dict(zip(map(id, model.trainable_weights), expected.gradients))
    pairs = [*zip(on_host.gradients, model.trainable_weights)]
    _compare_gradients(tally, "loss", places, pairs, gradients, limit)


def _compare_gradients(
    tally: Tally,
    kind: str,
    places: Places,
    pairs: Gradients,
    expected: Values,
    limit: float,
) -> None:
    """Compares gradients of weights with those expected, which are by id.

    Those are left out that are zero but for rounding.
    """
    dense = [
        (as_tensor(d), as_tensor(expected.get(id(v))), v) for d, v in pairs
    ]
    floor = (
        _TINY
        * limit
        * max((largest(t) for d, e, _ in dense for t in (d, e)), default=0.0)
    )
    for gradient, other, variable in dense:
        difference = gradient_distance([gradient], [other], floor)
        tally.note(kind, places.name(variable), "gradient", difference, limit)


# ------------------------------------------------------------ the step of fit
class FitStep(NamedTuple):
    """A training step in a graph, and what it has left.

    Attributes:
        logs: What `fit` would show.
        pairs: Gradients, or None, and their weights.
        before: Values of all variables, by id.
        after: The same after the step.
    """

    logs: Mapping[str, tf.Tensor]
    pairs: Gradients
    before: Mapping[int, np.ndarray]
    after: Mapping[int, np.ndarray]


def _run_graph_step(model: GPipe, data: MiniBatchData) -> FitStep:
    """Trains on a mini-batch, as `fit` does without a step of a subclass."""
    told: list[Gradients] = []

    def step(batch: Nest) -> Any:
        with model.telling_gradients(told.append):
            logs = GPipe.train_step(model, batch)
        return logs, [d for d, _ in told[-1]] if told else []

    before = _values(model)
    with model.nothing_eager():
        function = model.train_function_of(step)
        logs, gradients = function(iter([_packed(data)]))
    variables = [v for _, v in told[-1]] if told else []
    return FitStep(logs, [*zip(gradients, variables)], before, _values(model))


def _values(model: GPipe) -> dict[int, np.ndarray]:
    return {id(v): v.numpy() for v in _variables(model)}


def _variables(model: GPipe) -> list[keras.Variable]:
    return [
        *model.variables,
        *model.metrics_variables,
        *_of_optimizer(model),
    ]


def _of_optimizer(model: GPipe) -> list[keras.Variable]:
    optimizer = model.optimizer
    return [*optimizer.variables, *internals.unlisted(optimizer)]


def _compare_step(
    tally: Tally,
    model: GPipe,
    step: FitStep,
    on_devices: Rehearsal,
    places: Places,
) -> None:
    """Compares the step in the graph with the loss and gradients by layers."""
    limit = max(places.worst, places.rounding_of_sums)
    if "loss" in step.logs:
        difference = output_distance([step.logs["loss"]], [on_devices.total])
        tally.note("step", "the graph", "loss", difference, limit)
    pairs = zip(map(id, model.trainable_weights), on_devices.gradients)
    _compare_gradients(tally, "step", places, step.pairs, dict(pairs), limit)


def _compare_update(
    tally: Tally,
    model: GPipe,
    places: Places,
    step: FitStep,
    assigned: Values,
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
        difference = change_distance(
            step.after[key], variable.numpy(), step.before[key]
        )
        limit = limit_of([variable.dtype])
        tally.note("update", places.name(variable), "update", difference, limit)


def _compare_state(
    tally: Tally,
    places: Places,
    step: FitStep,
    on_devices: Rehearsal,
    expected: KerasStep,
) -> None:
    """Compares what the graph has made of other variables with Keras."""
    traced = on_devices.batch.traced
    unknown = {id(v) for v, _ in traced.new_state} | {
        id(v)
        for layer in traced.normalizations
        for v in (layer.moving_mean, layer.moving_variance)
    }
    unknown = {*traced.draws} | (unknown - {*expected.assigned})
    state = {
        id(v): v
        for section in on_devices.sections
        for v in section.variables
        if not v.trainable and id(v) not in unknown
    }
    for key, variable in state.items():
        before = step.before[key]
        value = expected.assigned.get(key, before)
        scale = places.scale(variable)
        difference = change_distance(step.after[key], value, before, scale)
        limit = max(places.worst, expected.limit)
        tally.note("state", places.name(variable), "value", difference, limit)


class Places:
    """Where variables are, in words, and what is rounding there.

    Attributes:
        worst: What is rounding where most is.
        rounding_of_sums: What is, in sums of gradients.
    """

    def __init__(self, model: GPipe, on_devices: Rehearsal):
        self._names: dict[int, str] = {}
        self._scales: dict[int, float] = {}
        # Of layers inside of others, the innermost has the variable.
        for section in sorted(
            on_devices.sections, key=lambda section: -section.depth
        ):
            taken = [t for values in section.takes for t in values]
            scale = max(map(largest, filter(is_continuous, taken)), default=0.0)
            for variable in section.variables:
                key = id(variable)
                self._names.setdefault(key, section.name)
                self._scales[key] = max(self._scales.get(key, 0.0), scale)
        self.worst = max(map(self.limit, on_devices.sections))
        dtype = model.built_for("check()").gradient_dtype
        self.rounding_of_sums = 0.0 if dtype is None else limit_of([dtype])
        for weight in model.trainable_variables:
            for optimizer in internals.with_inner(model.optimizer):
                for slot in internals.slots(optimizer, weight):
                    self._names[id(slot)] = self._names.get(id(weight), "")

    def has(self, variable: keras.Variable) -> bool:
        """Returns whether a layer of the pipeline has a variable."""
        return id(variable) in self._scales

    def name(self, variable: keras.Variable) -> str:
        """Returns a variable and its layer, in words."""
        place = self._names.get(id(variable))
        path = f"'{variable.path}'"
        return f"{path} of {place}" if place else path

    def limit(self, section: Section) -> float:
        """Returns from where on its numbers differ by more than rounding."""
        layers = internals.flat_layers(section.layer) if section.layer else []
        dtypes = {layer.compute_dtype for layer in layers} - {None}
        made = [t for values in section.gives[:1] for t in values]
        dtypes |= {t.dtype.name for t in filter(is_continuous, made)}
        return max(limit_of(dtypes, d) for d in section.devices)

    def scale(self, variable: keras.Variable) -> float:
        """Returns the largest input of its layer."""
        return self._scales.get(id(variable), 0.0)
