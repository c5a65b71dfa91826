"""What goes into a cell for a micro-batch, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from keras import tree

from tfgpipe import internals


class Boundary(NamedTuple):
    """What crosses into or out of a cell: a flat nest, and its Keras masks."""

    tensors: list[Any]
    masks: list[Any]

    @classmethod
    def of(cls, nest: Any) -> Boundary:
        """The boundary that carries a nest of tensors."""
        tensors = tree.flatten(nest)
        return cls(tensors, [internals.get_mask(t) for t in tensors])

    def nest(self, structure: Any) -> Any:
        """The nest, with new tensors that carry the masks.

        What was one tensor, see `structure_of`, is one again.
        """
        tensors = [*map(copied, self.tensors)]
        for tensor, mask in zip(tensors, self.masks):
            if mask is not None:
                internals.set_mask(tensor, mask)
        return tree.map_structure(lambda i: tensors[i], structure)


class Output(NamedTuple):
    """What the forward function of a cell returns for a micro-batch.

    Attributes:
        tensors: The outputs, flat.
        masks: Their Keras masks or None.
        state: New values of `CellFunction.state`, None where not assigned.
        weights: New values of the flat weights, None where not assigned.
        losses: Scalars to be minimised, the head's first, then the layers'.
        counts: What the head's losses are to be divided by.
        moments: For every batch normalisation, its calls' moments.
    """

    tensors: list[Any]
    masks: list[Any]
    state: list[Any]
    weights: list[Any]
    losses: list[Any]
    counts: list[Any]
    moments: list[Any]


class CellArguments(NamedTuple):
    """What a cell is computed from.

    Attributes:
        inputs: What crosses into the cell.
        weights: Values of the trainable variables, a list a layer.
        state: Values of all other variables.
        labels: What the head takes, a nest or None.
        assigned: For each flat weight what a layer of an earlier cell has
            assigned to it, None where none did; empty if none did at all.
    """

    inputs: Boundary
    weights: list[list[Any]]
    state: list[Any]
    labels: Any
    assigned: Sequence[Any] = ()

    def sources(self, with_inputs: bool) -> list[Any]:
        """What the losses are differentiated by: inputs, then weights."""
        inputs = self.inputs.tensors if with_inputs else []
        return [t for t in inputs if is_continuous(t)] + tree.flatten(
            self.weights
        )

    def specs(self, of_rows: Callable[[Any], tf.TensorSpec]) -> CellArguments:
        """Shapes and dtypes.

        Args:
            of_rows: Makes those of what has a row for each of the batch's.
        """

        def batched(tensor: Any) -> Any:
            return None if tensor is None else of_rows(tensor)

        def exact(tensor: Any) -> Any:
            return tf.TensorSpec(tensor.shape, tensor.dtype)

        return CellArguments(
            inputs=tf.nest.map_structure(batched, self.inputs),
            weights=tf.nest.map_structure(exact, self.weights),
            state=tf.nest.map_structure(exact, self.state),
            labels=tf.nest.map_structure(batched, self.labels),
            assigned=[None if t is None else exact(t) for t in self.assigned],
        )


def copied(tensor: Any) -> Any:
    """An identity of a tensor, on the current device; None of None."""
    return None if tensor is None else tf.identity(tensor)


def structure_of(nest: Any) -> Any:
    """A nest like this one, with the position of each leaf in the flat nest.

    A tensor that comes several times has the position at which it came first:
    if a layer takes off its mask, as attentions do, none of them has one.
    """
    flat = tree.flatten(nest)
    places = {id(leaf): i for i, leaf in reversed([*enumerate(flat)])}
    found = [
        places[id(leaf)] if tf.is_tensor(leaf) else i
        for i, leaf in enumerate(flat)
    ]
    return tree.pack_sequence_as(nest, found)


def is_continuous(tensor: Any) -> bool:
    """Whether something is a tensor that may have a gradient."""
    return tensor is not None and (
        tensor.dtype.is_floating or tensor.dtype.is_complex
    )
