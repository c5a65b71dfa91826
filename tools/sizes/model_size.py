"""What a model and its devices need, without allocating any of it.

Layers are built with variables that have a shape and no value; of equal layers,
which have the same class, settings and inputs, only the first. So a model of
any size takes seconds.

Memory is what the guide's chapter "Memory and remat" says a device holds at its
peak: weights and the optimizer's slots, a gradient for each weight, and
activations. These are followed through the device's tasks: a forward task adds
the inputs of its cell or, under remat "never", all that its layers keep; a
backward task adds the latter, if it was not kept, and the task that ends the
work on a micro-batch takes all away. The last cell has its outputs, and their
gradient, beside. Replicas share the slots. What the runtime adds (workspaces,
fragmentation, copies for transfers and between replicas) is not known here.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from params import Experiment, names
from tfgpipe import internals
from tfgpipe.devices import placement
from tfgpipe.planning import cost, partition
from tfgpipe.planning.kept_tensors import kept_bytes
from tfgpipe.schedules import SCHEDULES, Task


class LayerSize(NamedTuple):
    """What one layer needs; of tied weights, the first layer has all.

    Attributes:
        name: Of the layer.
        num_params: Numbers in its trainable weights.
        num_values: Numbers in all its weights.
        weight_bytes: Bytes of these.
        slot_bytes: Bytes that the optimizer keeps for them.
        gradient_bytes: Bytes of a gradient for each.
        flops: Of one example's forward pass.
        input_bytes: Bytes of the inputs, for a micro-batch.
        kept_bytes: What is kept for the backward pass, for a micro-batch.
        output_bytes: Bytes of the outputs, for a micro-batch.
    """

    name: str
    num_params: int
    num_values: int
    weight_bytes: int
    slot_bytes: int
    gradient_bytes: int
    flops: float
    input_bytes: int
    kept_bytes: int
    output_bytes: int


@dataclasses.dataclass(frozen=True)
class DeviceSize:
    """What a device holds at its peak.

    Attributes:
        cells: Indices of its cells, one but for "interleaved".
        layers: Names of the layers of each of them, in order.
        num_params: Numbers in the trainable weights.
        num_values: Numbers in all weights.
        flops: Of one example's forward pass.
        weight_bytes: Weights.
        slot_bytes: The optimizer's slots.
        gradient_bytes: Gradients.
        activation_bytes: Activations.
    """

    cells: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]
    num_params: int
    num_values: int
    flops: float
    weight_bytes: int
    slot_bytes: int
    gradient_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return (
            self.weight_bytes
            + self.slot_bytes
            + self.gradient_bytes
            + self.activation_bytes
        )


def num_parameters(experiment: Experiment) -> int:
    """Numbers in a model's trainable weights, tied ones once."""

    def count(layer: Any, specs: Any, outputs: Any, weights: Any) -> int:
        return _count(v for v in weights if v.trainable)

    spec = experiment.data.source().input_spec
    found = _of_each_layer(experiment, [spec], count)
    return sum(number for _, number in found)


