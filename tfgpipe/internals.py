"""Every private TensorFlow and Keras name that tfgpipe uses.

Nothing else in the library may reach below the public interfaces.
`tests/test_internals.py` has a test for each function here, which fails when a
new TensorFlow or Keras moves what the function needs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src import backend as _backend
from keras.src.backend.common import global_state as _global_state
from keras.src.losses import loss as _loss
from tensorflow.core.framework.attr_value_pb2 import AttrValue as _Attribute
from tensorflow.core.framework.attr_value_pb2 import (
    NameAttrList as _NameAttrList,
)
from tensorflow.python.distribute import distribute_lib as _distribute_lib
from tensorflow.python.eager.polymorphic_function.polymorphic_function import (
    Function as _Function,
)
from tensorflow.python.framework import op_def_registry as _op_def_registry
from tensorflow.python.ops import control_flow_ops as _control_flow_ops
from tensorflow.python.ops import custom_gradient as _custom_gradient
from tensorflow.python.ops import gradients_util as _gradients_util
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    ControlFlowFuncGraph as _ControlFlowFuncGraph,
)

_IS_COMPILED = "_XlaMustCompile"
_UNINITIALIZED = "uninitialized_variables"
_IN_NO_GRAPH = "tfgpipe_in_no_graph"


class _Replaceable:
    """A function of TensorFlow's that a thread may replace for itself.

    While a thread does so, a dispatcher stands in for the function. All other
    threads are led to the original, which is back when the last thread leaves.

    Args:
        owner: The class or module that has the function.
        name: Its name there.
    """

    def __init__(self, owner: Any, name: str):
        self._owner = owner
        self._name = name
        self.original: Callable = getattr(owner, name)
        self._lock = threading.Lock()
        self._num_inside = 0
        self._of_thread = threading.local()

    @contextlib.contextmanager
    def by(self, function: Callable) -> Iterator[None]:
        """Inside, this thread calls another function."""
        before = getattr(self._of_thread, "function", self.original)
        self._count(1)
        self._of_thread.function = function
        try:
            yield
        finally:
            self._of_thread.function = before
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            if self._num_inside == 0:
                setattr(self._owner, self._name, self._dispatcher())
            self._num_inside += change
            if self._num_inside == 0:
                setattr(self._owner, self._name, self.original)

    def _dispatcher(self) -> Callable:
        @functools.wraps(self.original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            own = getattr(self._of_thread, "function", self.original)
            return own(*args, **kwargs)

        return dispatch


_function_call = _Replaceable(_Function, "__call__")
_consumers = _Replaceable(_gradients_util, "_Consumers")


# --------------------------------------------------------------- tf.functions
def outside_functions() -> contextlib.AbstractContextManager:
    """Outside of functions that are being traced.

    `tf.init_scope` also stops the tapes that layers use inside.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    return tf.init_scope()


@contextlib.contextmanager
def tracing_anew() -> Iterator[None]:
    """Inside, each `tf.function` that is called is traced as if never before.

    One that a layer calls holds on to the values that the layer's weights had
    in its first trace: those of another graph, or of another step.
    """
    call = _function_call.original
    clones: dict[int, tuple[Any, Any]] = {}

    def anew(function: Any, *args: Any, **kwargs: Any) -> Any:
        if id(function) not in clones:
            clones[id(function)] = function, function._clone(None)
        return call(clones[id(function)][1], *args, **kwargs)

    with _function_call.by(anew):
        yield


def current_graph() -> Any:
    """The graph that operations are added to, None if they are run."""
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()


def graph_of(tensor: Any) -> Any:
    """The graph of a tensor, None if it has a value."""
    return None if is_eager(tensor) else tensor.graph


def in_control_flow(graph: Any, outside: Any) -> bool:
    """Whether a graph is, or is inside, a branch or a loop's body.

    Args:
        graph: The graph.
        outside: A graph around it, where to stop, or None.
    """
    while graph is not outside and graph is not None:
        if isinstance(graph, _ControlFlowFuncGraph):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def captures_of_strangers(graph: Any) -> list[tf.Tensor]:
    """What a function's graph captures of graphs that are not around it."""
    around = set()
    outer = graph
    while outer is not None:
        outer = getattr(outer, "outer_graph", None)
        around.add(outer)
    return [
        tensor
        for tensor, _ in graph.captures
        if graph_of(tensor) not in (around | {None})
    ]


