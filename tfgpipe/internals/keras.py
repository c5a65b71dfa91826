"""Every private name of Keras that tfgpipe uses.

`test_internals.py` has a test for each function here, which fails when a new
version moves what the function needs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as _backend
from keras.src.backend.common import global_state as _global_state
from keras.src.backend.common import masking as _masking
from keras.src.losses import loss as _loss
from keras.src.models.functional import Functional as _Functional
from keras.src.saving import saving_lib as _saving
from keras.src.trainers import trainer as _trainer
from keras.src.utils import model_visualization as _visualization

from tfgpipe.internals.tensorflow import (
    Replaceable,
    current_graph,
    move_storage,
)

# What `keras.tree` walks: a tensor, spec or array, or tuples, lists and dicts
# of nests.
Nest = Any

_UNINITIALIZED = "uninitialized_variables"
_MADE_TRAINABLE = "_tfgpipe_made_trainable"
_MADE = "_tfgpipe_made"
HOME = "_tfgpipe_home"  # an attribute of layers and operations
_IN_NO_GRAPH = "tfgpipe_in_no_graph"
# Private methods by which models compute what a step does.
METHODS_OF_STEPS = frozenset(
    "_adjust_input_rank _aggregate_additional_loss _compute_loss "
    "_convert_inputs_to_tensors _get_metrics_result_or_logs _get_own_losses "
    "_get_own_metrics _get_regularization_losses _run_through_graph "
    "_standardize_inputs".split()
)


_layer_call = Replaceable(keras.layers.Layer, "__call__")
_operation_call = Replaceable(keras.Operation, "__call__")
_allocate = Replaceable(keras.Variable, "_initialize_with_initializer")
_allocate_later = Replaceable(keras.Variable, "_deferred_initialize")
_assign = Replaceable(keras.Variable, "assign")
_make = Replaceable(keras.Variable, "__init__")
_moments = Replaceable(keras.layers.BatchNormalization, "_moments")
_count_made = itertools.count()
# By the handle of its storage. Not an attribute of the handle: an attribute
# that is set on an eager tensor may end the process in a collection of garbage,
# long after (TensorFlow 2.21, Python 3.11: two dicts own one array).
_kept_by: weakref.WeakValueDictionary[int, keras.Variable] = (
    weakref.WeakValueDictionary()
)


# ------------------------------------------------------------------ attributes
# What `compile(loss=..., metrics=...)` became, or None. The metric behind
# `logs["loss"]`. The `(path, loss, loss_weights, name)` of every output's loss.
# What a model was compiled with, with an optimizer that is not yet in a
# `LossScaleOptimizer`: one dict, until it is compiled again.
compiled_loss = operator.attrgetter("_compile_loss")
compiled_metrics = operator.attrgetter("_compile_metrics")
loss_tracker = operator.attrgetter("_loss_tracker")
flat_losses = operator.attrgetter("_flat_losses")
compile_arguments = operator.attrgetter("_compile_config.config")
# The metrics that are attributes of a model itself, not of its layers. Whether
# Keras's steps tell a model whether it is trained.
held_metrics = operator.attrgetter("_metrics")
# The first of `model.metrics`: all but the layers'. Forgets what a layer, and
# those inside, have added to the loss.
own_metrics = operator.methodcaller("_get_own_metrics")
forget_losses = operator.methodcaller("_clear_losses")
takes_training = operator.attrgetter("_call_has_training_arg")
# The variables for which an optimizer was built.
trained_by = operator.attrgetter("_trainable_variables")
# The `tf.Variable` of a variable, or None.
storage = operator.attrgetter("_value")

# The Keras mask that travels with a tensor, or None.
get_mask = _masking.get_keras_mask
set_mask = _masking.set_keras_mask
# Keras's own weighting, masking and reduction of a loss's values.
reduce_weighted_values = _loss.reduce_weighted_values


# --------------------------------------------------------------------- scopes
class _StartScope(keras.StatelessScope):
    """Has variables without storage read, in a graph, as one start value."""

    def __init__(self, **kwargs: object):
        super().__init__(**kwargs)
        self._values: Any = weakref.WeakKeyDictionary()

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Called where a variable is read."""
        value = super().get_current_value(variable)
        graph = current_graph()
        if value is not None or is_created(variable) or graph is None:
            return value
        own = self._values.setdefault(graph, {})
        if id(variable) not in own:
            own[id(variable)] = variable._initializer(
                variable._shape, dtype=variable._dtype
            )
        return own[id(variable)]


# ------------------------------------------------------------------ variables
@contextlib.contextmanager
def deferred_variables() -> Iterator[None]:
    """Lets layers build inside without allocating their variables.

    The variables know shape, dtype and initializer, and nothing else, until
    `create_variable` is called on each of them. Keras itself would allocate
    them all on the default device when the outermost scope ends.
    """
    waiting = _global_state.get_global_attribute(_UNINITIALIZED) or []
    with (
        _global(_UNINITIALIZED, _Waiting(waiting)),
        seed_generator_kept(),
        _StartScope(initialize_variables=False),
    ):
        yield


