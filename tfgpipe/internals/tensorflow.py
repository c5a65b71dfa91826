"""Every private name of TensorFlow that tfgpipe uses.

`test_internals.py` has a test for each function here, which fails when a new
version moves what the function needs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue as _Attribute
from tensorflow.core.framework.attr_value_pb2 import (
    NameAttrList as _NameAttrList,
)
from tensorflow.python import pywrap_tfe as _pywrap_tfe
from tensorflow.python.client import pywrap_tf_session as _pywrap_tf_session
from tensorflow.python.distribute import distribute_lib as _distribute_lib
from tensorflow.python.eager import backprop as _backprop
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import execute as _execute
from tensorflow.python.eager import record as _record
from tensorflow.python.eager.polymorphic_function.polymorphic_function import (
    Function as _Function,
)
from tensorflow.python.framework import importer as _importer
from tensorflow.python.framework import kernels as _kernels
from tensorflow.python.framework import op_def_registry as _op_def_registry
from tensorflow.python.framework.auto_control_deps_utils import (
    READ_ONLY_RESOURCE_INPUTS_ATTR as _READ_INPUTS,
)
from tensorflow.python.framework.auto_control_deps_utils import (
    RESOURCE_READ_OPS as _RESOURCE_READS,
)
from tensorflow.python.framework.function_def_to_graph import (
    function_def_to_graph as _function_def_to_graph,
)
from tensorflow.python.ops import control_flow_ops as _control_flow_ops
from tensorflow.python.ops import custom_gradient as _custom_gradient
from tensorflow.python.ops import stateful_random_ops as _random_ops
from tensorflow.python.ops.control_flow_util import (
    GraphOrParentsInXlaContext as _in_xla_context,
)
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    ControlFlowFuncGraph as _ControlFlowFuncGraph,
)

_IS_COMPILED = "_XlaMustCompile"


class Replaceable:
    """A function that a thread may replace for itself.

    While a thread does so, a dispatcher stands in for the function. All other
    threads are led to the original, which is back when the last thread leaves:
    what was there when the first one came.

    Attributes:
        original: The function.
    """

    def __init__(self, owner: Any, name: str):
        self._owner = owner
        self._name = name
        self.original: Callable = getattr(owner, name)
        self._lock = threading.Lock()
        self._num_inside = 0
        self._of_thread = threading.local()

    @property
    def current(self) -> Callable:
        """Returns what this thread calls now."""
        return getattr(self._of_thread, "function", None) or self.original

    @contextlib.contextmanager
    def by(self, function: Callable) -> Iterator[None]:
        """Inside, this thread calls another function."""
        before = getattr(self._of_thread, "function", None)
        with self._lock:
            if self._num_inside == 0:
                self.original = getattr(self._owner, self._name)

                @functools.wraps(self.original)
                def dispatch(*args: object, **kwargs: object) -> Any:
                    return self.current(*args, **kwargs)

                setattr(self._owner, self._name, dispatch)
            self._num_inside += 1
        self._of_thread.function = function
        try:
            yield
        finally:
            self._of_thread.function = before
            with self._lock:
                self._num_inside -= 1
                if self._num_inside == 0:
                    setattr(self._owner, self._name, self.original)


_function_call = Replaceable(_Function, "__call__")
_record_gradient = Replaceable(_execute, "record_gradient")
_record_operation = Replaceable(_record, "record_operation")


# --------------------------------------------------------------- tf.functions
@contextlib.contextmanager
def outside_functions() -> Iterator[None]:
    """Outside of functions that are being traced.

    `tf.init_scope` also stops the tapes that layers use inside. Variables that
    are made here are no affair of the functions, which would be traced a second
    time, to see that they make no more.
    """
    if tf.executing_eagerly():
        yield
        return
    with tf.init_scope():
        graph = outermost = tf.compat.v1.get_default_graph()
        while hasattr(outermost, "outer_graph"):
            outermost = outermost.outer_graph
        own = graph._variable_creator_stack
        graph._variable_creator_stack = outermost._variable_creator_stack
        try:
            yield
        finally:
            graph._variable_creator_stack = own


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Inside, tapes record, also where `tf.init_scope` has stopped them."""
    is_stopped = _pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if is_stopped:
        _pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        if is_stopped:
            _pywrap_tfe.TFE_Py_TapeSetStopOnThread()


