"""What each layer got and gave on its device; the same, computed on the host.

Given the very inputs, values of variables and gradients that the layer got
there, a difference is that layer's own: nothing of it propagates. Keras's layer
runs as it is; what it assigns is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.boundary import Boundary, copied, is_continuous
from tfgpipe.cells import Cell, as_number
from tfgpipe.exactness.report import limit_of
from tfgpipe.graphs import as_tensor
from tfgpipe.micro_batches import first_tensor
from tfgpipe.model import ByLayers, LayerRun, Rehearsal
from tfgpipe.state import StateScope


class LayerPlace:
    """A layer, and where in the pipeline it is.

    Attributes:
        step: What calls the layer.
        cell: A cell of nothing else, see `ByLayers`.
        structure: A nest like what comes in.
        output_structure: A nest like what goes out.
        name: The layer with its cell and devices, in words.
        weights: The trainable variables that it reads.
        state: All others.
        normalizations: The batch normalisations in it.
        draws: Whether it draws random numbers.
    """

    def __init__(self, cell: Cell, structure: Any, output_structure: Any):
        self.structure, self.output_structure = structure, output_structure
        (self.step,) = cell.calls
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

        `on_host` if none of the tensors was computed on a device.
        """
        dtypes = {t.dtype.name for t in tensors if is_continuous(t)}
        known = {name for name in self._dtypes if name is not None}
        if on_host:
            return limit_of(dtypes | known)
        return max(
            limit_of(dtypes | known, device) for device in self.cell.devices
        )


Recorded = Sequence[tuple[LayerPlace, list[LayerRun]]]


def recorded_in(step: ByLayers, rehearsal: Rehearsal) -> Recorded:
    """The layers in order, each with its calls by micro-batch."""
    structures = step.structures
    places = map(LayerPlace, step.cells[:-1], structures, structures[1:])
    return [*zip(places, rehearsal.calls)]


def shares_of(recorded: Recorded) -> list[float]:
    """The share of the rows that each micro-batch has."""
    _, calls = recorded[0]
    sizes = [first_tensor(call.inputs.tensors).shape[0] for call in calls]
    return [size / sum(sizes) for size in sizes]


class Replay(NamedTuple):
    """What a step comes to on the host.

    Attributes:
        outputs: What goes out.
        losses: What the layer adds to the loss, numbers.
        assigned: New values of variables, by id.
        dx: The gradients that were wanted, dense, by position.
        dw: Gradients by the trainable variables, dense, by id.
    """

    outputs: Boundary
    losses: list[tf.Tensor]
    assigned: dict[int, tf.Tensor]
    dx: dict[int, tf.Tensor]
    dw: dict[int, tf.Tensor]


def replayed(
    place: LayerPlace,
    given: LayerRun,
    dy_of: Callable[[Boundary], Mapping[int, Any]] | None = None,
) -> Replay:
    """Runs a step on the host, forward and backward.

    It is given what a call was; in the place of `dy` what `dy_of` returns for
    what goes out.
    """
    weights, state = place.weights, place.state
    known = [
        tf.convert_to_tensor(v.value if new is None else new)
        for v, new in zip(weights, given.assigned or [None] * len(weights))
    ]
    with tf.device(HOST), place.cell.naming(place.layer):
        inputs = [copied(t) for t in given.inputs.tensors]
        masks = [copied(t) for t in given.inputs.masks]
        values = [*map(copied, known)]
        scope = StateScope(
            [*zip(state, map(copied, given.state))], place.cell.seeds
        )
        sources = [t for t in [*inputs, *values] if is_continuous(t)]
        with (
            tf.GradientTape(watch_accessed_variables=False) as tape,
            scope,
            internals.noting_losses(place.cell.model_layers) as added,
            internals.tracing_anew(),
        ):
            tape.watch(sources)
            scope.use_weights(0, zip(weights, values, [None] * len(weights)))
            nest = Boundary(inputs, masks).nest(place.structure)
            made = place.step(nest, training=True)
            outputs = Boundary.of(made)
            losses = [as_number(loss) for loss in added(scope.losses)]
        wanted = [inputs[i] for i in given.dx]
        dy = given.dy if dy_of is None else dy_of(outputs)
        pairs = [(outputs.tensors[i], d) for i, d in dy.items()]
        pairs += [(losses[i], d) for i, d in given.dlosses.items()]
        found = _gradients(tape, pairs, [*wanted, *values])
        assigned = {
            id(v): value
            for v, value in zip(
                [*weights, *state], scope.new_values([*weights, *state])
            )
            if value is not None
        }
        return Replay(
            outputs,
            losses,
            assigned,
            dict(zip(given.dx, found)),
            {id(v): d for v, d in zip(weights, found[len(wanted) :])},
        )


