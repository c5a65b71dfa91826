"""Puts variables, operations and layers on the devices of their cells.

Layers, too, are at home on the device of their weights, whoever calls them:
those of a pipeline are also those of the model that it was made of, of models
inside that one, and of what a task of KerasHub calls to generate:

    task.generate -> backbone.layer(x)    tf.device(home of layer): call(x)
    model.predict -> ... the same

In all of these, tensors go to the layers, and weights stay. What a layer adds
later, by `enable_lora` or `quantize`, is created at home, too. In a scope whose
values stand for those of variables, as in the steps of a pipeline, nothing is
at home anywhere, and calls are as they were.

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


def num_bytes(variable: Any) -> int:
    """Bytes of a variable, or of anything else with a shape and a dtype."""
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def create_or_move(variables: list[keras.Variable], device: str) -> None:
    """Makes sure that variables have their storage on a device.

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
            elif _is_mirrored(variable) or not same_device(
                variable.value.device, device
            ):
                internals.move_variable(variable)


def _is_mirrored(variable: keras.Variable) -> bool:
    """Whether another strategy has made a copy of it for each device."""
    return isinstance(
        internals.storage(variable), tf.distribute.DistributedValues
    )


def assign_in_pieces(variable: keras.Variable, value: Any) -> None:
    """Assigns a value, of which a few rows at a time are sent.

    What is sent to a device is in memory several times, most of all on the way
    to other processes.

    Args:
        variable: Where it goes; it has storage.
        value: As `keras.Variable.assign` takes it.
    """
    storage = internals.storage(variable)
    shape = getattr(value, "shape", None)
    if (
        shape is None
        or tuple(shape) != tuple(variable.shape)
        or not assign_rows(
            storage,
            lambda rows: keras.ops.convert_to_tensor(
                value[rows], variable.dtype
            ),
        )
    ):
        with tf.device("CPU:0"):  # in the host's memory, before it goes on
            variable.assign(value)