def in_custom_gradient(thing: Any) -> bool:
    """Whether a function with a gradient of its own reads something.

    It may take it as an argument: then it has a gradient for it.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _custom_gradient.__file__:
            known = frame.f_locals
            if "variable_watcher" in known and not any(
                argument is thing for argument in tf.nest.flatten(known["args"])
            ):
                return True
        frame = frame.f_back
    return False


# ------------------------------------------------------------------ variables
@contextlib.contextmanager
def deferred_variables() -> Iterator[None]:
    """Lets layers build inside without allocating their variables.

    The variables know shape, dtype and initializer, and nothing else, until
    `create_variable` is called on each of them. Keras itself would allocate
    them all on the default device when the outermost scope ends.
    """
    before = list(_global_state.get_global_attribute(_UNINITIALIZED) or [])
    try:
        with (
            seed_generator_kept(),
            keras.StatelessScope(initialize_variables=False),
        ):
            yield
    finally:
        _global_state.set_global_attribute(_UNINITIALIZED, before)


def variables_are_deferred() -> bool:
    """Whether variables that are made now get no storage."""
    return _global_state.get_global_attribute("stateless_scope") is not None


def is_created(variable: keras.Variable) -> bool:
    """Whether the variable has storage."""
    return storage(variable) is not None


def storage(variable: keras.Variable) -> Any:
    """The `tf.Variable` of a variable, or None."""
    return variable._value


def create_variable(variable: keras.Variable) -> None:
    """Allocates a deferred variable on the current device."""
    variable._deferred_initialize()


def move_variable(variable: keras.Variable) -> None:
    """Gives the variable new storage with its value on the current device.

    To be done before an optimizer or a trace knows the old one.
    """
    variable._initialize(tf.identity(variable._value))


# --------------------------------------------------------------------- inputs
def input_layer(item: Any) -> keras.layers.InputLayer | None:
    """An `InputLayer` itself, or that of a `keras.Input`; else None."""
    if isinstance(item, keras.KerasTensor):
        item = getattr(item, "_keras_history", (None,))[0]
    return item if isinstance(item, keras.layers.InputLayer) else None


def input_shape_argument(layer: keras.layers.Layer) -> Any:
    """The `input_shape=` that a layer was given, without the batch; or None."""
    return getattr(layer, "_input_shape_arg", None)


# ---------------------------------------------------------------------- masks
def get_mask(tensor: Any) -> Any:
    """The Keras mask that travels with a tensor, or None."""
    return _backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a Keras mask to a tensor."""
    _backend.set_keras_mask(tensor, mask)


# -------------------------------------------------------- losses and metrics
def build_losses_and_metrics(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any
) -> None:
    """Creates the variables of compiled losses and metrics.

    Args:
        model: The compiled model.
        x: Nest of `keras.KerasTensor`s, as the other arguments.
        y: Labels.
        y_pred: Outputs.
        sample_weight: Weights of the rows.
    """
    metrics, loss = model._compile_metrics, model._compile_loss
    if metrics is not None and not metrics.built:
        _backend.compute_output_spec(
            model.compute_metrics, x, y, y_pred, sample_weight=sample_weight
        )
    if loss is not None and not loss.built:
        _backend.compute_output_spec(loss, y, y_pred, sample_weight)


def compiled_loss(model: keras.Model) -> Any:
    """What `compile(loss=...)` became, or None."""
    return model._compile_loss


def compiled_metrics(model: keras.Model) -> Any:
    """What `compile(metrics=...)` became, or None."""
    return model._compile_metrics


def compute_loss(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    training: bool,
) -> Any:
    """`compute_loss`, also where an override takes no `training`."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """The metric behind `logs["loss"]`."""
    return model._loss_tracker


def flat_losses(compile_loss: Any) -> list[Any]:
    """The `(path, loss, loss_weights, name)` of every output's loss."""
    return compile_loss._flat_losses


