"""Makes cells of layers. The result is one value, whole when it is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
from keras import tree

from tfgpipe import inputs, internals
from tfgpipe.arguments import Arguments, check_groups
from tfgpipe.cells import Cell
from tfgpipe.devices import names
from tfgpipe.internals import Nest
from tfgpipe.model.groups import grouped_cells, shared_out, tell_of_large
from tfgpipe.schedules import Remat
from tfgpipe.sequence import too_many_cells
from tfgpipe.state import RandomState


@dataclasses.dataclass(frozen=True)
class Built:
    """All that a step has to know besides a mini-batch, loss and optimizer.

    A plain object, which Keras does not track: names and files must not know
    about cells.

    Attributes:
        arguments: Those of the `GPipe`, with its layers.
        name: The model's.
        counts: How many steps each cell of the user's has.
        costs: What each layer costs, in order.
        input_spec: Nest of `keras.KerasTensor`s that the first layer takes.
        output_spec: Nest of those that the last one returns.
        cells: In order; each group of steps is one, see `groups.py`, with
            `head_parts` the head is, and each of `shards` is.
        remat: The rule of each of the `cells`.
        compiles: Whether the cells have the groups that XLA compiles.
        random_state: The random seeds, each once, for files.
    """

    arguments: Arguments
    name: str
    counts: Sequence[int]
    costs: Sequence[float]
    input_spec: Nest
    output_spec: Nest
    cells: tuple[Cell, ...]
    remat: Remat
    compiles: bool
    random_state: RandomState

    @property
    def source(self) -> Any:
        """The layers, and how they are called."""
        return self.arguments.source

    @functools.cached_property
    def model(self) -> keras.Model:
        """The plain model of Keras that has the layers, which a list has not.

        It takes what the first layer takes.
        """
        model = self.source.model
        if model is not None:
            return model
        output = self.source.symbolic(self.input_spec)
        return keras.Model(self.input_spec, output, name=self.name)

    @property
    def only_compiles(self) -> bool:
        """Returns whether a device runs nothing but what XLA compiles."""
        return names.only_compiles(
            device for cell in self.cells for device in cell.devices
        )

    def cast_inputs(self, x: Nest) -> Any:
        """Data as the layers expect it, see `inputs.as_expected`."""
        is_declared = self.source.input_spec is not None
        x = self.source.arranged(x)
        return inputs.as_expected(x, self.input_spec, is_declared)

    def as_taken(self, x: Nest) -> Any:
        """Data as the first layer takes it, checked."""
        x = self.cast_inputs(x)
        model = self.source.model
        is_exact = model is not None and model.input_spec is not None
        inputs.check_shapes(x, self.input_spec, is_exact)
        return x

    def regrouped(self, compiles: bool) -> Built:
        """The same cells in the groups that they have with XLA, or without."""
        specs = self.input_spec, self.output_spec
        cells, remat = grouped_cells(
            self.arguments, self.counts, self.costs, specs, compiles
        )
        return dataclasses.replace(
            self, cells=cells, remat=remat, compiles=compiles
        )


def build(
    arguments: Arguments, input_spec: Nest, name: str, compiles: bool = False
) -> Built:
    """Cuts the layers into cells; their variables have no values yet.

    `input_spec` is what the first layer takes, a nest of `keras.KerasTensor`s;
    `name` is the model's; `compiles` is whether XLA is asked to compile cells.

    Raises:
        ValueError: If the layers cannot take that, or do not fit the arguments.
    """
    source = arguments.source
    if source.input_spec is None:
        taken = {layer.name for layer in source.layers}
        input_spec = _input_tensors(input_spec, taken)
    output_spec, estimated = source.run_on_shapes(
        input_spec,
        arguments.num_micro_batches * arguments.num_replicas > 1,
        arguments.shards,
    )
    arguments.check_supported()
    costs = arguments.costs.resolved(estimated, input_spec)
    counts = _counts(arguments, costs, input_spec)
    specs = input_spec, output_spec
    cells, remat = grouped_cells(arguments, counts, costs, specs, compiles)
    listed = [seed for cell in cells for seed in cell.seeds]
    listed += internals.seeds_of(source.layers)  # also of its own `call`
    seeds = {id(seed): seed for seed in listed}
    state = RandomState(lambda: [*seeds.values()])
    return Built(
        arguments, name, counts, costs, *specs, cells, remat, compiles, state
    )


def _input_tensors(specs: Nest, taken: set[str]) -> Any:
    """Symbolic inputs at which functional models can begin.

    In a dict they have its names, where layers have not `taken` them.
    """

    def as_input(spec: Nest, name: str | None = None) -> Any:
        if spec is None:
            return None
        return keras.Input(batch_shape=spec.shape, dtype=spec.dtype, name=name)

    if not isinstance(specs, dict) or any(map(tree.is_nested, specs.values())):
        return tree.map_structure(as_input, specs)
    names = {key for key in specs if str(key).isidentifier()} - taken
    return {
        key: as_input(spec, key if key in names else None)
        for key, spec in specs.items()
    }


def _counts(
    arguments: Arguments, costs: Sequence[float], input_spec: Nest
) -> list[int]:
    """How many steps each cell has."""
    source, k = arguments.source, arguments.num_partitions
    total, costs = sum(costs), shared_out(arguments, costs)
    if arguments.layers_per_cell is not None:
        counts = source.steps_per_cell(arguments.layers_per_cell)
    elif k > len(costs):
        raise ValueError(too_many_cells(k, len(costs)))
    else:
        counts = source.cut(costs, k, arguments.region_bounds(input_spec))
        tell_of_large(arguments, costs, total)
    check_groups(arguments.remat_groups or 1, counts)
    return [*counts]
