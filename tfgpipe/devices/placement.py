"""Puts variables, operations and layers on the devices of their cells.

Each layer has a home, the device of its weights, on which it computes also
outside of pipelines: in the user's model, in models inside of it, and when a
task of KerasHub generates:

    task.generate -> backbone.layer(x)    tf.device(home of layer): call(x)
    model.predict -> ... the same

Tensors go to the layers, and weights stay. Variables that a layer adds later,
by `enable_lora` or `quantize`, are created at home, too. Homes do not count in
the steps of a pipeline, and in other scopes that replace values of variables.

XLA compiles a function for one device: a model whose layers are on several is
not compiled, which Keras would do by itself wherever there is a GPU.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import names as names_lib
from tfgpipe.devices.names import accelerators, same_device

# Operations that run others, or are needed wherever they are used.
_ANYWHERE = {
    "Const",
    "If",
    "Pack",
    "PartitionedCall",
    "Placeholder",
    "StatefulPartitionedCall",
    "StatelessIf",
    "StatelessWhile",
    "While",
}

_PLACED_BY = "tfgpipe_placed_by"  # an attribute of variables
_homes_are_left: list[bool] = []
_PIECE = 2**22  # bytes that are on their way to a device at once


def tensor_bytes(tensor: tf.Tensor | keras.Variable) -> int:
    """Returns the bytes of a tensor or variable; unknown sizes count as 1.

    Resources and variants have none.
    """
    dtype = tf.as_dtype(tensor.dtype)
    if dtype in (tf.resource, tf.variant):
        return 0
    sizes = tf.TensorShape(tensor.shape)
    known = [1 if n is None else n for n in sizes] if sizes.rank else []
    return dtype.size * math.prod(known)


def create_or_move(variables: list[keras.Variable], device: str) -> None:
    """Creates variables on a device, or moves them there.

    To be called before an optimizer is built and anything is traced. A device
    that only compiles would draw other initial values than Keras, so its host
    draws them.
    """
    is_compiled = names_lib.only_compiles([device])
    host = names_lib.host_of(device) if is_compiled else None
    with tf.init_scope(), tf.device(device):
        for variable in variables:
            if not internals.is_created(variable):
                internals.create_variable(variable, host)
            elif _is_mirrored(internals.storage(variable)) or not same_device(
                variable.value.device, device
            ):
                internals.move_variable(variable)


def _is_mirrored(storage: tf.Variable) -> bool:
    """Returns whether another strategy has made a copy for each device."""
    return isinstance(storage, tf.distribute.DistributedValues)


def assign_in_pieces(variable: keras.Variable, value: Any) -> None:
    """Assigns a value, a few rows at a time.

    A value that is sent to a device is in memory several times, most of all on
    its way to other processes.
    """

    def read(rows: slice) -> tf.Tensor:
        return keras.ops.convert_to_tensor(value[rows], variable.dtype)

    has_rows = tuple(getattr(value, "shape", ())) == tuple(variable.shape)
    storage = internals.storage(variable)
    if not (has_rows and assign_rows(storage, read)):
        with tf.device("CPU:0"):  # in the host's memory, before it goes on
            variable.assign(value)


def assign_rows(
    storage: tf.Variable, read: Callable[[slice], tf.Tensor]
) -> bool:
    """Assigns the rows that `read` returns, a few at a time.

    Or returns False: for small variables, and those that a strategy copies.
    """
    num_rows = storage.shape[0] if storage.shape.rank else 1
    size = tensor_bytes(storage)
    if _is_mirrored(storage) or num_rows == 1 or size <= _PIECE:
        return False
    some = max(1, _PIECE * num_rows // size)
    for first in range(0, num_rows, some):
        rows = slice(first, min(first + some, num_rows))
        with tf.device("CPU:0"):
            piece = read(rows)
        with tf.device(storage.device):
            tf.raw_ops.ResourceStridedSliceAssign(
                ref=storage.handle,
                begin=[rows.start],
                end=[rows.stop],
                strides=[1],
                value=piece,
            )
            # Another process takes it when it comes to it; the host has it
            # until then.
            tf.raw_ops.VariableShape(input=storage.handle).numpy()
    return True


class Storage:
    """The storage of the variables of a model's layers.

    Traces and the optimizer know a variable by its storage. Another model of
    the same layers makes new storage if it needs them on other devices.

    Attributes:
        known: The ids of the variables.
    """

    def __init__(self, model: str, layers: Iterable[keras.layers.Layer]):
        self._model = model
        self._held = [
            (layer.name, variable, internals.storage(variable).handle)
            for layer in layers
            for variable in layer.variables
        ]
        for _, variable, _ in self._held:
            internals.note_variable(variable)
            setattr(variable, _PLACED_BY, model)
        self.known = {id(variable) for _, variable, _ in self._held}

    def check(self) -> None:
        """Refuses to go on after another model has moved a layer."""
        for layer, variable, before in self._held:
            if internals.storage(variable).handle is before:
                continue
            raise ValueError(
                f"The layers of model '{self._model}' must stay where it put "
                f"them. Received: layer '{layer}', which model '"
                f"{getattr(variable, _PLACED_BY)}' has moved to other devices. "
                "Go on with that one, make a new `GPipe`, or give both the same"
                " `layers_per_cell` and `devices`."
            )


def read_variable(variable: keras.Variable) -> tf.Tensor:
    """Reads a variable on the current device."""
    value = variable.value
    is_variable = isinstance(value, tf.Variable)  # else what a scope replaces
    return value.value() if is_variable else tf.identity(value)


def as_device_takes(
    gradient: tf.Tensor | tf.IndexedSlices | None, variable: keras.Variable
) -> tf.Tensor | tf.IndexedSlices | None:
    """Makes a sparse gradient dense if its variable's device only compiles.

    Optimizers look for slices of the same row, in a number that depends on the
    data, which XLA cannot compile.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if not names_lib.only_compiles([variable.value.device]):
        return gradient
    with tf.device(variable.value.device):
        return tf.tensor_scatter_nd_add(
            tf.zeros(variable.shape, gradient.values.dtype),
            gradient.indices[:, tf.newaxis],
            gradient.values,
        )