@contextlib.contextmanager
def tracing_anew() -> Iterator[None]:
    """Inside, each `tf.function` that is called is traced as if never before.

    One that a layer calls holds on to the values that the layer's weights had
    in its first trace: those of another graph, or of another step. So a clone
    is called in its place, one for each function, and forgotten at the end:

        layer.call -> self.f(x)      f: traced for good, reads w of cell 0
                   -> clone(f)(x)    traced here, reads what w is here
    """
    call = _function_call.original
    clones: dict[int, tuple[Any, Any]] = {}

    def anew(function: Any, *args: object, **kwargs: object) -> Any:
        if id(function) not in clones:
            clones[id(function)] = function, function._clone(None)
        return call(clones[id(function)][1], *args, **kwargs)

    with _function_call.by(anew):
        yield


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Afterwards TensorFlow draws the numbers that it would have drawn.

    An operation that draws is made once for each seed, and goes on where it
    has stopped: those that are made inside are forgotten.
    """
    context = _context.context()
    numbers = getattr(context, "_rng", None)  # None: they are never the same
    before = None if numbers is None else numbers.getstate()
    generator = _random_ops.global_generator
    state = None if generator is None else generator.state.numpy()
    try:
        yield
    finally:
        if numbers is not None and numbers.getstate() != before:
            numbers.setstate(before)
            context.clear_kernel_cache()
        if generator is not None:
            generator.state.assign(state)


# ------------------------------------------------------------------------ tapes
_noted = threading.local()


@contextlib.contextmanager
def noting_gradients(
    graph: tf.Graph,
) -> Iterator[list[tuple[str | None, int, int]]]:
    """Inside, notes what tapes add to a graph, operation by operation.

    Yields:
        The notes so far: the name of the differentiated operation, None where
        it was not recorded inside of `naming_on_tapes`, and how many operations
        the graph had before and after. Of nested ones the inner one comes
        first. Where one fails, the last is of the operation that was
        differentiated.
    """
    _note_gradients()
    _noted.graph, _noted.notes = graph, []
    try:
        yield _noted.notes
    finally:
        del _noted.graph, _noted.notes


@functools.cache
def _note_gradients() -> None:
    """Has the tapes of this process ask `gradient`, once for all."""

    def gradient(kind: str, attributes: Any, *others: Any) -> Any:
        with _noting(getattr(attributes, "name", None)):
            return _backprop._gradient_function(kind, attributes, *others)

    _pywrap_tfe.TFE_Py_RegisterGradientFunction(gradient)


@contextlib.contextmanager
def _noting(name: str | None) -> Iterator[None]:
    """Notes what is added to the graph that is looked at, if it is here."""
    graph = getattr(_noted, "graph", None)
    if graph is None or current_graph() is not graph:
        yield
        return
    start = graph.num_operations()
    try:
        yield
    finally:
        _noted.notes.append((name, start, graph.num_operations()))


class _Attributes(tuple):
    """Those of an operation on a tape, with its name."""

    name: str | None


@contextlib.contextmanager
def naming_on_tapes() -> Iterator[None]:
    """Inside, tapes note which operation of a graph they will differentiate."""

    def name_of(outputs: Any) -> str | None:
        for tensor in outputs or ():
            if isinstance(tensor, tf.Tensor) and not is_eager(tensor):
                return tensor.op.name
        return None

    def record(kind: str, inputs: Any, attributes: Any, outputs: Any) -> None:
        named = _Attributes(attributes or ())
        named.name = name_of(outputs)
        _record_gradient.original(kind, inputs, named, outputs)

    # Of gradients that are functions in Python, as of `tf.custom_gradient`.
    def record_own(
        op_type: str,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Callable,
        forward_function: Any = None,
    ) -> None:
        name = name_of(output_tensors)

        def noted(*gradients: Any) -> Any:
            with _noting(name):
                return backward_function(*gradients)

        _record_operation.original(
            op_type, output_tensors, input_tensors, noted, forward_function
        )

    with _record_gradient.by(record), _record_operation.by(record_own):
        yield


def current_graph() -> Any:
    """The graph that operations are added to, None if they are run."""
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()


def graph_of(tensor: Any) -> Any:
    """The graph of a tensor, None if it has a value."""
    return None if is_eager(tensor) else tensor.graph


def in_control_flow(graph: tf.Graph, outside: Any) -> bool:
    """Returns whether a graph is, or is inside, a branch or a loop's body.

    Up to a graph around it, `outside`, if that is not None.
    """
    while graph is not outside and graph is not None:
        if isinstance(graph, _ControlFlowFuncGraph):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def captures_of_strangers(graph: tf.Graph) -> list[tf.Tensor]:
    """What a function's graph captures of graphs that are not around it."""
    around = {None}
    outer = graph
    while outer is not None:
        outer = getattr(outer, "outer_graph", None)
        around.add(outer)
    return [t for t, _ in graph.captures if graph_of(t) not in around]


