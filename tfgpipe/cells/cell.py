"""A cell: consecutive layers on one device, and the calls of its layers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import keras

from tfgpipe import failures, internals
from tfgpipe.cells.sections import Section
from tfgpipe.devices import names
from tfgpipe.schedules import Schedule, Shard


class LayerCall:
    """A call of a layer, or of an operation.

    Attributes:
        operation: The called layer or operation.
        layer: The same layer, or a layer that stands for an operation.
    """

    def __init__(self, operation: keras.Operation):
        is_layer = isinstance(operation, keras.layers.Layer)
        self.layer = operation if is_layer else _stand_in(operation.name)
        self.operation = operation


class SectionCall(LayerCall):
    """Some sections as a step of a model.

    `layer` holds its variables: the called layer, if the whole call is in the
    step; else a stand-in with the variables that are read.

    Attributes:
        section: The first section.
        read: The variables that they read, and no layer of a step holds.
    """

    def __init__(
        self, section: Section, is_whole: bool, read: list[keras.Variable]
    ):
        called = section.operation if is_whole else None
        super().__init__(called or _stand_in(section.name, read))
        self.section = section
        self.read = read

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that its cell holds."""
        held = {id(v): v for v in [*self.layer.variables, *self.read]}
        return [*held.values()]


@dataclasses.dataclass(eq=False)
class Cell:
    """Layers of a model, one after the other, on one device.

    Names and files do not know cells. Each replica has a device for it. With
    `remat_groups`, each group of a cell of the user's is such a cell, and so is
    the head with `head_parts`; `number` counts the user's cells, and defaults
    to the index.

    Attributes:
        steps: Some sections each, see `outline.py`.
        sequence: The layer of each step.
        device: The device of the first replica, which has the variables that
            are not trained.
        stores: The devices that share the trained variables: the same, or
            those from which they are sent.
        head_parts: The number of parts in which rows go through a head, else 1.
        shards: The indexes of the cells that compute a layer together, some
            columns each; None but for these cells.
        callers: The devices of the cell whose layer it shards, one a replica;
            else its devices.
        called: The operations that the last trace called in it, in order:
            `failures.py` names them.
        traced_as: The indexes of the cells whose names its operations have:
            its own, and the one of the equal cell whose functions it shares.
    """

    index: int
    steps: Sequence[SectionCall]
    devices: tuple[str, ...]
    number: int = -1
    stores: tuple[str, ...] = ()
    head_parts: int = 1
    shards: range | None = None
    callers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.number < 0:
            self.number = self.index
        self.stores = self.stores or self.devices
        self.callers = self.callers or self.devices
        self.sequence = [step.layer for step in self.steps]
        self.device = self.devices[0]
        self.called: list[keras.Operation] = []
        self.traced_as = {self.index}
        self._warnings: set[str] = set()

    @property
    def before(self) -> int:
        """The index of the cell before it, or -1."""
        return (self.index if self.shards is None else self.shards.start) - 1

    @property
    def home(self) -> str:
        """The device on which its layers compute outside of steps: whole."""
        return self.device if self.shards is None else self.stores[0]

    @property
    def is_beside(self) -> bool:
        """Whether it is a shard on another device than the layer's cell."""
        return self.callers != self.devices

    @property
    def is_stored_elsewhere(self) -> bool:
        """Says whether weights are sent to its devices when they are needed."""
        return self.stores != self.devices

    def store_of(self, device: str) -> str:
        """Returns the device that stores the weights for one of its devices."""
        return self.stores[self.devices.index(device)]

    @property
    def weights_by_layer(self) -> list[list[keras.Variable]]:
        """The trainable variables of each layer; if they are sent, frozen too.

        As in Keras, a variable is trained if it says so itself: a variable of
        a layer that was made with `trainable=False` may be. And tapes must
        watch it: one that was itself made with `trainable=False` never is
        trained.
        """
        is_weight = internals.is_trained
        if self.is_stored_elsewhere:
            is_weight = internals.is_watched
        return [
            [v for v in step.variables if is_weight(v)] for step in self.steps
        ]

    @property
    def sent(self) -> set[int]:
        """The ids of the weights that are sent to its devices."""
        if not self.is_stored_elsewhere:
            return set()
        return {id(v) for weights in self.weights_by_layer for v in weights}

    @property
    def state(self) -> list[keras.Variable]:
        """Frozen weights, statistics, seeds and metrics."""
        variables = [
            v
            for step in self.steps
            for v in [*step.variables, *step.layer.metrics_variables]
        ]
        state = {id(v): v for v in variables if not internals.is_trained(v)}
        return [*state.values()]

    @property
    def seeds(self) -> list[keras.Variable]:
        """The states of the layers' seed generators."""
        return internals.seeds_of(self.sequence)

    def part(self, index: int) -> Cell:
        """Returns a cell on the same devices, for some of its operations."""
        part = Cell(index, [], self.devices, self.number, self.stores)
        part._warnings = self._warnings
        return part

    @contextlib.contextmanager
    def naming(self, layer: keras.Operation) -> Iterator[None]:
        """Says in an error where in the pipeline it happened."""
        try:
            yield
        except Exception as error:
            internals.keep_words(error)
            failures.add_note(error, f"In {self.describe(layer)}.")
            raise

    def describe(self, layer: keras.Operation | str) -> str:
        """Says where in the pipeline a layer is."""
        devices = " or ".join(self.devices)
        return f"{_in_words(layer)} of cell {self.number} on {devices}"

    def named_as(self, k: int, i: int) -> list[str]:
        """Describes layer i of the operations that are named cell k, if here.

        Returns:
            One text, or none.
        """
        called = self.called[i : i + 1] if k in self.traced_as else []
        return [*map(self.describe, called)]

    def warn_of(self, layer: keras.Operation | str, fact: str) -> None:
        """Warns of a layer, of each fact once."""
        name = _in_words(layer)
        message = f"{name[0].upper()}{name[1:]} {fact}"
        if message not in self._warnings:
            failures.warn(message)
            self._warnings.add(message)