def follow_inputs(
    is_on: Callable[[], bool],
) -> contextlib.AbstractContextManager[None]:
    """Inside, an operation runs on the device of its first input.

    Of its first input that is no scalar, if there is one. `is_on` returns
    whether it holds for operations that are made now.
    """
    captured: dict[int, tf.Tensor] = {}

    def device_of(tensor: tf.Tensor) -> str:
        if internals.is_eager(tensor):
            return tensor.device
        op = tensor.op
        if op.type == "Placeholder":
            if id(tensor) not in captured:
                captures = getattr(tensor.graph, "captures", ())
                captured.update((id(inner), outer) for outer, inner in captures)
            outer = captured.get(id(tensor))
            return "" if outer is None else device_of(outer)
        is_same = op.type in ("ReadVariableOp", "Identity") and not op.device
        return device_of(op.inputs[0]) if is_same else op.device

    def device(op: tf.Operation) -> str:
        if not is_on() or op.device or op.type in _ANYWHERE:
            return op.device
        fallback = ""
        for tensor in op.inputs:
            name = device_of(tensor)
            if name and (tensor.dtype == tf.resource or tensor.shape.rank != 0):
                return name
            fallback = fallback or name
        return fallback

    return tf.compat.v1.device(device)


def place_variables(
    cells: Sequence[Any],
    placed: Collection[int],
    others: Iterable[keras.Variable] = (),
) -> None:
    """Puts each variable onto its device.

    The trainable ones of a cell are divided among its stores. A variable of
    several cells belongs to the first of them, `others` are for the first
    device, and those with the ids `placed` stay. Each is created by itself, so
    that only one is in memory twice, and in the order in which it was made.
    """
    seen = set(placed)
    pairs: list[tuple[keras.Variable, str]] = []

    def unseen(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
        by_id = {id(v): v for v in variables if id(v) not in seen}
        seen.update(by_id)
        return list(by_id.values())

    for cell in cells:
        weights = unseen(v for layer in cell.weights_by_layer for v in layer)
        held = dict.fromkeys(cell.stores, 0)
        for variable in sorted(weights, key=tensor_bytes, reverse=True):
            device = min(cell.stores, key=held.__getitem__)
            pairs.append((variable, device))
            held[device] += tensor_bytes(variable)
        pairs += [(variable, cell.home) for variable in unseen(cell.state)]
    pairs += [(variable, cells[0].device) for variable in unseen(others)]
    pairs.sort(key=lambda pair: internals.made_order(pair[0]))
    for variable, device in pairs:
        create_or_move([variable], device)


# ------------------------------------------------------- the homes of layers
def settle_layers(
    cells: Sequence[Any], layers: Iterable[keras.layers.Layer]
) -> None:
    """Gives layers and operations their homes, after variables are placed.

    The model's `layers` may hold layers of several cells.
    """
    internals.watch_calls(_called, _added, _spans)
    for cell in reversed(cells):  # the first one wins
        for step in cell.steps:
            for part in (step.operation, *internals.flat_layers(step.layer)):
                _set_home(part, cell.home)
    sent = {key: cell.home for cell in cells for key in cell.sent}
    parts = [part for la in layers for part in internals.flat_layers(la)]
    for part in parts:
        held: collections.Counter[str] = collections.Counter()
        for weight in part.weights:
            device = sent.get(id(weight), weight.value.device)
            held[device] += tensor_bytes(weight)
        if held:
            _set_home(part, max(held, key=held.__getitem__))
    for model in filter(lambda part: isinstance(part, keras.Model), parts):
        internals.forget_functions(model)
        if _spans(model):
            model.jit_compile = False


@contextlib.contextmanager
def homes_left() -> Iterator[None]:
    """Inside, homes do not count, as in files for serving."""
    _homes_are_left.append(True)
    try:
        yield
    finally:
        _homes_are_left.pop()


def _set_home(operation: keras.Operation, device: str) -> None:
    object.__setattr__(operation, internals.HOME, device)


def _home_of(operation: keras.Operation) -> str | None:
    return vars(operation).get(internals.HOME)


def _called(
    operation: keras.Operation,
) -> contextlib.AbstractContextManager[None]:
    """Returns the context of each call of an operation: its device."""
    home = _home_of(operation)
    if home is None or _homes_are_left or internals.variables_are_deferred():
        return contextlib.nullcontext()
    if internals.is_in_xla() and _is_elsewhere({home}):
        raise ValueError(
            "A model on several devices must be called without XLA, which "
            f"compiles for one. Received: layer '{operation.name}' on {home}, "
            "in a function with jit_compile=True. Leave it out."
        )
    return tf.device(home)


def _added(
    layer: keras.layers.Layer,
) -> contextlib.AbstractContextManager[None]:
    """Returns the context of the creation of each variable of a layer."""
    home = _home_of(layer)
    return contextlib.nullcontext() if home is None else tf.device(home)


def _spans(model: keras.Model) -> bool:
    """Returns whether a model is on several devices, or not on the first."""
    homes = {_home_of(layer) for layer in internals.flat_layers(model)}
    return _is_elsewhere({home for home in homes if home is not None})


def _is_elsewhere(homes: Iterable[str]) -> bool:
    first = accelerators()[0]
    return not all(same_device(home, first) for home in homes)