@contextlib.contextmanager
def _global(key: str, value: Any) -> Iterator[None]:
    """Inside, this is Keras's for a key of its global state."""
    before = _global_state.get_global_attribute(key)
    _global_state.set_global_attribute(key, value)
    try:
        yield
    finally:
        _global_state.set_global_attribute(key, before)


class _Waiting(list):
    """Variables without storage: notes what each was made with."""

    def append(self, variable: keras.Variable) -> None:
        """Called where a variable is made."""
        _note_made(variable)
        super().append(variable)


def _note_made(variable: keras.Variable) -> None:
    """Notes what a variable without storage was made with, and when."""
    setattr(variable, _MADE_TRAINABLE, variable.trainable)
    setattr(variable, _MADE, next(_count_made))


@contextlib.contextmanager
def postponed(
    is_postponed: Callable[[keras.Variable], bool],
    refuse: Callable[[keras.Variable], object],
) -> Iterator[None]:
    """Has variables that are made inside wait for `create_variable`.

    Unlike `deferred_variables`, which is for a moment and in which values
    stand for storage, this leaves variables that outlive it: until they are
    created, only Keras's symbolic calls may read them. `refuse` is called with
    one that is used otherwise, and raises.
    """

    def allocate(variable: keras.Variable, initializer: Any) -> None:
        if is_postponed(variable):
            variable._value = None
            variable._initializer = _Postponed(variable, initializer, refuse)
            _note_made(variable)
        else:
            _allocate.original(variable, initializer)

    def allocate_later(variable: keras.Variable) -> None:
        if is_postponed(variable):  # made in a symbolic call that has ended
            allocate(variable, variable._initializer)
        else:
            _allocate_later.original(variable)

    with _allocate.by(allocate), _allocate_later.by(allocate_later):
        yield


@contextlib.contextmanager
def made_variables() -> Iterator[list[keras.Variable]]:
    """Inside, variables that are made are listed.

    Yields:
        The variables, in order, with storage or without.
    """
    made: list[keras.Variable] = []
    make = _make.current

    def noted(
        variable: keras.Variable, *args: object, **kwargs: object
    ) -> None:
        make(variable, *args, **kwargs)
        made.append(variable)

    with _make.by(noted):
        yield made


@contextlib.contextmanager
def assigning_by(
    assign: Callable[[keras.Variable, Any], None],
) -> Iterator[None]:
    """Inside, a function assigns what is assigned outside of scopes."""

    def instead(variable: keras.Variable, value: Any) -> Any:
        if variables_are_deferred():  # a scope has the value
            return _assign.original(variable, value)
        with _assign.by(_assign.original):
            assign(variable, value)
        return value

    with _assign.by(instead):
        yield


def start_with_zeros(variable: keras.Variable) -> None:
    """Has a postponed variable draw nothing, as it will be assigned."""
    if isinstance(variable._initializer, _Postponed):
        variable._initializer.initializer = keras.initializers.Zeros()


class _Postponed:
    """The initializer of a variable that has no storage yet.

    Keras calls it where such a variable is read: for a symbolic call, where
    the value is of no account; or because somebody takes it for a value.
    """

    def __init__(
        self, variable: keras.Variable, initializer: Callable, refuse: Callable
    ):
        self.initializer = initializer
        self._refuse = functools.partial(refuse, variable)
        variable._direct_assign = self._refuse_value

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        if not variables_are_deferred():
            self._refuse()
        return self.initializer(shape, dtype=dtype)

    def _refuse_value(self, value: Any) -> None:
        self._refuse()


def variables_are_deferred() -> bool:
    """Returns whether variables that are made now get no storage."""
    return _global_state.get_global_attribute("stateless_scope") is not None


def is_created(variable: keras.Variable) -> bool:
    """Returns whether the variable has storage."""
    return storage(variable) is not None


def note_variable(variable: keras.Variable) -> None:
    """Has `variable_of` know whose its storage is."""
    _kept_by[storage(variable).handle._id] = variable


def variable_of(handle: tf.Tensor) -> keras.Variable | None:
    """The variable whose storage has this handle, if that was noted."""
    return _kept_by.get(handle._id)


def is_watched(variable: keras.Variable) -> bool:
    """Whether tapes watch the variable, as it was made, whatever it says now.

    So Keras has no gradient of a weight that was made with `trainable=False`.
    """
    if is_created(variable):
        return storage(variable).trainable
    return getattr(variable, _MADE_TRAINABLE, variable.trainable)


def stored_dtype(variable: keras.Variable) -> tf.DType:
    """That of its storage; `variable.dtype` is another while a layer casts."""
    return tf.as_dtype(variable._dtype)


def is_trained(variable: keras.Variable) -> bool:
    """Returns whether Keras would train the variable."""
    return variable.trainable and is_watched(variable)