# Returns whether a gradient tape records what is computed now.
tapes_are_recording = _record.could_possibly_record
# Inside, no gradient tape records, nor one that is made there.
not_recording = _record.stop_recording
# The `DeviceAssignment` with which a TPU's strategy was made, or None.
device_assignment = operator.attrgetter("extended._device_assignment")


def refuse_tapes(
    results: Sequence[tf.Tensor],
    sources: Sequence[tf.Tensor],
    refuse: Callable[..., object],
) -> None:
    """Has tapes that differentiate results call a function, which raises.

    They follow from `sources`, tensors and `tf.Variable`s, and no tape has seen
    them.
    """
    variables = [s for s in sources if isinstance(s, tf.Variable)]
    for variable in variables:
        _pywrap_tfe.TFE_Py_TapeVariableAccessed(variable)
    tensors = [s.handle if isinstance(s, tf.Variable) else s for s in sources]
    _record.record_operation("Refused", [*results], tensors, refuse)


def in_custom_gradient(thing: object) -> bool:
    """Returns whether a function with a gradient of its own reads something.

    It may take it as an argument: then it has a gradient for it.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_filename == _custom_gradient.__file__:
            known = frame.f_locals
            if "variable_watcher" in known and not any(
                argument is thing for argument in tf.nest.flatten(known["args"])
            ):
                return True
    return False


# ------------------------------------------------------------------- variables
def move_storage(variable: tf.Variable, moved: tf.Variable) -> None:
    """Gives a variable the storage of another one, which is no more used."""
    variable._handle = moved._handle


# -------------------------------------------------------------------- tracing
def keep(function: Any, thing: object) -> None:
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


class FunctionCall:
    """Calls a traced function with flat arguments.

    As `function(*arguments)` does, which takes several times as long to trace.
    TensorFlow's graph optimiser is off: it regroups sums, and does it
    differently where another operation follows.
    """

    def __init__(self, function: Any):
        self._function = function
        self._dtypes = [t.dtype for t in function.outputs]
        self._shapes = [t.shape for t in function.outputs]
        operations = function.graph.get_operations()
        self._op_type = "PartitionedCall"
        if any(is_stateful(op.type) for op in operations):
            self._op_type = "StatefulPartitionedCall"
        self._attributes = {
            "Tin": _types(function.inputs),
            "Tout": _types(function.outputs),
            "f": _Attribute(func=_NameAttrList(name=function.name)),
            "config_proto": _Attribute(s=_as_written()),
            # Else TensorFlow goes through the function for every call.
            "_disable_call_shape_inference": _Attribute(b=True),
        }
        read = [
            i
            for i, tensor in enumerate(function.inputs)
            if tensor.dtype == tf.resource and is_only_read(tensor)
        ]
        if read:
            self._attributes[_READ_INPUTS] = _Attribute(
                list=_Attribute.ListValue(i=read)
            )
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


@functools.cache
def _as_written() -> bytes:
    """The configuration that keeps TensorFlow's graph optimiser off."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return bytes(config.SerializeToString())


