"""A cell: consecutive layers on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals, notices
from tfgpipe.cells.step import Step, named
from tfgpipe.ending import may_end
from tfgpipe.failures import add_note


class Cell(keras.layers.Layer):
    """Calls its layers one after the other.

    The model does not track it: names and files know nothing about cells.

    Args:
        index: Position in the pipeline, from 0. With `remat_groups`, each group
            of a cell of the user's is such a cell.
        steps: Calls of its layers, in order.
        devices: Names of the devices that run them, one a replica.
        number: Of the user's cell, which errors name. Defaults to the index.

    Attributes:
        sequence: The layer of each step.
        device: The first of them, which has the variables that are not
            trained. `run/weights.py` shares out the others.
        borrowed: For each layer, the variables that it reads and does not
            list, as a function does that has another layer in its closure.
        traced_as: The indices of the cells, equal to this one, in whose names
            its operations run.
    """

    def __init__(
        self,
        index: int,
        steps: Sequence[Step],
        devices: Sequence[str],
        number: int | None = None,
    ):
        super().__init__(name=f"cell_{index}", autocast=False, dtype="float32")
        self.index = index
        self.number = index if number is None else number
        self.steps = tuple(steps)
        self.sequence = [step.layer for step in steps]
        self.borrowed: list[list[keras.Variable]] = [[] for _ in steps]
        self.traced_as = {index}
        self._told: set[str] = set()
        self.devices = tuple(devices)
        self.device = self.devices[0]
        self.supports_masking = True
        self.built = True

    def call(self, inputs: Any, before_layer: Callable, training: bool) -> Any:
        """Runs the steps; `before_layer(i)` is called before step i."""
        for i, step in enumerate(self.steps):
            may_end()
            before_layer(i)
            with (
                tf.name_scope(f"layer_{i}"),  # `failures.py` finds it
                self.naming(step.layer),
                internals.tracing_anew(),
            ):
                inputs = step(inputs, training)
        return inputs

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """Masks are the layers' own."""
        return None

    @property
    def weights_by_layer(self) -> list[list[keras.Variable]]:
        """The trainable variables of each layer, and those it borrows.

        As in Keras, a variable is trained if it says so itself: what is inside
        a layer that was made with `trainable=False` may be. And tapes must
        watch it: what was itself made with `trainable=False` never is trained.
        """
        return [
            [v for v in own if internals.is_trained(v)]
            for own in self._variables_by_layer
        ]

    @property
    def state(self) -> list[keras.Variable]:
        """All other variables: frozen weights, statistics, seeds, metrics."""
        variables = {
            id(v): v
            for layer, own in zip(self.sequence, self._variables_by_layer)
            for v in [*own, *layer.metrics_variables]
            if not internals.is_trained(v)
        }
        return list(variables.values())

    @property
    def all_borrowed(self) -> list[keras.Variable]:
        """The borrowed variables of all layers."""
        return [v for own in self.borrowed for v in own]

    @property
    def _variables_by_layer(self) -> list[list[keras.Variable]]:
        return [
            list({id(v): v for v in [*layer.variables, *borrowed]}.values())
            for layer, borrowed in zip(self.sequence, self.borrowed)
        ]

    @property
    def seeds(self) -> list[keras.Variable]:
        """The states of the layers' seed generators."""
        weights = {id(v) for layer in self.sequence for v in layer.weights}
        own = {
            id(v): v
            for layer in self.sequence
            for v in layer.variables
            if id(v) not in weights
        }
        return list(own.values())

    @property
    def metric_state(self) -> list[keras.Variable]:
        """The variables of the layers' own metrics."""
        return [v for layer in self.sequence for v in layer.metrics_variables]

    @property
    def normalizations(self) -> list[keras.layers.BatchNormalization]:
        """The batch normalisations that update their statistics."""
        found = {
            id(layer): layer
            for layer in internals.flat_layers(self)
            if isinstance(layer, keras.layers.BatchNormalization)
            and layer.trainable
        }
        return list(found.values())

    def part(self, index: int, step: Step) -> Cell:
        """A step as a cell of its own, which warns of nothing twice.

        Args:
            index: Its position among such cells.
            step: What it runs.
        """
        part = Cell(index, [step], self.devices, self.number)
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
        """Where in the pipeline a layer is."""
        devices = " or ".join(self.devices)
        return f"{named(layer)} of cell {self.number} on {devices}"

    def warn_of(self, layer: Any, what: str) -> None:
        """Warns of a layer by its name, of the same in it once."""
        name = named(layer)
        message = f"{name[0].upper()}{name[1:]} {what}"
        if message not in self._told:
            self._told.add(message)
            notices.warn(message)

    def check_by_itself(self, graph: Any) -> None:
        """Refuses what the layers take of other cells but their outputs.

        Args:
            graph: Of a function in which they were called.
        """
        if not internals.captures_of_strangers(graph):
            return
        raise ValueError(
            "A layer must take tensors of other layers as its inputs. "
            f"Received: cell {self.number} with the layers "
            f"{[layer.name for layer in self.sequence]}, one of which uses "
            "a tensor of another cell, such as one kept in an attribute. "
            "Hand it on in a nest, or put both layers into one cell with "
            "`layers_per_cell`."
        )