def of_shape(
    variable: keras.Variable, shape: Any
) -> AbstractContextManager[None]:
    """Inside, a variable says that it has another shape."""
    return replaced(variable, "_shape", tuple(shape))


def create_variable(
    variable: keras.Variable, drawn_on: str | None = None
) -> None:
    """Allocates a deferred variable on the current device.

    Its initial value is drawn there, too, or on another device.
    """
    initializer = variable._initializer
    if isinstance(initializer, _Postponed):
        initializer = initializer.initializer
        del variable._direct_assign

    def drawn(*arguments: Any, **options: Any) -> Any:
        with tf.device(drawn_on):
            return initializer(*arguments, **options)

    variable._initializer = initializer if drawn_on is None else drawn
    with (
        _as_made(variable),
        _allocate.by(_allocate.original),
        _allocate_later.by(_allocate_later.original),
    ):
        variable._deferred_initialize()


def made_order(variable: keras.Variable) -> int:
    """Sorts variables without storage as they were made.

    Initializers may draw from one generator, one after the other.
    """
    return getattr(variable, _MADE, -1)


def initial_value(variable: keras.Variable) -> tf.Tensor:
    """Says what a deferred variable would start with, on the current device."""
    with keras.StatelessScope():
        value = variable._initializer(variable.shape, dtype=variable.dtype)
    return tf.cast(value, variable.dtype)


def move_variable(variable: keras.Variable) -> None:
    """Gives the variable new storage with its value on the current device.

    To be done before an optimizer or a trace knows the old one. The same
    `tf.Variable` has it, which layers may keep; except where there was one for
    each device.
    """
    before = variable._value
    with _as_made(variable):
        variable._initialize(tf.identity(before))
    if not isinstance(before, tf.distribute.DistributedValues):
        move_storage(before, variable._value)
        variable._value = before


def _as_made(variable: keras.Variable) -> AbstractContextManager[None]:
    """Inside, storage is made as if nothing were frozen or unfrozen since."""
    return replaced(variable, "_trainable", is_watched(variable))


# --------------------------------------------------------------------- inputs
def input_layer(item: Any) -> keras.layers.InputLayer | None:
    """An `InputLayer` itself, or a `keras.Input`'s; else None."""
    if isinstance(item, keras.KerasTensor):
        item = getattr(item, "_keras_history", (None,))[0]
    return item if isinstance(item, keras.layers.InputLayer) else None


# ---------------------------------------------------------------------- masks
def keep_words(error: Exception) -> None:
    """Has a layer that calls others not put the error into its own words.

    They would be of calls that the user knows nothing about.
    """
    error._keras_call_info_injected = True  # type: ignore[attr-defined]


# What Keras hangs on tensors: where they are not to be counted, and of what
# they are the softmax or the sigmoid, from which its crossentropies go on.
_ATTACHED = ("_keras_mask", "_keras_logits")


# Keras's crossentropies go on from what these operations took.
_FROM_LOGITS = {"Sigmoid": tf.nn.sigmoid, "Softmax": tf.nn.softmax}


def attached_to(tensor: Any) -> dict[str, tf.Tensor]:
    """Returns what Keras has hung on a tensor, by its name.

    And, by the name of the operation that made it, there are the logits that
    Keras would find there.
    """
    found = {name: getattr(tensor, name, None) for name in _ATTACHED}
    operation: tf.Operation = getattr(tensor, "op", None)
    kind = getattr(operation, "type", None)
    if kind in _FROM_LOGITS and found["_keras_logits"] is None:
        found[kind] = operation.inputs[0]
    return {name: one for name, one in found.items() if one is not None}


def hung_by_user(tensor: Any) -> dict[str, Any]:
    """Returns what a user has hung on a tensor of a graph, by its name."""
    if not tf.is_symbolic_tensor(tensor):
        return {}  # Python dies of `vars` of tensors that are eager
    others = "_is_zeros", "_keras", "_tf"
    return {k: v for k, v in vars(tensor).items() if not k.startswith(others)}


def attach(tensor: Any, attached: Mapping[str, tf.Tensor]) -> Any:
    """Hangs on a tensor of a graph what `attached_to` has returned.

    Returns the tensor, or one that the operation has made anew of its logits.
    """
    for name in _FROM_LOGITS.keys() & attached.keys():
        tensor = _FROM_LOGITS[name](attached[name])
    for name in attached.keys() - _FROM_LOGITS.keys():
        setattr(tensor, name, attached[name])
    return tensor