def assign_rows(storage: Any, read: Callable[[slice], Any]) -> bool:
    """Assigns the rows of a large variable, a few at a time.

    Args:
        storage: The `tf.Variable`.
        read: Returns some of the rows, in the variable's dtype.

    Returns:
        Whether it did: not for small ones, and those that a strategy copies.
    """
    is_copied = isinstance(storage, tf.distribute.DistributedValues)
    num_rows = storage.shape[0] if storage.shape.rank else 1
    if is_copied or num_rows == 1 or num_bytes(storage) <= _PIECE:
        return False
    some = max(1, _PIECE * num_rows // num_bytes(storage))
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
    """Where the variables of a model's layers are.

    Traces and the optimizer know a variable by its storage, which another model
    that is made of the same layers gives up if it needs them elsewhere.

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
        """Refuses to go on where another model took over a layer."""
        for layer, variable, before in self._held:
            if internals.storage(variable).handle is before:
                continue
            other = getattr(variable, _PLACED_BY)
            raise ValueError(
                f"The layers of model '{self._model}' must stay where it put "
                f"them. Received: layer '{layer}', whose variables model "
                f"'{other}' has moved to other devices, so that what "
                f"'{self._model}' does would change nothing there. Go on with "
                f"'{other}', or make a new `GPipe` of the layers. Two models "
                "that train the same layers, as those of a GAN do, put them on "
                "the same devices, by `layers_per_cell` and `devices`, and may "
                "take turns, or train in one step by `loss_and_gradients`. "
                "With copies, `keras.models.clone_model`, each trains its own."
            )


def read_variable(variable: keras.Variable) -> tf.Tensor:
    """The variable's value on the current device."""
    value = variable.value
    is_variable = isinstance(value, tf.Variable)  # else what a scope replaces
    return value.value() if is_variable else tf.identity(value)


def as_device_takes(gradient: Any, variable: keras.Variable) -> Any:
    """A gradient as it can be applied where its variable is.

    Of a sparse one, optimizers look for slices of the same row, as many as
    there happen to be, which XLA cannot compile.
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
    variables: list[keras.Variable], is_on: Callable[[], bool] = lambda: True
) -> Any:
    """Inside, an operation runs on the device of its first input.

    Of its first input that is no scalar, if there is one. A context manager.

    Args:
        variables: Those from whose devices it starts.
        is_on: Whether an operation that is made now does so.
    """
    followed = _device_of_inputs(variables)
    return tf.compat.v1.device(
        lambda op: followed(op) if is_on() else op.device
    )


def _device_of_inputs(variables: list[keras.Variable]) -> Callable:
    """A device function that puts an operation where its inputs are."""
    handles = {id(v.value.handle): v.value.device for v in variables}
    captured = internals.OuterTensors()

    def of_capture(tensor: tf.Tensor) -> str:
        outer = captured.of(tensor)
        if outer is None:
            return ""
        if id(outer) in handles:
            return handles[id(outer)]
        return outer.device if internals.is_eager(outer) else of(outer)

    def of(tensor: tf.Tensor) -> str:
        if id(tensor) in handles:
            return handles[id(tensor)]
        op = tensor.op
        if op.type == "Placeholder":
            return of_capture(tensor)
        if op.device:
            return op.device
        if op.type in ("ReadVariableOp", "Identity") and op.inputs:
            return of(op.inputs[0])
        return ""

    def device(op: tf.Operation) -> str:
        if op.device or op.type in _ANYWHERE:
            return op.device
        fallback = ""
        for tensor in op.inputs:
            name = of(tensor)
            if name and (tensor.dtype == tf.resource or tensor.shape.rank != 0):
                return name
            fallback = fallback or name
        return fallback

    return device


def place_variables(
    cells: Sequence[Any],
    placed: Collection[int],
    others: Iterable[keras.Variable] = (),
) -> None:
    """Puts each variable onto its device.

    The trainable ones of a cell are shared out among its stores. What cells
    share belongs to the first of them. Each is created by itself, so that no
    more than one is in memory twice, and in the order in which it was made.

    Args:
        cells: The cells.
        placed: ids of variables that stay where they are.
        others: Variables that no cell has, for the first device.
    """
    known = set(placed)
    found: list[tuple[keras.Variable, str]] = []

    def new(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
        own = {id(v): v for v in variables if id(v) not in known}
        known.update(own)
        return list(own.values())

    for cell in cells:
        weights = new(v for layer in cell.weights_by_layer for v in layer)
        for device, own in _shared_out(weights, cell.stores).items():
            found += [(variable, device) for variable in own]
        found += [(variable, cell.home) for variable in new(cell.state)]
    found += [(variable, cells[0].device) for variable in new(others)]
    found.sort(key=lambda pair: internals.made_order(pair[0]))
    for variable, device in found:
        create_or_move([variable], device)


def _shared_out(
    variables: Sequence[keras.Variable], devices: Sequence[str]
) -> dict[str, list[keras.Variable]]:
    """Gives each device about as many bytes of variables."""
    owned: dict[str, list[keras.Variable]] = {device: [] for device in devices}
    held = dict.fromkeys(devices, 0)
    for variable in sorted(variables, key=num_bytes, reverse=True):
        device = min(devices, key=held.__getitem__)
        owned[device].append(variable)
        held[device] += num_bytes(variable)
    return owned


# ------------------------------------------------------- the homes of layers
def settle_layers(
    cells: Sequence[Any], layers: Iterable[keras.layers.Layer]
) -> None:
    """Gives layers and operations their homes: after variables have theirs.

    Args:
        cells: The cells.
        layers: Those of the model, which may hold layers of several cells.
    """
    internals.watch_calls(_called, _added, _spans)
    for cell in reversed(cells):  # the first one wins
        for step in cell.steps:
            for part in (step.operation, *internals.flat_layers(step.layer)):
                _set_home(part, cell.home)
    sent = {
        id(weight): cell.home
        for cell in cells
        if cell.is_stored_elsewhere
        for own in cell.weights_by_layer
        for weight in own
    }
    for layer in layers:
        for part in internals.flat_layers(layer):
            held: collections.Counter[str] = collections.Counter()
            for weight in part.weights:
                device = sent.get(id(weight), weight.value.device)
                held[device] += num_bytes(weight)
            if held:
                _set_home(part, max(held, key=held.__getitem__))
            if isinstance(part, keras.Model):
                internals.forget_functions(part)


@contextlib.contextmanager
def homes_left() -> Iterator[None]:
    """Inside, calls are as if no layer had a home, as in files for serving."""
    _homes_are_left.append(True)
    try:
        yield
    finally:
        _homes_are_left.pop()


def _set_home(part: Any, device: str) -> None:
    object.__setattr__(part, internals.HOME, device)


def _home_of(part: Any) -> str | None:
    return vars(part).get(internals.HOME)


def _called(part: Any) -> Any:
    """Around each call of a layer or operation: puts it onto its device."""
    home = _home_of(part)
    if home is None or _homes_are_left or internals.variables_are_deferred():
        return contextlib.nullcontext()
    if internals.is_in_xla() and _is_elsewhere({home}):
        raise ValueError(
            "A model on several devices must be called without XLA, which "
            f"compiles for one. Received: layer '{part.name}', whose weights "
            f"are on {home}, in a function with jit_compile=True. Leave it "
            "out; or call a `tfgpipe.GPipe` of the model: its `compile("
            "jit_compile=True)` compiles each cell by itself."
        )
    return tf.device(home)


def _added(layer: keras.layers.Layer) -> Any:
    """Around the making of each variable of a layer."""
    home = _home_of(layer)
    return contextlib.nullcontext() if home is None else tf.device(home)


def _spans(model: keras.Model) -> bool:
    """Whether XLA cannot compile a model: it is not all on the first device."""
    homes = {_home_of(layer) for layer in internals.flat_layers(model)}
    return _is_elsewhere(homes - {None})


def _is_elsewhere(homes: Iterable[Any]) -> bool:
    first = accelerators()[0]
    return not all(same_device(home, first) for home in homes)
