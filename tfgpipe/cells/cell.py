"""A cell: consecutive layers on one device, and the calls of its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfgpipe import failures, internals
from tfgpipe.devices import names
from tfgpipe.failures import add_note
from tfgpipe.schedules import Schedule, Shard


class Cell:
    """Layers of a model, one after the other, on one device.

    Names and files know nothing about cells. The devices run it, one a replica.
    With `remat_groups`, each group of a cell of the user's is such a cell, and
    so is the head if `head_parts` of the rows of a micro-batch go through it by
    themselves. Its `number` is that of the user's; it defaults to the index.

    Attributes:
        steps: What it has of the model: `SectionCall`s, see `outline.py`.
        sequence: The layer of each.
        device: The first of them, which has the variables that are not trained.
        stores: The devices among which the others are shared out: the same, or
            those from which they are sent.
        head_parts: In how many parts the rows go through it; 1 but for a head.
        shards: The indexes of the cells that compute a layer side by side, each
            some of its columns; None but for one of these.
        callers: The devices of the cell that it is of, one a replica: its own,
            but for shards.
        called: What was called in it, in order, when the model was traced
            last: `failures.py` names them.
        traced_as: The cells whose names stand in this cell's operations: its
            own index, and that of the equal cell whose functions it shares.
    """

    def __init__(
        self,
        index: int,
        steps: Sequence[Any],
        devices: Sequence[str],
        number: int | None = None,
        stores: Sequence[str] | None = None,
        head_parts: int = 1,
        shards: range | None = None,
        callers: Sequence[str] | None = None,
    ):
        self.index = index
        self.head_parts = head_parts
        self.number = index if number is None else number
        self.steps = tuple(steps)
        self.sequence = [step.layer for step in steps]
        self.called: list[keras.Operation] = []
        self.traced_as = {index}
        self._told: set[str] = set()
        self.devices = tuple(devices)
        self.device = self.devices[0]
        self.stores = self.devices if stores is None else tuple(stores)
        self.shards = shards
        self.callers = self.devices if callers is None else tuple(callers)

    @property
    def before(self) -> int:
        """The index of the cell that gives it what it takes, or -1."""
        return (self.index if self.shards is None else self.shards.start) - 1

    @property
    def home(self) -> str:
        """Where its layers compute outside of steps: whole, without shards."""
        return self.device if self.shards is None else self.stores[0]

    @property
    def is_beside(self) -> bool:
        """Whether it runs beside the tasks of its device."""
        return self.callers != self.devices

    @property
    def is_stored_elsewhere(self) -> bool:
        """Whether weights are sent to its devices when they are needed."""
        return self.stores != self.devices

    def store_of(self, device: str) -> str:
        """Where the weights are that one of its devices uses."""
        return self.stores[self.devices.index(device)]

    @property
    def weights_by_layer(self) -> list[list[keras.Variable]]:
        """The trainable variables of each layer; if they are sent, frozen too.

        As in Keras, a variable is trained if it says so itself: what is inside
        a layer that was made with `trainable=False` may be. And tapes must
        watch it: what was itself made with `trainable=False` never is trained.
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
        found = self.weights_by_layer if self.is_stored_elsewhere else []
        return {id(variable) for own in found for variable in own}

    @property
    def state(self) -> list[keras.Variable]:
        """What is not trained: frozen weights, statistics, seeds, metrics."""
        variables = {
            id(v): v
            for step in self.steps
            for v in [*step.variables, *step.layer.metrics_variables]
            if not internals.is_trained(v)
        }
        return list(variables.values())

    @property
    def seeds(self) -> list[keras.Variable]:
        """The states of the layers' seed generators."""
        return internals.seeds_of(self.sequence)

    def part(self, index: int) -> Cell:
        """A cell of its own, in the same place, for a part of what it runs."""
        part = Cell(index, [], self.devices, self.number, self.stores)
        part._told = self._told
        return part

    @contextlib.contextmanager
    def naming(self, layer: Any) -> Iterator[None]:
        """Says in an error where in the pipeline it happened."""
        try:
            yield
        except Exception as error:
            internals.keep_words(error)
            add_note(error, f"In {self.describe(layer)}.")
            raise

    def describe(self, layer: Any) -> str:
        """Where in the pipeline a layer is, or what has this name."""
        devices = " or ".join(self.devices)
        name = layer if isinstance(layer, str) else name_in_words(layer)
        return f"{name} of cell {self.number} on {devices}"

    def named_as(self, k: int, i: int) -> list[str]:
        """Where the layer is whose operations are named as layer i of cell k.

        None, or one, as words.
        """
        if k not in self.traced_as or i >= len(self.called):
            return []
        return [self.describe(self.called[i])]

    def warn_of(self, layer: Any, what: str) -> None:
        """Warns of a layer, or by its name, of the same in it once."""
        name = layer if isinstance(layer, str) else name_in_words(layer)
        message = f"{name[0].upper()}{name[1:]} {what}"
        if message not in self._told:
            failures.warn(message)
            self._told.add(message)


def counts_of_shards(cells: Sequence[Cell]) -> dict[int, int]:
    """In how many shards layers are computed, by their ids."""
    return {
        id(step.operation): len(cell.shards)
        for cell in cells
        if cell.shards is not None
        for step in cell.steps
    }


def shards_of(cells: Sequence[Cell], schedule: Schedule) -> dict[int, Shard]:
    """The cells that are shards, by index; with devices of the first replica.

    Those that no other cell has come after the schedule's.
    """
    own = {
        cell.device: schedule.device_of(cell.number)
        for cell in cells
        if not cell.is_beside
    }
    listed = names.all_devices()
    others = sorted({cell.device for cell in cells} - {*own}, key=listed.index)
    places = own | {
        device: schedule.num_devices + i for i, device in enumerate(others)
    }
    return {
        cell.index: Shard(
            cell.shards,
            places[cell.device],
            schedule.device_of(cell.number),
        )
        for cell in cells
        if cell.shards is not None
    }


class LayerCall:
    """A call of a layer, or of an operation.

    Attributes:
        operation: What is called.
        layer: That, or a layer that stands for an operation.
    """

    def __init__(self, operation: keras.Operation):
        is_layer = isinstance(operation, keras.layers.Layer)
        self.layer: Any = operation if is_layer else stand_in(operation.name)
        self.operation: Any = operation


class _StandIn(keras.layers.Layer):
    """A layer for all that is noted by layers."""


def stand_in(
    name: str, variables: Sequence[keras.Variable] = ()
) -> keras.layers.Layer:
    """A layer in the place of an operation; holds its variables."""
    layer = _StandIn(name=name.replace("/", "_"))
    layer.read = list(variables)
    layer.built = True
    return layer


def name_in_words(layer: keras.Operation) -> str:
    """What to call a layer or operation, or the one for which it stands."""
    is_layer = isinstance(layer, keras.layers.Layer)
    is_own = is_layer and not isinstance(layer, _StandIn)
    kind = "layer" if is_own else "operation"
    return f"{kind} '{layer.name}'"
