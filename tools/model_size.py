"""What a model and its cells need, without allocating any of it.

Layers are built with variables that have a shape and no value; of equal layers,
which have the same class, settings and inputs, only the first. So a model of
any size takes seconds.

Memory is what the guide's chapter "Memory and remat" says a device holds at its
peak: weights and the optimizer's slots, a gradient for each weight, and of
activations

    I h / M + A / M    under remat "except_last" or "always"
    A h / M            under "never"

with I the inputs of the cell and A what its layers keep for the backward pass,
for the mini-batch, and h the micro-batches that the device holds. The last cell
has its outputs, and their gradient, beside. What the runtime adds (workspaces,
fragmentation, copies for transfers) is not known here.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from params import Experiment
from tfgpipe import internals
from tfgpipe.planning import cost
from tfgpipe.planning.partition import partition
from tfgpipe.schedules.ideal import IDEALS
from tools.kept_tensors import kept_bytes, spec_bytes


class LayerSize(NamedTuple):
    """What one layer needs.

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
class CellSize:
    """What one cell's device holds at its peak.

    Attributes:
        layers: Names of the layers, in order.
        num_params: Numbers in the trainable weights.
        num_values: Numbers in all weights.
        flops: Of one example's forward pass.
        weight_bytes: Weights.
        slot_bytes: The optimizer's slots.
        gradient_bytes: Gradients.
        activation_bytes: Activations.
    """

    layers: tuple[str, ...]
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
    """Numbers in a model's trainable weights."""
    spec = experiment.data.source().input_spec
    total = 0
    known: dict[Any, tuple[int, Any]] = {}
    with internals.deferred_variables():
        for layer in experiment.model.layers():
            key = _key(layer, spec)
            if key not in known:
                output = layer(spec)
                known[key] = (_count(layer.trainable_weights), output)
            count, spec = known[key]
            total += count
    return total


def layer_sizes(experiment: Experiment) -> list[LayerSize]:
    """What each layer of an experiment's model needs, in order.

    Weights that layers share are counted with each of them.
    """
    source = experiment.data.source()
    spec = source.input_spec
    micro_batch = keras.tree.map_structure(
        lambda leaf: keras.KerasTensor(
            (
                -(-leaf.shape[0] // experiment.num_micro_batches),
                *leaf.shape[1:],
            ),
            leaf.dtype,
        ),
        source.largest_batch(experiment.batch_size),
    )
    sizes = []
    known: dict[Any, tuple[LayerSize, Any, Any]] = {}
    with internals.deferred_variables():
        for layer in experiment.model.layers():
            key = _key(layer, (spec, micro_batch))
            if key not in known:
                known[key] = _measured(layer, spec, micro_batch, experiment)
            size, spec, micro_batch = known[key]
            sizes.append(size._replace(name=layer.name))
    return sizes


def cell_sizes(experiment: Experiment) -> list[CellSize]:
    """What each cell needs, cut as `tfgpipe.GPipe` cuts the model.

    Raises:
        ValueError: If there are more cells than layers.
    """
    sizes = layer_sizes(experiment)
    num_cells, m = experiment.num_partitions, experiment.num_micro_batches
    if num_cells > len(sizes):
        raise ValueError(
            f"`num_partitions` must be at most the number of layers, "
            f"{len(sizes)}. Received: num_partitions={num_cells}."
        )
    counts = experiment.layers_per_cell or partition(
        [size.flops for size in sizes], num_cells
    )
    held = IDEALS[experiment.schedule](num_cells, m).held
    cells, start = [], 0
    for index, count in enumerate(counts):
        layers = sizes[start : start + count]
        start += count
        cells.append(_cell(layers, held[index], experiment.remat))
    last = sizes[-1]
    cells[-1] = dataclasses.replace(
        cells[-1],
        activation_bytes=cells[-1].activation_bytes + 2 * last.output_bytes,
    )
    return cells


def _measured(
    layer: keras.layers.Layer,
    spec: Any,
    micro_batch: Any,
    experiment: Experiment,
) -> tuple[LayerSize, Any, Any]:
    """The size of a layer, and the specs of its outputs."""
    output = layer(spec)
    micro_output = layer(micro_batch)
    slots = [
        experiment.optimizer.num_slot_values(v.shape) * _itemsize(v)
        for v in layer.trainable_weights
    ]
    size = LayerSize(
        name=layer.name,
        num_params=_count(layer.trainable_weights),
        num_values=_count(layer.weights),
        weight_bytes=_bytes(layer.weights),
        slot_bytes=sum(slots),
        gradient_bytes=_bytes(layer.trainable_weights),
        flops=cost.layer_flops(layer, spec),
        input_bytes=spec_bytes(micro_batch),
        kept_bytes=kept_bytes(layer, micro_batch),
        output_bytes=spec_bytes(micro_output),
    )
    return size, output, micro_output


def _cell(layers: list[LayerSize], held: int, remat: str) -> CellSize:
    """Adds up layers whose device holds so many micro-batches."""
    kept = sum(layer.kept_bytes for layer in layers)
    if remat == "never":
        activations = held * kept
    else:
        activations = held * layers[0].input_bytes + kept
    return CellSize(
        layers=tuple(layer.name for layer in layers),
        num_params=sum(layer.num_params for layer in layers),
        num_values=sum(layer.num_values for layer in layers),
        flops=sum(layer.flops for layer in layers),
        weight_bytes=sum(layer.weight_bytes for layer in layers),
        slot_bytes=sum(layer.slot_bytes for layer in layers),
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


def _count(variables: Iterable[keras.Variable]) -> int:
    return sum(math.prod(v.shape) for v in variables)


def _bytes(variables: Iterable[keras.Variable]) -> int:
    return sum(math.prod(v.shape) * _itemsize(v) for v in variables)


def _itemsize(variable: keras.Variable) -> int:
    return tf.as_dtype(variable.dtype).size