def layer_sizes(
    experiment: Experiment, num_replicas: int = 1
) -> list[LayerSize]:
    """What each layer of an experiment's model needs, in order."""
    source = experiment.data.source()
    parts = num_replicas * experiment.num_micro_batches
    micro_batch = keras.tree.map_structure(
        lambda leaf: keras.KerasTensor(
            (-(-leaf.shape[0] // parts), *leaf.shape[1:]), leaf.dtype
        ),
        source.largest_batch(experiment.batch_size),
    )

    def measure(
        layer: keras.layers.Layer, specs: Any, outputs: Any, weights: Any
    ) -> LayerSize:
        trainable = [v for v in weights if v.trainable]
        spec, micro_batch = specs
        return LayerSize(
            name=layer.name,
            num_params=_count(trainable),
            num_values=_count(weights),
            weight_bytes=_bytes(weights),
            slot_bytes=sum(
                experiment.optimizer.num_slot_values(v.shape) * _itemsize(v)
                for v in trainable
            ),
            gradient_bytes=_bytes(trainable),
            flops=cost.layer_flops(layer, spec),
            input_bytes=spec_bytes(micro_batch),
            kept_bytes=sum(kept_bytes(layer, micro_batch)),
            output_bytes=spec_bytes(outputs[1]),
        )

    specs = [source.input_spec, micro_batch]
    found = _of_each_layer(experiment, specs, measure)
    return [size._replace(name=name) for name, size in found]


def device_sizes(
    experiment: Experiment,
    num_devices: int | None = None,
    num_replicas: int = 1,
) -> list[DeviceSize]:
    """What each device needs, cut as `tfgpipe.GPipe` cuts the model.

    Args:
        experiment: With K, its `num_partitions`.
        num_devices: Devices of a replica, for "interleaved"; the other
            schedules have one for each cell, which `None` stands for, too.
        num_replicas: R, the pipelines that share a mini-batch.

    Raises:
        ValueError: If there are more cells than layers, K is no multiple of
            the devices, or there is no such schedule.
    """
    name, remat = experiment.schedule, experiment.remat
    if name not in SCHEDULES:
        raise ValueError(names.unknown("schedule", name, SCHEDULES))
    k, m = experiment.num_partitions, experiment.num_micro_batches
    d = num_devices if num_devices and name == "interleaved" else k
    if k % d:
        raise ValueError(
            "`num_partitions` must be a multiple of the number of devices "
            'under schedule="interleaved". Received: num_partitions='
            f"{k} and {d} devices. Change one of them."
        )
    cells = _cells(experiment, layer_sizes(experiment, num_replicas))
    schedule = SCHEDULES[name](d, m, k // d)
    sizes = [
        _device(
            {cell: cells[cell] for cell in range(device, k, d)},
            _most_held(tasks, cells, remat),
            num_replicas,
        )
        for device, tasks in enumerate(schedule.tasks)
    ]
    outputs = 2 * cells[-1][-1].output_bytes
    sizes[-1] = dataclasses.replace(
        sizes[-1], activation_bytes=sizes[-1].activation_bytes + outputs
    )
    return sizes


def _of_each_layer(
    experiment: Experiment, specs: list[Any], measure: Callable[..., Any]
) -> list[tuple[str, Any]]:
    """Each layer's name, and what a function says of it, or of an equal one.

    The function gets a layer that is built, the specs of its inputs, those of
    its outputs, and the weights that no layer before has.
    """
    found = []
    known: dict[Any, tuple[Any, list[Any]]] = {}
    seen: dict[int, Any] = {}  # layers and weights, which keeps them alive
    with internals.deferred_variables():
        for layer in experiment.model.layers():
            is_again = id(layer) in seen
            tied = [id(v) for v in layer.weights if id(v) in seen]
            key = (_key(layer, specs), is_again, tuple(tied))
            if key not in known:
                outputs = [layer(spec) for spec in specs]
                own = [v for v in layer.weights if id(v) not in seen]
                own = [] if is_again else own
                known[key] = measure(layer, specs, outputs, own), outputs
            seen |= {id(thing): thing for thing in (layer, *layer.weights)}
            result, specs = known[key]
            found.append((layer.name, result))
    return found


def _cells(
    experiment: Experiment, sizes: list[LayerSize]
) -> list[list[LayerSize]]:
    """The layers of each cell."""
    if experiment.num_partitions > len(sizes):
        raise ValueError(
            f"`num_partitions` must be at most the number of layers, "
            f"{len(sizes)}. Received: "
            f"num_partitions={experiment.num_partitions}."
        )
    counts = experiment.layers_per_cell or partition(
        [size.flops for size in sizes], experiment.num_partitions
    )
    layers = iter(sizes)
    return [list(itertools.islice(layers, count)) for count in counts]


def _most_held(
    tasks: Iterable[Task], cells: Sequence[Sequence[LayerSize]], remat: str
) -> int:
    """Bytes of activations at the peak of a device's tasks."""
    inputs = [layers[0].input_bytes for layers in cells]
    kept = [sum(layer.kept_bytes for layer in layers) for layers in cells]
    most = now = 0
    for kind, k, _ in tasks:
        first, later = (kept, 0) if remat == "never" else (inputs, kept[k])
        if kind == "forward":
            now += first[k]
        if kind in ("backward", "input_gradient"):
            now += later
        most = max(most, now)
        if kind in ("backward", "weight_gradient"):
            now -= first[k] + later
    return most


def _device(
    cells: dict[int, list[LayerSize]], activations: int, num_replicas: int
) -> DeviceSize:
    """Adds up the layers of the cells on a device."""
    layers = [layer for own in cells.values() for layer in own]
    slots = sum(layer.slot_bytes for layer in layers)
    return DeviceSize(
        cells=tuple(cells),
        layers=tuple(tuple(x.name for x in own) for own in cells.values()),
        num_params=sum(layer.num_params for layer in layers),
        num_values=sum(layer.num_values for layer in layers),
        flops=sum(layer.flops for layer in layers),
        weight_bytes=sum(layer.weight_bytes for layer in layers),
        slot_bytes=-(-slots // num_replicas),
        gradient_bytes=sum(layer.gradient_bytes for layer in layers),
        activation_bytes=activations,
    )


def _key(layer: keras.layers.Layer, specs: Any) -> Any:
    """What equal layers have in common; the layer where that is unknown."""
    try:
        config = {**layer.get_config(), "name": None}
        text = json.dumps(config, sort_keys=True)
    except (TypeError, ValueError, NotImplementedError):
        text = str(id(layer))
    inputs = [(x.shape, x.dtype) for x in keras.tree.flatten(specs)]
    return type(layer), text, str(inputs)


def spec_bytes(spec: Any) -> int:
    """Bytes of a nest of specs whose sizes are all known."""
    return sum(map(placement.num_bytes, keras.tree.flatten(spec)))


def _count(variables: Iterable[keras.Variable]) -> int:
    return sum(math.prod(v.shape) for v in variables)


def _bytes(variables: Iterable[keras.Variable]) -> int:
    return sum(math.prod(v.shape) * _itemsize(v) for v in variables)


def _itemsize(variable: keras.Variable) -> int:
    return tf.as_dtype(variable.dtype).size