def counts_of_shards(cells: Sequence[Cell]) -> dict[int, int]:
    """Returns by the id of a sharded layer the number of its shards."""
    return {
        id(step.operation): len(cell.shards)
        for cell in cells
        if cell.shards is not None
        for step in cell.steps
    }


def shards_of(cells: Sequence[Cell], schedule: Schedule) -> dict[int, Shard]:
    """Returns the cells that are shards, by index, on numbered devices.

    Devices without other cells are numbered after the schedule's.
    """
    numbers = {
        cell.device: schedule.device_of(cell.number)
        for cell in cells
        if not cell.is_beside
    }
    others = {cell.device for cell in cells} - {*numbers}
    in_order = sorted(others, key=names.all_devices().index)
    for i, device in enumerate(in_order, schedule.num_devices):
        numbers[device] = i
    return {
        cell.index: Shard(
            cell.shards, numbers[cell.device], schedule.device_of(cell.number)
        )
        for cell in cells
        if cell.shards is not None
    }


class _StandIn(keras.layers.Layer):
    """A layer that stands for an operation where layers are noted."""


def _stand_in(
    name: str, variables: Sequence[keras.Variable] = ()
) -> keras.layers.Layer:
    """Returns a layer that stands for an operation, and holds its variables."""
    layer = _StandIn(name=name.replace("/", "_"))
    layer.read = list(variables)
    layer.built = True
    return layer


def _in_words(layer: keras.Operation | str) -> str:
    """Names a layer, or the operation for which it stands; a text stays."""
    if isinstance(layer, str):
        return layer
    is_layer = isinstance(layer, keras.layers.Layer)
    is_users = is_layer and not isinstance(layer, _StandIn)
    return f"{'layer' if is_users else 'operation'} '{layer.name}'"