def copies_of(
    tensor: tf.Tensor, count: int, added: Callable[..., tf.Tensor] | None = None
) -> list[tf.Tensor]:
    """Copies of a user's tensor, with all that hangs on it.

    `added` adds up the gradients of all copies; None for TensorFlow's way.
    """

    def copied(tensor: tf.Tensor) -> Any:
        return [tf.identity(tensor) for _ in range(count)], added

    if added is None:
        made = copied(tensor)[0]
    else:
        made = tf.custom_gradient(copied)(tensor)
    hung = hung_by_user(tensor)
    if tf.is_symbolic_tensor(tensor):
        hung["_keras_logits"] = getattr(tensor, "_keras_logits", None)
    for copy in made:
        if (mask := get_mask(tensor)) is not None:
            set_mask(copy, mask)
        for name, one in hung.items():
            if one is not None:
                setattr(copy, name, one)
    return made


# -------------------------------------------------------- losses and metrics
def build_losses_and_metrics(
    model: keras.Model, x: Nest, y: Nest, y_pred: Nest, sample_weight: Nest
) -> None:
    """Creates the variables of compiled losses and metrics.

    An overridden `compute_loss` may do without the compiled loss, of which
    Keras shows nothing then: whether it does is tried, as Keras tries it. And
    layers that the model holds for it have no weights before they are called.

    All but the model are nests of `keras.KerasTensor`s.
    """

    def runs(function: Callable, *data: Nest, **others: Any) -> bool:
        try:  # it may need real tensors, or what hangs on them
            _backend.compute_output_spec(function, *data, **others)
        except Exception:
            return False
        return True

    metrics, loss = model._compile_metrics, model._compile_loss
    weights = {"sample_weight": sample_weight}
    if metrics is not None and not metrics.built:
        ran = runs(model.compute_metrics, x, y, y_pred, **weights)
        if not ran and not metrics.built:
            metrics.build(y, y_pred)
    is_new = loss is not None and not loss.built
    if "compute_loss" in overridden(model, keras.Model) and (
        is_new or not all(layer.built for layer in model._flatten_layers())
    ):
        data = x, y, y_pred, sample_weight
        is_new = not runs(model._compute_loss, *data, training=False) and is_new
    if is_new and not runs(loss, y, y_pred, sample_weight) and not loss.built:
        loss.build(y, y_pred)  # twice, it would show each output's loss twice


def compute_loss(model: keras.Model, *data: Nest, training: bool) -> Any:
    """`compute_loss`, also where an override takes no `training`."""
    return model._compute_loss(*data, training=training)


@contextlib.contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute or a method is another, which Keras does not track.

    Of an object or of a class.
    """
    base = type if isinstance(thing, type) else object
    is_property = hasattr(getattr(type(thing), name, None), "__set__")
    has_one = is_property or name in vars(thing)
    before = getattr(thing, name) if has_one else None
    base.__setattr__(thing, name, value)
    try:
        yield
    finally:
        if has_one:
            base.__setattr__(thing, name, before)
        else:
            base.__delattr__(thing, name)


@contextlib.contextmanager
def replaced_losses(
    compile_loss: Any, replace: Callable[[int, keras.losses.Loss], Callable]
) -> Iterator[None]:
    """Inside, loss i of a compiled loss is what `replace(i, loss)` returns."""
    losses = [
        entry._replace(loss=replace(i, entry.loss))
        for i, entry in enumerate(compile_loss._flat_losses)
    ]
    with replaced(compile_loss, "_flat_losses", losses):
        yield


@contextlib.contextmanager
def refusing_added_losses(
    model: keras.Model, refuse: Callable[[keras.layers.Layer], object]
) -> Iterator[None]:
    """Inside, who reads the losses that a single layer has added is refused.

    Those of the model may be read, and of what it holds besides its `layers`.
    """
    with contextlib.ExitStack() as stack:
        for layer in _inner_layers(model):
            if layer._loss_ids:
                refused = functools.partial(refuse, layer)
                stack.enter_context(replaced(layer, "_get_own_losses", refused))
        yield


def forget_added_losses(model: keras.Model) -> None:
    """Forgets what was added outside of scopes, as by `self.add_loss`."""
    for layer in model._flatten_layers():
        layer._losses.clear()


def added_losses(model: keras.Model) -> list[tf.Tensor]:
    """What a model has added since, and what it holds besides its `layers`."""
    inner = {id(layer) for layer in _inner_layers(model)}
    layers = [one for one in model._flatten_layers() if id(one) not in inner]
    return [v for layer in layers for v in layer._get_own_losses()]


def adding_layer(model: keras.Model) -> keras.layers.Layer | None:
    """One of the `layers` that has added a loss since, or None."""
    return next((la for la in _inner_layers(model) if la._losses), None)


def _inner_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The `layers` of a model, and all inside them."""
    return [one for layer in model.layers for one in layer._flatten_layers()]


def effective_weights(
    values: tf.Tensor,
    sample_weight: Nest,
    mask: Nest,
    reduction: str,
    dtype: str,
) -> Any:
    """The weights by which Keras multiplies a loss's values, or None."""
    given = [
        None if t is None else keras.ops.convert_to_tensor(t, dtype=dtype)
        for t in (sample_weight, mask)
    ]
    weights = _loss.apply_mask(*given, dtype=values.dtype, reduction=reduction)
    if weights is None:
        return None
    return _loss.squeeze_or_expand_to_same_rank(values, weights)[1]


