"""Puts variables and operations on the devices of their cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals

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

# Types of devices without kernels of their own. Those of the last two exist if
# TensorFlow is asked for them, see docs/tpu.md.
_ONLY_COMPILE = {"TPU", "XLA_CPU", "XLA_GPU"}

# What names leave out.
_LOCAL = tf.DeviceSpec(job="localhost", replica=0, task=0)
_PLACED_BY = "tfgpipe_placed_by"  # an attribute of variables


def num_bytes(variable: Any) -> int:
    """Bytes of a variable, or of anything else with a shape and a dtype."""
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def accelerators() -> list[str]:
    """Names of the devices cells go to: TPUs, or GPUs, or else CPUs."""
    for kind in ("TPU", "GPU", "CPU"):
        devices = tf.config.list_logical_devices(kind)
        if devices:
            return [device.name for device in devices]
    return []


def all_devices() -> list[str]:
    """Names of all devices that TensorFlow lists."""
    return [device.name for device in tf.config.list_logical_devices()]


def resolve_device(name: Any) -> str | None:
    """The name by which TensorFlow lists a device, or None."""
    if not isinstance(name, str):
        return None
    try:
        wanted = tf.DeviceSpec.from_string(
            name if name.startswith("/") else f"/device:{name}"
        )
    except ValueError:
        return None
    if wanted.device_type is None or wanted.device_index is None:
        return None
    for listed in all_devices():
        # Of CPUs TensorFlow lists short names, and other strategies use full.
        spec = _LOCAL.make_merged_spec(tf.DeviceSpec.from_string(listed))
        if spec.make_merged_spec(wanted) == spec:
            return listed
    return None


def create_or_move(variables: list[keras.Variable], device: str) -> None:
    """Makes sure that variables have their storage on a device.

    To be called before an optimizer is built and anything is traced.
    """
    with tf.init_scope(), tf.device(device):
        for variable in variables:
            if not internals.is_created(variable):
                internals.create_variable(variable)
            elif _is_mirrored(variable) or not same_device(
                variable.value.device, device
            ):
                internals.move_variable(variable)


def _is_mirrored(variable: keras.Variable) -> bool:
    """Whether another strategy has made a copy of it for each device."""
    return isinstance(
        internals.storage(variable), tf.distribute.DistributedValues
    )


class Storage:
    """Where the variables of a model's layers are.

    Traces and the optimizer know a variable by its storage, which another model
    that is made of the same layers gives up if it needs them elsewhere.

    Args:
        model: Name of the model.
        layers: Its layers, which it has just placed.

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
                f"'{other}', or make a new `GPipe` of the layers; to have two "
                "models, give one of them copies: `keras.models.clone_model`."
            )


def device_types(names: Iterable[str]) -> list[str]:
    """The types of devices, such as "GPU", each once."""
    types = (tf.DeviceSpec.from_string(name).device_type for name in names)
    return list(dict.fromkeys(types))


def only_compiles(names: Iterable[str]) -> bool:
    """Whether one of these devices runs nothing but what XLA compiles.

    It has no kernels besides, and holds no variants, such as Optionals.
    """
    return not _ONLY_COMPILE.isdisjoint(device_types(names))


def same_device(one: str, other: str) -> bool:
    """Whether two names, full or short, mean one device."""
    a, b = tf.DeviceSpec.from_string(one), tf.DeviceSpec.from_string(other)
    keys = ("device_type", "device_index")
    if any(getattr(a, key) != getattr(b, key) for key in keys):
        return False
    return None in (a.task, b.task) or (a.job, a.task) == (b.job, b.task)


def host_of(device: str) -> str:
    """The CPU of the host that a device is of."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()


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
    if not only_compiles([variable.value.device]):
        return gradient
    with tf.device(variable.value.device):
        return tf.tensor_scatter_nd_add(
            tf.zeros(variable.shape, gradient.values.dtype),
            gradient.indices[:, tf.newaxis],
            gradient.values,
        )


def follow_inputs(variables: list[keras.Variable]) -> Any:
    """Inside, an operation runs on the device of its first input.

    Of its first input that is no scalar, if there is one. A context manager.

    Args:
        variables: Those from whose devices it starts.
    """
    return tf.compat.v1.device(_device_of_inputs(variables))


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
