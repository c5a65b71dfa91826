"""What each layer got and gave on its device, in a step that is rehearsed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import (
    Boundary,
    Cell,
    Step,
    current_scope,
    is_continuous,
    structure_of,
    with_gradient_told,
    with_gradients_told,
)
from tfgpipe.exactness.difference import limit_of


class Place:
    """A step, and where in the pipeline it is.

    Args:
        cell: Its cell.
        index: Its position there.

    Attributes:
        step: The step.
        layer: Its layer.
        cell: Its cell.
        name: The layer with its cell and devices, in words.
        normalizations: The batch normalisations in it.
        draws: Whether it draws random numbers.
    """

    def __init__(self, cell: Cell, index: int):
        self.step: Step = cell.steps[index]
        self.layer = self.step.layer
        self.cell = cell
        self.name = cell.describe(self.layer)
        self._index = index
        self._known: tuple[int, Any] = (-1, None)
        layers = internals.flat_layers(self.layer)
        self.normalizations = [
            layer
            for layer in cell.normalizations
            if any(layer is own for own in layers)
        ]
        seeds = {id(v) for v in cell.seeds}
        self.draws = any(id(v) in seeds for v in self.layer.variables)
        self._dtypes = {layer.compute_dtype for layer in layers}

    @property
    def variables(self) -> tuple[list[keras.Variable], list[keras.Variable]]:
        """The trainable ones that it reads, and all others of its cell.

        A rehearsal may find out that a cell borrows some.
        """
        num_borrowed = len(self.cell.all_borrowed)
        if self._known[0] != num_borrowed:
            weights = self.cell.weights_by_layer[self._index]
            self._known = num_borrowed, (weights, self.cell.state)
        return self._known[1]

    @property
    def own_variables(self) -> list[keras.Variable]:
        """All that are its layer's, or that it borrows."""
        weights, _ = self.variables
        return [
            *self.layer.variables,
            *self.layer.metrics_variables,
            *weights,
        ]

    def limit(self, tensors: Sequence[Any], on_host: bool = False) -> float:
        """From where on its numbers differ by more than rounding.

        Args:
            tensors: Some of them.
            on_host: Whether none of them was computed on a device.
        """
        dtypes = {t.dtype.name for t in tensors if is_continuous(t)}
        known = {name for name in self._dtypes if name is not None}
        if on_host:
            return limit_of(dtypes | known)
        return max(
            limit_of(dtypes | known, device) for device in self.cell.devices
        )


class Call:
    """A step on one micro-batch: what came in and went out on its device.

    Attributes:
        inputs: What came in.
        structure: A nest like it.
        training: What the layer was told.
        values: The variables that it could read, and their values by id.
        outputs: What went out.
        given: The same as a nest, for the next step.
        output_structure: A nest like it.
        dx: The gradients with respect to what came in, by position, as far as
            they passed.
        dy: Those with respect to what went out.
        losses: What it has added to the loss.
        dlosses: The gradients with respect to that.
    """

    outputs: Boundary

    def __init__(self, place: Place, inputs: Any, training: bool):
        scope = current_scope()
        known = scope.state_mapping
        self.inputs = Boundary.of(inputs)
        self.structure = structure_of(inputs)
        self.values = {
            id(v): known[id(v)]
            for own in place.variables
            for v in own
            if id(v) in known
        }
        self.dx: dict[int, Any] = {}
        self.dy: dict[int, Any] = {}
        self.dlosses: dict[int, Any] = {}
        self.training = training
        num_before = len(scope.losses)
        given = with_gradients_told(inputs, self.dx.__setitem__)
        made = place.step(given, training)
        self.losses = [
            tf.convert_to_tensor(loss) for loss in scope.losses[num_before:]
        ]
        scope.losses[num_before:] = [
            with_gradient_told(
                loss, functools.partial(self.dlosses.__setitem__, i)
            )
            if is_continuous(loss)
            else loss
            for i, loss in enumerate(self.losses)
        ]
        self.outputs = Boundary.of(made)
        self.output_structure = structure_of(made)
        self.given = with_gradients_told(made, self.dy.__setitem__)


class Recorder:
    """Runs steps for `model.rehearse`, and notes their calls."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], Place] = {}
        self._calls: dict[tuple[int, int], list[Call]] = {}

    def __call__(self, cell: Cell, i: int, inputs: Any, training: bool) -> Any:
        """Runs step i of a cell."""
        if not tf.executing_eagerly():  # it is traced once, for lookups
            return cell.steps[i](inputs, training)
        key = cell.index, i
        place = self._places.setdefault(key, Place(cell, i))
        call = Call(place, inputs, training)
        self._calls.setdefault(key, []).append(call)
        return call.given

    def recorded(self, count: int) -> list[tuple[Place, list[Call]]]:
        """The steps in order, each with its calls in that of micro-batches.

        Args:
            count: How many micro-batches there are. What was called before is
                no part of it: a cell that is found to borrow variables begins
                again.
        """
        return [
            (self._places[key], calls[-count:])
            for key, calls in sorted(self._calls.items())
        ]


Recorded = Sequence[tuple[Place, list[Call]]]


def shares_of(recorded: Recorded) -> list[float]:
    """The share of the rows that each micro-batch has."""
    _, calls = recorded[0]
    sizes = [
        next(t.shape[0] for t in call.inputs.tensors if t is not None)
        for call in calls
    ]
    return [size / sum(sizes) for size in sizes]