_near = Replaceable(_importer, "_GetColocationNames")


def import_definition(
    definition: tf.compat.v1.GraphDef,
    given: dict[str, tf.Tensor],
    names: Sequence[str] = (),
) -> list[tf.Tensor]:
    """Imports a graph into the current one; returns tensors of these names.

    No operation is to be near others: looking for those takes longer than all
    else, as TensorFlow finds none by an error for each.
    """
    with _near.by(lambda op: []):
        return tf.graph_util.import_graph_def(
            definition, given, return_elements=list(names), name=""
        )


def put_on(op: tf.Operation, device: str) -> None:
    """Has an operation of a graph run on a device; "" for any."""
    if device:
        spec = tf.DeviceSpec.from_string("/" + device.lstrip("/"))
        device = spec.to_string()
    op._set_device(device)


class GraphFunction:
    """A function of some tensors of a graph: what others come to.

    It is called outside of graphs. No Python goes through its operations, which
    a function that is made in Python does. `inputs` are any tensors of the
    graph, whatever makes them, and `outputs` others.
    """

    def __init__(
        self, graph: tf.Graph, inputs: list[tf.Tensor], outputs: list[tf.Tensor]
    ):
        self._graph = graph
        self._dtypes = [t.dtype for t in outputs]
        taken = {t.ref() for t in inputs}
        needed = ancestors(outputs, lambda t: t.ref() in taken, lambda _: True)
        operations = [op for op in graph.get_operations() if op.name in needed]
        self._call = tf.raw_ops.PartitionedCall
        if any(is_stateful(op.type) for op in operations):
            self._call = tf.raw_ops.StatefulPartitionedCall
        self._name = f"__tried_{next(_numbers)}"
        context = _context.context()
        with graph._c_graph.get() as c_graph:
            made = _pywrap_tf_session.TF_GraphToFunction_wrapper(
                c_graph,
                self._name,
                False,
                [op._c_op for op in operations],
                [t._as_tf_output() for t in inputs],
                [t._as_tf_output() for t in outputs],
                [],
                [],
                [],
                None,
                "",
            )
        context.ensure_initialized()
        context.add_c_function(made)
        _pywrap_tf_session.TF_DeleteFunction(made)
        weakref.finalize(self, context.remove_function, self._name)

    def __call__(self, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
        """Runs it."""
        results = self._call(
            args=arguments,
            Tout=self._dtypes,
            f=self._name,
            config_proto=_as_written(),
        )
        return list(results)


_numbers = itertools.count()


def ancestors(
    tensors: Iterable[tf.Tensor],
    stop: Callable[[tf.Tensor], bool] = lambda _: False,
    controls: Callable[[tf.Operation], bool] = lambda _: False,
    effects: Iterable[tf.Operation] = (),
) -> dict[str, tf.Operation]:
    """Returns the operations from which tensors follow, by their names.

    Tensors at which `stop` is true are not followed; control inputs are where
    `controls` is true. `effects` are followed besides.
    """
    operations: dict[str, tf.Operation] = {}
    waiting = [*(t.op for t in tensors if not stop(t)), *effects]
    while waiting:
        op = waiting.pop()
        if op.name not in operations:
            operations[op.name] = op
            waiting += [t.op for t in op.inputs if not stop(t)]
            waiting += filter(controls, op.control_inputs)
    return operations


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


def is_in_xla() -> bool:
    """Returns whether operations are made for XLA, as by `jit_compile=True`."""
    graph = current_graph()
    return graph is not None and _in_xla_context(graph)


def xla_refusal(
    function: Callable, specs: Sequence[tf.TensorSpec]
) -> str | None:
    """Returns why XLA cannot translate a function, or None if it can.

    Nothing is compiled, and nothing runs. None also for a function that does
    not take the sizes in `specs`, all of which must be known.
    """
    made = tf.function(function, autograph=False, jit_compile=True)
    try:
        made.get_concrete_function(*specs)
    except (ValueError, TypeError, tf.errors.OpError):
        return None
    try:
        made.experimental_get_compiler_ir(*specs)(stage="hlo_serialized")
    except (ValueError, tf.errors.OpError) as error:
        return str(error)
    return None


@functools.cache
def has_xla_kernel(operation_type: str) -> bool:
    """Returns whether XLA has a kernel for an operation, on some device."""
    _start_xla()
    kernels = _kernels.get_registered_kernels_for_op(operation_type).kernel
    return any(one.device_type.startswith("XLA") for one in kernels)


@functools.cache
def _start_xla() -> None:
    """Compiles a function, before which XLA registers no kernels."""
    with tf.init_scope(), tf.device("CPU:0"):
        tf.function(lambda x: x + 1, jit_compile=True)(tf.constant(0))


def run_independently(op: tf.Operation) -> None:
    """Takes an operation out of TensorFlow's automatic control dependencies.

    They would run everything stateful of a function one after the other. What
    takes a resource keeps its place among the other uses of that resource.
    """
    if any(t.dtype == tf.resource for t in op.inputs):
        return
    graph = op.graph
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(op)


def is_eager(tensor: object) -> bool:
    """Returns whether a tensor has a value already."""
    return isinstance(tensor, tf.__internal__.EagerTensor)


# ----------------------------------------------------------------- operations
def is_stateful(op_type: str) -> bool:
    """Returns whether operations of a type have side effects."""
    op_def = _op_def_registry.get(op_type)
    return op_def is not None and op_def.is_stateful


# What only reads a resource: a variable, a table.
READS = frozenset(_RESOURCE_READS) | {
    "LookupTableExportV2",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "VarIsInitializedOp",
}


def is_only_read(resource: tf.Tensor) -> bool:
    """Returns whether all that takes a resource, in its graph, reads it."""
    return all(_only_reads(op, resource) for op in resource.consumers())


def _only_reads(op: tf.Operation, resource: tf.Tensor) -> bool:
    if op.type in READS:
        return True
    if _READ_INPUTS not in op.node_def.attr:
        return False
    read = op.get_attr(_READ_INPUTS)
    return all(
        i in read for i, tensor in enumerate(op.inputs) if tensor is resource
    )


def takes_functions(op_type: str) -> bool:
    """Returns whether operations of a type call functions that they name."""
    op_def = _op_def_registry.get(op_type)
    return op_def is not None and any("func" in a.type for a in op_def.attr)


def function_graph(op: tf.Operation, name: str) -> tf.Graph:
    """The graph of a function that an operation calls by its name."""
    function = op.graph._get_function(name)
    if hasattr(function, "graph"):
        return function.graph
    # Of an imported graph, which knows names and definitions alone.
    return _function_def_to_graph(_context.context().get_function_def(name))


# ----------------------------------------------------------------- strategies
class SingleReplicaStrategy(tf.distribute.Strategy):
    """A strategy under which variables, data and steps are as without one.

    What is made in its scope can be used outside of it, and the reverse.
    """

    def __init__(self) -> None:
        super().__init__(_SingleReplicaExtended(self))


class _SingleReplicaExtended(_distribute_lib._DefaultDistributionExtended):
    """TensorFlow's default strategy, with a scope of its own."""

    @contextlib.contextmanager
    def _scope(self, strategy: tf.distribute.Strategy) -> Iterator[Any]:
        current = tf.distribute.get_strategy()
        if tf.distribute.has_strategy() and current is not strategy:
            raise RuntimeError(
                "A `tf.distribute` strategy must not be entered in the scope of"
                f" another. Received: {strategy} in the scope of {current}."
            )
        with _thread_mode(_distribute_lib._CrossReplicaThreadMode(strategy)):
            yield strategy

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        return tf.device(colocate_with_variable.device)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with without_strategy():
            return fn(*args, **kwargs)


def without_strategy() -> contextlib.AbstractContextManager[None]:
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