def metric_calls(
    compile_metrics: Any, y: Nest, y_pred: Nest, sample_weight: Nest
) -> list[tuple[keras.metrics.Metric, Nest, Nest, Nest]]:
    """Says what every metric would be called with: (metric, y, y_pred, weight).

    The compiled metrics are built; anything may stand for the data.
    """
    calls: list[tuple[keras.metrics.Metric, Nest, Nest, Nest]] = []

    def recorder(metrics: Any) -> Any:
        def record(y: Nest, y_pred: Nest, sample_weight: Nest = None) -> None:
            every = metrics.metrics
            calls.extend((m, y, y_pred, sample_weight) for m in every)

        return types.SimpleNamespace(metrics=metrics, update_state=record)

    with contextlib.ExitStack() as stack:
        for name in ("_flat_metrics", "_flat_weighted_metrics"):
            flat = getattr(compile_metrics, name)
            recorders = [m and recorder(m) for m in flat]
            stack.enter_context(replaced(compile_metrics, name, recorders))
        compile_metrics.update_state(y, y_pred, sample_weight)
    return calls


def metric_function(metric: keras.metrics.Metric) -> Callable | None:
    """The function that a `MeanMetricWrapper` averages, or None."""
    return getattr(metric, "_fn", None)


def function_arguments(wrapper: Any) -> dict[str, Any]:
    """The keyword arguments that a wrapped loss or metric passes on."""
    return dict(getattr(wrapper, "_fn_kwargs", {}))


# -------------------------------------------------------- batch normalization
def recording_moments(record: Callable) -> AbstractContextManager[None]:
    """Inside, `BatchNormalization`s tell their moments, as they compute them.

    `record` is called as `record(layer, inputs, mask, mean, variance)`.
    """

    def moments(layer: keras.layers.Layer, inputs: Nest, mask: Nest) -> Any:
        mean, variance = _moments.original(layer, inputs, mask)
        record(layer, inputs, mask, mean, variance)
        return mean, variance

    return _moments.by(moments)