@contextlib.contextmanager
def _replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of an object is something else."""
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


@contextlib.contextmanager
def replaced_losses(
    compile_loss: Any, replace: Callable[[int, keras.losses.Loss], Callable]
) -> Iterator[None]:
    """Inside, loss i of a compiled loss is what `replace(i, loss)` returns."""
    losses = [
        entry._replace(loss=replace(i, entry.loss))
        for i, entry in enumerate(compile_loss._flat_losses)
    ]
    with _replaced(compile_loss, "_flat_losses", losses):
        yield


def reduce_weighted_values(
    values: Any, sample_weight: Any, mask: Any, reduction: str, dtype: str
) -> Any:
    """Keras's own weighting, masking and reduction of a loss's values."""
    return _loss.reduce_weighted_values(
        values,
        sample_weight=sample_weight,
        mask=mask,
        reduction=reduction,
        dtype=dtype,
    )


def effective_weights(
    values: Any, sample_weight: Any, mask: Any, reduction: str, dtype: str
) -> Any:
    """The weights by which Keras multiplies a loss's values, or None."""
    if sample_weight is not None:
        sample_weight = keras.ops.convert_to_tensor(sample_weight, dtype=dtype)
    if mask is not None:
        mask = keras.ops.convert_to_tensor(mask, dtype=dtype)
    weights = _loss.apply_mask(
        sample_weight, mask, dtype=values.dtype, reduction=reduction
    )
    if weights is None:
        return None
    return _loss.squeeze_or_expand_to_same_rank(values, weights)[1]


def flat_metrics(compile_metrics: Any) -> list[keras.metrics.Metric]:
    """All metrics of `compile(metrics=..., weighted_metrics=...)`."""
    return list(compile_metrics.metrics)


def metric_calls(
    compile_metrics: Any, y: Any, y_pred: Any, sample_weight: Any
) -> list[tuple[keras.metrics.Metric, Any, Any, Any]]:
    """What every metric would be called with: (metric, y, y_pred, weight).

    Args:
        compile_metrics: All compiled metrics, which are built.
        y: Nest of labels, or of anything that stands for them.
        y_pred: Outputs.
        sample_weight: Weights.
    """
    calls: list[tuple[keras.metrics.Metric, Any, Any, Any]] = []

    class Recorder:
        def __init__(self, metrics: Any) -> None:
            self.metrics = metrics

        def update_state(
            self, y_true: Any, y_pred: Any, sample_weight: Any = None
        ) -> None:
            calls.extend(
                (metric, y_true, y_pred, sample_weight)
                for metric in self.metrics.metrics
            )

    names = ("_flat_metrics", "_flat_weighted_metrics")
    with contextlib.ExitStack() as stack:
        for name in names:
            flat = getattr(compile_metrics, name)
            recorders = [
                Recorder(metrics) if metrics else None for metrics in flat
            ]
            stack.enter_context(_replaced(compile_metrics, name, recorders))
        compile_metrics.update_state(y, y_pred, sample_weight)
    return calls


def output_spec(function: Callable, *specs: Any) -> Any:
    """What a function returns for `keras.KerasTensor`s."""
    return _backend.compute_output_spec(function, *specs)


def metric_function(metric: keras.metrics.Metric) -> Callable | None:
    """The function that a `MeanMetricWrapper` averages, or None."""
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        return metric._fn
    return None


def function_arguments(wrapper: Any) -> dict[str, Any]:
    """The keyword arguments that a wrapped loss or metric passes on."""
    return dict(getattr(wrapper, "_fn_kwargs", {}))


def has_own_call(loss: keras.losses.Loss) -> bool:
    """Whether a loss replaces Keras's weighting and reduction by its own."""
    return type(loss).__call__ is not keras.losses.Loss.__call__


# -------------------------------------------------------- batch normalization
def batch_moments(layer: Any, inputs: Any, mask: Any) -> Any:
    """Mean and variance, as a `BatchNormalization` computes them."""
    return type(layer)._moments(layer, inputs, mask)


def has_own_moments(layer: Any) -> bool:
    """Whether a `BatchNormalization` computes moments in its own way."""
    return type(layer)._moments is not keras.layers.BatchNormalization._moments


@contextlib.contextmanager
def recording_moments(
    layers: list[keras.layers.BatchNormalization],
    record: Callable[[keras.layers.Layer, Any, Any, Any, Any], None],
    compute: Callable[[keras.layers.Layer, Any, Any], Any] = batch_moments,
) -> Iterator[None]:
    """Inside, `BatchNormalization`s tell their moments.

    Args:
        layers: The layers.
        record: Called as `record(layer, inputs, mask, mean, variance)` with
            what a layer normalises by, call by call.
        compute: Called as `compute(layer, inputs, mask)` for mean and variance.
    """

    def wrap(layer: Any) -> Callable:
        def moments(inputs: Any, mask: Any) -> Any:
            mean, variance = compute(layer, inputs, mask)
            record(layer, inputs, mask, mean, variance)
            return mean, variance

        return moments

    for layer in layers:
        object.__setattr__(layer, "_moments", wrap(layer))
    try:
        yield
    finally:
        for layer in layers:
            object.__delattr__(layer, "_moments")


