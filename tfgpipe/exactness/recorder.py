"""What each layer got and gave on its device, in a step that is rehearsed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells import Boundary, Cell, is_continuous
from tfgpipe.exactness.difference import limit_of
from tfgpipe.rehearsal import ByLayers, LayerCall, Rehearsal


class Place:
    """A layer, and where in the pipeline it is.

    Args:
        cell: A cell of nothing else, see `ByLayers`.

    Attributes:
        step: What calls the layer.
        layer: The layer.
        cell: The cell.
        name: The layer with its cell and devices, in words.
        weights: The trainable variables that it reads.
        state: All others.
        normalizations: The batch normalisations in it.
        draws: Whether it draws random numbers.
    """

    def __init__(self, cell: Cell):
        (self.step,) = cell.steps
        self.layer = self.step.layer
        self.cell = cell
        self.name = cell.describe(self.layer)
        (self.weights,) = cell.weights_by_layer
        self.state = cell.state
        self.normalizations = cell.normalizations
        self.draws = bool(cell.seeds)
        layers = internals.flat_layers(self.layer)
        self._dtypes = {layer.compute_dtype for layer in layers}

    @property
    def own_variables(self) -> list[keras.Variable]:
        """All that are its layer's, or that it borrows."""
        return [*self.weights, *self.state]

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


class Call(NamedTuple):
    """A layer on one micro-batch: what came in and went out on its device.

    Attributes:
        inputs: What came in.
        structure: A nest like it.
        values: The variables that it could read, and their values by id.
        outputs: What went out.
        output_structure: A nest like it.
        losses: What it has added to the loss, numbers.
        dx: The gradients with respect to what came in, by position, as far as
            there are.
        dy: Those with respect to what went out.
        dlosses: Those with respect to what it has added to the loss.
    """

    inputs: Boundary
    structure: Any
    values: Mapping[int, Any]
    outputs: Boundary
    output_structure: Any
    losses: list[Any]
    dx: Mapping[int, Any]
    dy: Mapping[int, Any]
    dlosses: Mapping[int, Any]

    @classmethod
    def of(
        cls, place: Place, structures: Sequence[Any], call: LayerCall
    ) -> Call:
        """A call of a layer in a rehearsal.

        Args:
            place: The layer.
            structures: Nests like what came in and what went out.
            call: What was recorded.
        """
        structure, output_structure = structures
        values = {id(v): value for v, value in zip(place.state, call.state)}
        assigned = call.assigned or [None] * len(place.weights)
        for variable, new in zip(place.weights, assigned):
            known = variable.value if new is None else new
            values[id(variable)] = tf.convert_to_tensor(known)
        return cls(
            call.inputs,
            structure,
            values,
            call.outputs,
            output_structure,
            call.losses,
            *map(_known, (call.dx, call.dy, call.dlosses)),
        )


def _known(gradients: Sequence[Any]) -> dict[int, Any]:
    return {i: d for i, d in enumerate(gradients) if d is not None}


Recorded = Sequence[tuple[Place, list[Call]]]


def recorded_in(step: ByLayers, rehearsal: Rehearsal) -> Recorded:
    """The layers in order, each with its calls by micro-batch."""
    places = [Place(cell) for cell in step.cells[:-1]]
    structures = itertools.pairwise(step.structures)
    return [
        (place, [Call.of(place, own, call) for call in calls])
        for place, own, calls in zip(places, structures, rehearsal.calls)
    ]


def shares_of(recorded: Recorded) -> list[float]:
    """The share of the rows that each micro-batch has."""
    _, calls = recorded[0]
    sizes = [
        next(t.shape[0] for t in call.inputs.tensors if t is not None)
        for call in calls
    ]
    return [size / sum(sizes) for size in sizes]