# ------------------------------------------------------------------ optimizer
@contextlib.contextmanager
def without_all_reduce(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, the optimizer does not reduce gradients over replicas.

    Keras wraps all gradients into one operation for that, which would drag
    every gradient of every cell through one device.
    """
    with contextlib.ExitStack() as stack:
        for one in with_inner(optimizer):
            name = "_all_reduce_sum_gradients"
            stack.enter_context(replaced(one, name, lambda pairs: pairs))
        yield


def adopt(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
) -> None:
    """Lets an optimizer be used under a strategy that it was not made under."""
    for one in with_inner(optimizer):
        one._distribution_strategy = strategy


def with_inner(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The optimizer and those it applies to some or all gradients."""
    inner = list(getattr(optimizer, "optimizers", ()))
    if hasattr(optimizer, "inner_optimizer"):
        inner.append(optimizer.inner_optimizer)
    return [optimizer, *(o for i in inner for o in with_inner(i))]


def scales_loss(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer divides gradients by a scale of the loss."""
    return any(
        isinstance(one, keras.optimizers.LossScaleOptimizer)
        or getattr(one, "loss_scale_factor", None) is not None
        for one in with_inner(optimizer)
    )


def slots_of_all(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """What an optimizer keeps, and those that it applies; no loss scale."""
    return [
        variable
        for one in with_inner(optimizer)
        if not isinstance(one, keras.optimizers.LossScaleOptimizer)
        for variable in [*one.variables, *unlisted(one)]
    ]


def optimizer_names(model: keras.Model) -> list[str]:
    """The classes of a model's optimizer, and of those that it applies."""
    optimizer = getattr(model, "optimizer", None)
    every = [] if optimizer is None else with_inner(optimizer)
    return [type(one).__name__ for one in every]


def unlisted(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Variables of an optimizer that are not among its `variables`.

    Keras tracks nothing while a `LossScaleOptimizer` builds the one inside, so
    that what `Nadam` keeps for all weights together is in none of its files.
    """
    listed = {id(variable) for variable in optimizer.variables}
    held = [v for one in with_inner(optimizer) for v in vars(one).values()]
    variables = {id(v): v for v in held if isinstance(v, keras.Variable)}
    return [v for key, v in variables.items() if key not in listed]


def raw_iterations(optimizer: keras.Optimizer) -> int:
    """How often an optimizer was applied, also where it only accumulated."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return int(optimizer._iterations)


def lower_loss_scale(optimizer: keras.Optimizer) -> None:
    """As a loss scale that is adapted falls when gradients are not finite."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer._stateful_handle_non_finite_grads()


def slots(
    optimizer: keras.Optimizer, variable: keras.Variable
) -> list[keras.Variable]:
    """Returns what an optimizer keeps for a variable."""
    index = optimizer._get_variable_index(variable)
    number = len(optimizer._trainable_variables)
    # Lists of one for each; None for one that is overwritten by its gradient.
    return [
        value[index]
        for name, value in vars(optimizer).items()
        if name not in ("_variables", "_trainable_variables")
        and isinstance(value, list)
        and len(value) == number
        and all(v is None or isinstance(v, keras.Variable) for v in value)
        and value[index] is not None
    ]


# --------------------------------------------------------------------- layers
class SymbolicCall(NamedTuple):
    """A call of a layer, or of an operation, on `keras.KerasTensor`s.

    Attributes:
        operation: What was called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        inputs: The tensors it took, without the masks that Keras found.
        outputs: Those it returned, flat.
    """

    operation: keras.Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[keras.KerasTensor]
    outputs: list[keras.KerasTensor]


def symbolic_calls(layer: keras.layers.Layer) -> list[SymbolicCall]:
    """The calls of a layer in Keras's graphs of layers."""
    return _calls(_in_graphs(layer._inbound_nodes))


def calls_on(layer: keras.layers.Layer) -> list[SymbolicCall]:
    """The calls of layers and operations on a layer's symbolic outputs."""
    return _calls(_in_graphs(layer._outbound_nodes))


def graph_calls(model: keras.Model) -> list[SymbolicCall]:
    """The calls in the graph of a functional model, in Keras's own order."""
    by_depth = model._nodes_by_depth
    return _calls(
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation is not None and not node.is_input
    )


def _calls(nodes: Iterable[Any]) -> list[SymbolicCall]:
    return [
        SymbolicCall(
            node.operation,
            node.arguments.args,
            node.arguments.kwargs,
            _given_by_user(node),
            list(node.outputs),
        )
        for node in nodes
    ]


def _in_graphs(nodes: Sequence[Any]) -> list[Any]:
    return [node for node in nodes if not hasattr(node, _IN_NO_GRAPH)]


def _given_by_user(node: Any) -> list[Nest]:
    """The tensors that a call took, without the masks of the others."""
    masks = {id(get_mask(t)) for t in keras.tree.flatten(node.arguments.args)}
    given = keras.tree.flatten(node.arguments.kwargs.get("mask"))
    of_keras = {id(mask) for mask in given} & masks
    return [t for t in node.input_tensors if id(t) not in of_keras]


def producer(tensor: keras.KerasTensor) -> keras.Operation:
    """The layer or operation that a symbolic tensor comes from, or None."""
    history = getattr(tensor, "_keras_history", None)
    return None if history is None else history.operation


def is_functional(model: keras.Model) -> bool:
    """Tells whether a model is a graph of layers, and its call runs just that.

    So is one of a subclass that hands `inputs` and `outputs` to `keras.Model`
    and leaves `call` alone. A regulariser of what the model returns is no
    layer.
    """
    return isinstance(model, _Functional) and _calls_as(model, _Functional)


def _calls_as(model: keras.Model, cls: type[keras.Model]) -> bool:
    return (
        type(model).call is cls.call
        and "call" not in vars(model)
        and model.activity_regularizer is None
    )


def functional_of(model: keras.Sequential) -> keras.Model:
    """The functional model that a `keras.Sequential` is, or None.

    It is none before it is built, where it takes a nest of tensors, and where
    it does more than its layers.
    """
    return model._functional if runs_its_layers(model) else None


def runs_its_layers(model: keras.Sequential) -> bool:
    """Returns whether the call of a `keras.Sequential` runs just its layers."""
    is_called = type(model).__call__ is keras.Sequential.__call__
    return is_called and _calls_as(model, keras.Sequential)


@contextlib.contextmanager
def in_no_graph(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Inside, `symbolic_calls` and `calls_on` notice no calls of layers."""
    before = {id(n) for layer in layers for n in layer._inbound_nodes}
    yield
    for node in (n for layer in layers for n in layer._inbound_nodes):
        if id(node) not in before:
            setattr(node, _IN_NO_GRAPH, True)


def flat_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layer and all layers inside it."""
    return list(layer._flatten_layers())


def direct_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers of a model in the order of its weights.

    `model.layers` of a functional one has them in the order of their calls.
    """
    return list(model._flatten_layers(include_self=False, recursive=False))


@functools.cache
def watch_calls(
    called: Callable[[Any], object],
    added: Callable[[keras.layers.Layer], object],
    spans: Callable[[keras.Model], bool],
) -> None:
    """From now on, has calls and models of Keras look at where layers are.

    A call of a layer or operation runs in the context that `called` returns,
    the making of a layer's variable in that of `added`. A model that `spans`
    devices is not compiled by XLA: Keras warns who asks for it.
    """
    for cls, name, around in (
        (keras.Operation, "__call__", called),
        (keras.layers.Layer, "add_weight", added),
    ):
        setattr(cls, name, _inside(getattr(cls, name), around))
    _trainer.model_supports_jit = lambda m: _supports_jit(m) and not spans(m)


def _inside(method: Callable, around: Callable[[Any], Any]) -> Callable:
    """A method that runs in a context, which is made for its object."""

    @functools.wraps(method)
    def inside(self: Any, *args: object, **kwargs: object) -> Any:
        with around(self):
            return method(self, *args, **kwargs)

    return inside


def forget_functions(model: keras.Model) -> None:
    """Has a model trace anew what it does: its weights have other places."""
    for kind in ("train", "test", "predict", "generate"):
        if hasattr(model, f"{kind}_function"):
            setattr(model, f"{kind}_function", None)


# The attributes of layers that have their weights, LoRA or not.
KERNEL, TABLE = "_kernel", "_embeddings"


def remat_mode(layer: keras.layers.Layer) -> object:
    """The mode of the `keras.RematScope` that a layer was made in, or None."""
    return getattr(layer, "_remat_mode", None)


@contextlib.contextmanager
def noting_losses(
    layers: Sequence[keras.layers.Layer],
) -> Iterator[Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]]:
    """Inside, tells which losses these layers, and those inside, have added.

    Keras counts no others: those of a layer that only a closure knows are lost.
    """

    def ids() -> Iterator[set[int]]:
        for layer in layers:  # which may make some when it is built
            for one in layer._flatten_layers():
                yield one._loss_ids

    for noted in ids():
        noted.clear()

    def added(losses: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        known = set().union(*ids())
        return [loss for loss in losses if id(loss) in known]

    yield added


@contextlib.contextmanager
def around_calls(
    called: Callable[[keras.Operation, Callable[[], Any]], Any],
) -> Iterator[None]:
    """Inside, calls of layers and operations are made by a function.

    It gets the layer or operation, and what calls it. Functional models call
    operations: `x + y` is one there.
    """

    def noticed(call: Replaceable, of_layers: bool) -> Any:
        def instead(thing: Any, *args: object, **kwargs: object) -> Any:
            run = functools.partial(call.original, thing, *args, **kwargs)
            is_layer = isinstance(thing, keras.layers.Layer)
            return called(thing, run) if is_layer == of_layers else run()

        return call.by(instead)

    # The call of a layer calls that of an operation.
    with noticed(_layer_call, True), noticed(_operation_call, False):
        yield


# ---------------------------------------------------------------------- names
def is_keras(thing: object) -> bool:
    """Whether Keras defines a class or function, or the class of an object.

    `functools.wraps` gives another one the name and the module of Keras's.
    """
    if not (getattr(thing, "__module__", "") or "").startswith(_KERAS):
        return False
    own = getattr(thing, "__globals__", None)
    if own is not None:  # a function's, wherever it says that it is from
        return own["__name__"].startswith(_KERAS)
    if not isinstance(thing, type):
        return is_keras(type(thing))
    module = sys.modules.get(thing.__module__)
    return getattr(module, thing.__name__, None) is thing


_KERAS = "keras.src."


def is_keras_function(thing: object) -> bool:
    """Tells whether it is a function that a module of Keras has by its name."""
    if not is_keras(thing):
        return False
    module = sys.modules.get(thing.__module__)
    return getattr(module, getattr(thing, "__name__", ""), None) is thing


def overridden(thing: Any, base: type | None = None) -> set[str]:
    """Returns the names that an object or its class defines anew.

    Compared with a class; by default, the first of Keras that it inherits from.
    """
    cls = type(thing)
    base = base or next(filter(is_keras, cls.__mro__), object)
    names = set()
    for name in dir(cls):
        value = inspect.getattr_static(cls, name, None)
        is_new = value is not inspect.getattr_static(base, name, None)
        is_replacing = not name.startswith("_") and hasattr(base, name)
        if is_new and (is_replacing or hasattr(value, "__get__")):
            names.add(name)
    for name, value in vars(thing).items():
        method = getattr(cls, name, None)
        if callable(method) and not _wraps(value, method, thing):
            names.add(name)
    return names


def _wraps(function: Any, method: Any, thing: Any) -> bool:
    """Returns whether Keras has wrapped a method, as it does with `build`."""
    wrapped = getattr(function, "__wrapped__", None)
    return is_keras(function) and wrapped == method.__get__(thing)


def names_kept() -> AbstractContextManager[None]:
    """Keras names what is made afterwards as if nothing were made inside."""
    key = "object_name_uids"
    before = _global_state.get_global_attribute(key)
    return _global(key, None if before is None else before.copy())


# ---------------------------------------------------------------------- seeds
@contextlib.contextmanager
def seed_generator_kept() -> Iterator[None]:
    """Forgets Keras's global seed generator if it is made inside.

    Keras makes it, from Python's random state, when it is first needed. One
    that is made where variables are deferred has no value.
    """
    key = "global_seed_generator"
    before = _global_state.get_global_attribute(key)
    try:
        yield
    finally:
        made = _global_state.get_global_attribute(key)
        if made is not before:
            _global_state.set_global_attribute(key, before)
            waiting = _global_state.get_global_attribute(_UNINITIALIZED) or []
            waiting[:] = [v for v in waiting if v is not made.state]


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Undoes what is done inside to Python's, NumPy's and Keras's draws."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with seed_generator_kept():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def seeds_of(layers: Iterable[keras.layers.Layer]) -> list[keras.Variable]:
    """The states of the layers' seed generators, each once.

    Keras lists them among variables, and not among weights.
    """
    layers = list(layers)
    weights = {id(v) for layer in layers for v in layer.weights}
    every = {id(v): v for layer in layers for v in layer.variables}
    return [v for key, v in every.items() if key not in weights]


def global_seed() -> list[keras.Variable]:
    """The state of Keras's global seed generator, if there is one."""
    made = _global_state.get_global_attribute("global_seed_generator")
    return [] if made is None else [made.state]


# ---------------------------------------------------------------------- steps
def first_data(epoch_iterator: Any) -> Any:
    """The first batch of an epoch, where Keras has it at hand; or None.

    Of arrays, if Python can slice them, and the batch that Keras takes of a
    generator to see what it yields. Nothing is asked for that would not be
    asked for anyway.
    """
    adapter: Any = getattr(epoch_iterator, "data_adapter", None)
    arrays = getattr(adapter, "_inputs", None)
    if arrays is None:
        return (getattr(adapter, "_first_batches", None) or [None])[0]
    size = adapter.batch_size
    try:
        return keras.tree.map_structure(
            lambda a: a[:size] if getattr(a, "shape", ()) else a, arrays
        )
    except TypeError:  # of sparse ones
        return None


class HoldingModel(keras.Model):
    """A model that may hold more than its layers, as a functional model may."""

    def _lock_state(self) -> None:
        """Called when it is built: what it holds may grow later, too."""

    def _obj_type(self) -> str:
        """By which files have the layers first, and then what it holds."""
        return "Functional"

    def _named_after(self) -> keras.Model | None:
        """The model by whose name variables are called; None for this one."""

    def _open_name_scope(self) -> Any:
        """Called when it is built or called: paths of variables follow."""
        model = self._named_after()
        if model is None:
            return super()._open_name_scope()
        return model._open_name_scope()


def has_all_weights(model: keras.Model) -> bool:
    """Tells whether all layers of a model are built, and none will get weights.

    A `keras.Sequential` has its layers', built or not.
    """
    return all(
        layer.built or isinstance(layer, keras.Sequential)
        for layer in model._flatten_layers()
    )


def direct_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables of a layer itself, by `add_weight`, in files' order."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


# The attributes that Keras looks into to save a model, with their names, and in
# the order of a file, which has of them what can be saved.
saved_parts = _saving._walk_saveable


def save_by(
    cls: type, parts: Callable[[Any], Iterator[tuple[str, Any]]]
) -> None:
    """Has Keras save, and load, what `parts` returns of models of a class.

    Elsewhere than `saved_parts`, which Keras would.
    """

    def walk(saved: Any) -> Iterator[tuple[str, Any]]:
        return parts(saved) if isinstance(saved, cls) else saved_parts(saved)

    _saving._walk_saveable = walk


_supports_jit = _trainer.model_supports_jit


def supports_jit(model: keras.Model) -> bool:
    """Returns whether XLA may compile the layers of a model, one by one."""
    with replaced(model, "supports_jit", True):
        return _supports_jit(model)


class BuiltBeforeTracing(keras.Model):
    """A model that is told of its data before Keras traces a step."""

    def build_for(self, data: Nest) -> None:
        """Called with what a step will get, or its `tf.TensorSpec`s."""

    def note_data(self, data: Nest) -> None:
        """Called with arrays of data, some or all, where there are any."""

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        if data_batch is None:
            self.note_data(first_data(iterator))
            data_batch = iterator._get_iterator().element_spec
        else:
            self.note_data(data_batch)
        self.build_for(data_batch)

    def epoch_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Called with what `fit` is about to show of an epoch."""
        return logs

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        return self.epoch_logs(super()._get_metrics_result_or_logs(logs))


def draw_as(cls: type, shown: Callable[[Any], Any]) -> None:
    """Has Keras draw another model in the place of one of a class.

    `keras.utils.plot_model` and `model_to_dot` draw what `shown` returns for
    it. They ask for nothing that the class could answer by itself.
    """
    original = _visualization.model_to_dot

    @functools.wraps(original)
    def model_to_dot(
        model: keras.Model, *args: object, **kwargs: object
    ) -> Any:
        model = shown(model) if isinstance(model, cls) else model
        return original(model, *args, **kwargs)

    for module in (_visualization, keras.utils):
        module.model_to_dot = model_to_dot