def _gradients(
    tape: tf.GradientTape,
    pairs: list[tuple[tf.Tensor, Any]],
    sources: list[tf.Tensor],
) -> list[Any]:
    """Gradients with respect to the sources, dense; zeros where none is.

    `pairs` are of what is differentiated, each with its own gradient.
    """
    if not pairs:
        return [tf.zeros_like(t) for t in sources]
    found = tape.gradient(
        [t for t, _ in pairs],
        sources,
        [copied(as_tensor(d)) for _, d in pairs],
    )
    return [
        tf.zeros_like(t) if d is None else as_tensor(d)
        for t, d in zip(sources, found)
    ]


HOST = "CPU:0"


def first_axes(boundary: Boundary) -> Boundary:
    """Rows along axis 0, as the data have them."""
    return Boundary([0] * len(boundary.tensors), [0] * len(boundary.masks))


def axes_of(parts: Sequence[Boundary], whole: Boundary) -> Boundary:
    """Along which axes parts make a whole.

    None where a tensor is the same in all parts and in the whole, such as
    positions, or a number.
    """
    return Boundary(
        *(
            [_axis(own, all_rows) for *own, all_rows in zip(*boundaries)]
            for boundaries in zip(*parts, whole)
        )
    )


def _axis(parts: Sequence[Any], whole: Any) -> int | None:
    if whole is None or any(t is None for t in parts):
        return None
    shapes = [tuple(t.shape) for t in parts]
    if any(len(shape) != len(whole.shape) for shape in shapes):
        return None
    for axis, size in enumerate(whole.shape):
        sizes = [shape[axis] for shape in shapes]
        if size == sum(sizes) != sizes[0]:
            return axis
    return None


def joined(parts: Sequence[Boundary], axes: Boundary) -> Boundary:
    """The rows of all parts."""
    return Boundary(
        *(
            [_all_of(own, axis) for *own, axis in zip(*boundaries)]
            for boundaries in zip(*parts, axes)
        )
    )


def _all_of(parts: Sequence[Any], axis: int | None) -> Any:
    if axis is None or parts[0] is None or len(parts) == 1:
        return parts[0]
    with tf.device(HOST):
        return tf.concat(parts, axis)


def joined_gradients(parts: Sequence[Any], axis: int | None) -> tf.Tensor:
    """Gradients by rows, or by what all parts have in common."""
    with tf.device(HOST):
        dense = [as_tensor(d) for d in parts]
        return tf.add_n(dense) if axis is None else tf.concat(dense, axis)


def summed(gradients: Sequence[Any]) -> Any:
    """The sum of those that are not None, or None."""
    known = [d for d in gradients if d is not None]
    with tf.device(HOST):
        return tf.add_n(known) if known else None


def first_repeated(
    whole: Boundary, first: Boundary, axes: Boundary
) -> Boundary:
    """The whole, with the rows of the first part in the place of others."""

    def repeated(tensor: Any, part: Any, axis: int | None) -> Any:
        if axis is None or tensor is None:
            return tensor
        with tf.device(HOST):
            indices = tf.range(tensor.shape[axis]) % part.shape[axis]
            return tf.gather(part, indices, axis=axis)

    return Boundary(
        *(
            [repeated(*own) for own in zip(*boundaries)]
            for boundaries in zip(whole, first, axes)
        )
    )


def first_rows(whole: Boundary, first: Boundary, axes: Boundary) -> list[Any]:
    """The tensors of a whole, of which the rows of the first part alone."""
    with tf.device(HOST):
        return [
            tensor
            if axis is None
            else tf.gather(tensor, tf.range(part.shape[axis]), axis=axis)
            for tensor, part, axis in zip(
                whole.tensors, first.tensors, axes.tensors
            )
        ]