# ------------------------------------------------------------------ optimizer
@contextlib.contextmanager
def without_all_reduce(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, the optimizer does not reduce gradients over replicas.

    Keras wraps all gradients into one operation for that, which would drag
    every gradient of every cell through one device.
    """
    with contextlib.ExitStack() as stack:
        for o in with_inner(optimizer):
            stack.enter_context(
                replaced_method(
                    o, "_all_reduce_sum_gradients", lambda pairs: pairs
                )
            )
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


@contextlib.contextmanager
def replaced_method(thing: Any, name: str, function: Any) -> Iterator[None]:
    """Inside, an object's method is this function."""
    object.__setattr__(thing, name, function)
    try:
        yield
    finally:
        object.__delattr__(thing, name)


def slots(optimizer: Any, variable: keras.Variable) -> list[keras.Variable]:
    """What an optimizer keeps for a variable."""
    index = optimizer._get_variable_index(variable)
    return [own[index] for own in _slot_lists(optimizer)]


def shared_variables(optimizer: Any) -> list[keras.Variable]:
    """What an optimizer keeps for all variables together."""
    kept = {id(v) for own in _slot_lists(optimizer) for v in own}
    return [v for v in optimizer.variables if id(v) not in kept]


def _slot_lists(optimizer: Any) -> list[list[keras.Variable]]:
    """The optimizer's lists of one variable for each trainable variable."""
    number = len(optimizer._trainable_variables)
    return [
        value
        for name, value in vars(optimizer).items()
        if name not in ("_variables", "_trainable_variables")
        and isinstance(value, list)
        and len(value) == number
        and all(isinstance(v, keras.Variable) for v in value)
    ]


@contextlib.contextmanager
def updating_in_scope(
    optimizer: Any, variable: keras.Variable, scope: Any
) -> Iterator[None]:
    """Inside, an optimizer may update a variable in a `StatelessScope`."""
    index = optimizer._get_variable_index(variable)

    def assign(variable: Any, value: Any) -> None:
        scope.add_update((variable, tf.cast(value, variable.dtype)))

    def assign_add(variable: Any, value: Any) -> None:
        value = tf.cast(value, variable.dtype)
        scope.add_update((variable, scope.get_current_value(variable) + value))

    def assign_sub(variable: Any, value: Any) -> None:
        value = tf.cast(value, variable.dtype)
        scope.add_update((variable, scope.get_current_value(variable) - value))

    with contextlib.ExitStack() as stack:
        for function in (assign, assign_add, assign_sub):
            stack.enter_context(
                replaced_method(optimizer, function.__name__, function)
            )
        stack.enter_context(
            replaced_method(optimizer, "_get_variable_index", lambda _: index)
        )
        with scope:
            yield


# -------------------------------------------------------------------- tracing
def keep(function: Any, thing: Any) -> None:
    """Keeps an object for as long as a traced function can be called.

    TensorFlow forgets functions that no Python object refers to, also those
    that others call by name.
    """
    function.graph.tfgpipe_keeps = thing


def share_rendezvous(function: Any) -> None:
    """Has a `tf.function` exchange tensors where its caller does.

    Then what fails in it also ends what its caller waits for. Otherwise that
    is only cancelled, and may hide the error: the first one on a device counts.
    Two calls must not run on one device at the same time: where they leave it,
    for an operation that it does not have, they take each other's tensors.
    """
    function._shared_rendezvous = True


def analysis_stopper() -> tf.Operation:
    """An operation after which TensorFlow's passes for XLA stop looking.

    They look for variables of the old kind, and build the body of every called
    function twice for that, call by call: with hundreds of calls of large
    functions, most of the time until the first step. This is such a variable,
    never written or read. What depends on it is known to, and left alone.
    """
    graph = tf.compat.v1.get_default_graph()
    with tf.device("CPU:0"):
        return graph.create_op(
            "VariableV2",
            [],
            [tf.float32._as_ref],
            attrs={
                "shape": _Attribute(shape=tf.TensorShape([]).as_proto()),
                "dtype": _Attribute(type=tf.float32.as_datatype_enum),
                "container": _Attribute(s=b""),
                "shared_name": _Attribute(s=b""),
            },
        )


class Call:
    """Calls a traced function with flat arguments.

    As `function(*arguments)` does, which takes several times as long to trace.

    Args:
        function: A concrete function that takes and returns flat tensors.
        as_written: Whether to keep TensorFlow's graph optimiser off. It
            regroups sums, and does it differently where another operation
            follows.
    """

    def __init__(self, function: Any, as_written: bool):
        self._function = function
        self._dtypes = [t.dtype for t in function.outputs]
        self._shapes = [t.shape for t in function.outputs]
        stateful = any(
            is_stateful(op.type) for op in function.graph.get_operations()
        )
        self._op_type = ("Stateful" if stateful else "") + "PartitionedCall"
        config = tf.compat.v1.ConfigProto()
        if as_written:
            options = config.graph_options.rewrite_options
            options.disable_meta_optimizer = True
        self._attributes = {
            "Tin": _types(function.inputs),
            "Tout": _types(function.outputs),
            "f": _Attribute(func=_NameAttrList(name=function.name)),
            "config_proto": _Attribute(s=config.SerializeToString()),
            # Else TensorFlow goes through the function for every call.
            "_disable_call_shape_inference": _Attribute(b=True),
        }
        if function.function_def.attr[_IS_COMPILED].b:
            self._attributes[_IS_COMPILED] = _Attribute(b=True)

    def __call__(self, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
        """Adds the call to the current graph."""
        graph = tf.compat.v1.get_default_graph()
        self._function.add_to_graph(graph)
        op = graph.create_op(
            self._op_type, arguments, self._dtypes, attrs=self._attributes
        )
        for tensor, shape in zip(op.outputs, self._shapes):
            tensor.set_shape(shape)
        return list(op.outputs)


def _types(tensors: list[tf.Tensor]) -> Any:
    types = [t.dtype.as_datatype_enum for t in tensors]
    return _Attribute(list=_Attribute.ListValue(type=types))


@contextlib.contextmanager
def in_xla() -> Iterator[None]:
    """Inside, operations are made for XLA, as by `jit_compile=True`."""
    context = _control_flow_ops.XLAControlFlowContext()
    try:
        context.Enter()
        yield
    finally:
        context.Exit()


@contextlib.contextmanager
def differentiating_within(names: set[str]) -> Iterator[None]:
    """Inside, `tf.gradients` looks at the graph's operations of these names.

    Else it goes through all that follows from the sources, in every call. The
    graphs of loops' bodies and of other functions are gone through as always.
    """
    graph = tf.compat.v1.get_default_graph()

    def within(*arguments: Any) -> list[tf.Operation]:
        return [
            op
            for op in _consumers.original(*arguments)
            if op.graph is not graph or op.name in names
        ]

    with _consumers.by(within):
        yield


def run_independently(op: tf.Operation) -> None:
    """Takes an operation out of TensorFlow's automatic control dependencies.

    They would run everything stateful of a function one after the other.
    """
    graph = op.graph
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(op)


class OuterTensors:
    """What functions' graphs have captured, by the graphs' own tensors."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def of(self, tensor: tf.Tensor) -> Any:
        """What a graph captured as this placeholder, or None."""
        if id(tensor) not in self._known:
            captures = getattr(tensor.graph, "captures", ())
            self._known.update({id(own): outer for outer, own in captures})
        return self._known.get(id(tensor))


def is_eager(tensor: Any) -> bool:
    """Whether a tensor has a value already."""
    return isinstance(tensor, tf.__internal__.EagerTensor)


# --------------------------------------------------------------------- layers
class SymbolicCall(NamedTuple):
    """A call of a layer, or of an operation, on `keras.KerasTensor`s.

    Attributes:
        operation: What was called.
        inputs: The tensors it took.
        outputs: Those it returned.
    """

    operation: Any
    inputs: list[Any]
    outputs: list[Any]


def symbolic_calls(layer: keras.layers.Layer) -> list[SymbolicCall]:
    """The calls of a layer in Keras's graphs of layers."""
    return _calls(layer._inbound_nodes)


def calls_on(layer: keras.layers.Layer) -> list[SymbolicCall]:
    """The calls of layers and operations on a layer's symbolic outputs."""
    return _calls(layer._outbound_nodes)


def _calls(nodes: list[Any]) -> list[SymbolicCall]:
    return [
        SymbolicCall(node.operation, node.input_tensors, node.outputs)
        for node in nodes
        if not hasattr(node, _IN_NO_GRAPH)
    ]


def producer(tensor: keras.KerasTensor) -> Any:
    """The layer or operation that a symbolic tensor comes from, or None."""
    history = getattr(tensor, "_keras_history", None)
    return None if history is None else history.operation


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


def remat_mode(layer: keras.layers.Layer) -> Any:
    """The mode of the `keras.RematScope` that a layer was made in, or None."""
    return getattr(layer, "_remat_mode", None)


# What Keras and TensorFlow note about a layer, or derive from its class.
NOTES_ON_LAYERS = set(
    "_auto_config _build_shapes_dict _call_context_args _call_has_context_arg "
    "_call_has_mask_arg _call_has_training_arg _call_signature _called "
    "_inbound_nodes _input_spec _lock _loss_ids _losses _losses_override "
    "_outbound_nodes _parent_path _path _saved_model_arg_spec "
    "_saved_model_inputs_spec _self_name_based_restores "
    "_self_saveable_object_factories _self_setattr_tracking "
    "_self_unconditional_checkpoint_dependencies "
    "_self_unconditional_deferred_dependencies "
    "_self_unconditional_dependency_names _self_update_uid _tracked _tracker "
    "build built call_signature_parameters name quantize".split()
)


def own_attributes(thing: Any) -> dict[str, Any]:
    """The attributes of an object of Keras that its code may depend on.

    Without its name, and without what is noted about a layer.
    """
    skipped = {"name", "_name"}
    if isinstance(thing, keras.layers.Layer):
        skipped = NOTES_ON_LAYERS
    elif isinstance(thing, keras.random.SeedGenerator):
        skipped = {"name", "_initial_seed"}  # the state is a variable
    return {k: v for k, v in vars(thing).items() if k not in skipped}


def autocasts(variable: keras.Variable) -> bool:
    """Whether a layer's policy casts the variable."""
    return variable._autocast


# ---------------------------------------------------------------------- names
def is_keras(thing: Any) -> bool:
    """Whether Keras defines a class or function."""
    return getattr(thing, "__module__", "").startswith("keras.src.")


# ----------------------------------------------------------------- operations
def is_stateful(op_type: str) -> bool:
    """Whether operations of a type have side effects."""
    op_def = _op_def_registry.get(op_type)
    return op_def is not None and op_def.is_stateful


def takes_functions(op_type: str) -> bool:
    """Whether operations of a type call functions that they name."""
    op_def = _op_def_registry.get(op_type)
    return op_def is not None and any("func" in a.type for a in op_def.attr)


def function_graph(op: tf.Operation, name: str) -> tf.Graph:
    """The graph of a function that an operation calls by its name."""
    return op.graph._get_function(name).graph


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
            _global_state.set_global_attribute(
                _UNINITIALIZED, [v for v in waiting if v is not made.state]
            )


# ---------------------------------------------------------------------- steps
def element_spec(epoch_iterator: Any) -> Any:
    """The structure of `tf.TensorSpec` that an epoch's dataset yields."""
    return epoch_iterator._get_iterator().element_spec


class BuiltBeforeTracing(keras.Model):
    """A model that is told of its data before Keras traces a step."""

    def build_for(self, data: Any) -> None:
        """Called with what a step will get, or its `tf.TensorSpec`s."""

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        if data_batch is None:
            data_batch = element_spec(iterator)
        self.build_for(data_batch)


# ----------------------------------------------------------------- strategies
class SingleReplicaStrategy(tf.distribute.Strategy):
    """A strategy under which variables, data and steps are as without one.

    What is made in its scope can be used outside of it, and the reverse.
    """

    def __init__(self) -> None:
        super().__init__(_SingleReplicaExtended(self))


class _SingleReplicaExtended(_distribute_lib._DefaultDistributionExtended):
    """TensorFlow's default strategy, with a scope of its own."""

    def _scope(self, strategy: Any) -> Any:
        return _in_scope(strategy)

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        return tf.device(colocate_with_variable.device)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with without_strategy():
            return fn(*args, **kwargs)


@contextlib.contextmanager
def _in_scope(strategy: tf.distribute.Strategy) -> Iterator[Any]:
    current = tf.distribute.get_strategy()
    if tf.distribute.has_strategy() and current is not strategy:
        raise RuntimeError(
            "A `tf.distribute` strategy must not be entered in the scope of "
            f"another. Received: {strategy} in the scope of {current}. Leave "
            "that one first."
        )
    with _thread_mode(_distribute_lib._CrossReplicaThreadMode(strategy)):
        yield strategy


def without_strategy() -> Any:
    """Inside, no strategy is in scope. A context manager."""
    return _thread_mode(_distribute_lib._get_default_replica_mode())


@contextlib.contextmanager
def _thread_mode(mode: Any) -> Iterator[None]:
    stack = tf.compat.v1.get_default_graph()._distribution_strategy_stack
    stack.append(mode)
    try:
        yield
    finally:
        stack.pop()
