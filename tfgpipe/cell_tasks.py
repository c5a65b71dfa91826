"""The tasks of a cell as TensorFlow functions, cut out of one graph.

    forward          outputs, and if asked for what the backward pass needs
    recompute        what the backward pass needs, again: re-materialisation
    backward         the gradients of inputs and weights
    input_gradient   the first half of `backward`: the cell before waits for it
    weight_gradient  the second half: what only the update needs

Re-materialisation by `tf.recompute_grad` would wait for the gradient before it
computes anything, makes sparse gradients dense, refuses boolean tensors, and
has no place for new state.

The sum of the gradients over micro-batches is an argument: the function adds
its own. So is a cast of a weight, as mixed precision makes, to be computed once
a mini-batch.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfgpipe import gradients
from tfgpipe.cell import Output
from tfgpipe.cell_function import Arguments
from tfgpipe.subgraph import Subfunction
from tfgpipe.traced_cell import TracedCell, by_reference, tensors


class CellTasks:
    """Runs the tasks of a cell.

    Args:
        traced: The cell's graph, which equal cells share.
        needs_dx: Whether the gradients of the inputs are wanted.
    """

    def __init__(self, traced: TracedCell, needs_dx: bool):
        self.traced = traced
        self._needs_dx = needs_dx

    @property
    def outputs(self) -> Output:
        """The outputs, tensors of the graph."""
        return self.traced.outputs

    @property
    def output_structure(self) -> Any:
        """See `CellFunction`."""
        return self.traced.output_structure

    @property
    def num_head_losses(self) -> int:
        """See `CellFunction`."""
        return self.traced.num_head_losses

    @property
    def is_split(self) -> bool:
        """Whether the backward pass has two halves."""
        return bool(self._dx) and not self.traced.recomputes_in_backward

    @property
    def _dx(self) -> list[tf.Tensor]:
        return tensors(self.traced.dx) if self._needs_dx else []

    def slice(self, fetches: list[tf.Tensor]) -> Subfunction:
        """The function that computes tensors of the graph."""
        key = tuple(t.ref() for t in fetches)
        return self.traced.function(key, [], fetches)

    def cast_weights(self, weights: list[Any]) -> list[Any]:
        """What to pass as flat weights: cast, where the cell only casts."""
        self.traced.finish()
        return [
            w if casts is None else tf.cast(w, casts[0].dtype)
            for w, casts in zip(weights, self.traced.casts)
        ]

    def forward(
        self, arguments: Arguments, keeps: bool
    ) -> tuple[Output, list[tf.Tensor]]:
        """Computes the outputs.

        Args:
            arguments: The cell's arguments.
            keeps: Whether to return what the backward pass needs.

        Returns:
            The outputs, and what the backward pass needs.
        """
        kept = self.traced.kept if keeps else []
        function = self.traced.function(
            ("forward", keeps),
            [],
            [*tensors(self.outputs), *kept],
            with_effects=True,
        )
        results = iter(function(self.traced.values(arguments)))
        output = _like(self.outputs, results)
        return output, list(results)

    def recompute(self, arguments: Arguments) -> list[tf.Tensor]:
        """Computes again what the backward pass needs."""
        kept = self.traced.kept
        if not kept or self.traced.recomputes_in_backward:
            return []
        function = self.traced.function("recompute", [], kept)
        return function(self.traced.values(arguments))

    def backward(
        self,
        arguments: Arguments,
        kept: list[tf.Tensor],
        dy: list[Any],
        dlosses: list[Any],
        sums: list[Any],
        m: int,
    ) -> tuple[list[Any], list[Any]]:
        """Computes the gradients.

        Args:
            arguments: The cell's arguments.
            kept: What `forward` or `recompute` returned. Where nothing is
                kept, it is computed again.
            dy: The gradients of the output tensors.
            dlosses: Those of the losses.
            sums: The gradients so far, see `gradients.py`; empty at first.
            m: Index of the micro-batch.

        Returns:
            The gradients of the input tensors, and the new sums. None where
            there are none.
        """
        values = self._values(arguments, kept, dy, dlosses)
        inputs = self.traced.kept if kept else []
        return self._summed(self._dx, inputs, values, sums, m)

    def input_gradient(
        self,
        arguments: Arguments,
        kept: list[tf.Tensor],
        dy: list[Any],
        dlosses: list[Any],
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """Computes the gradients of the inputs.

        Returns:
            The gradients, and what else `weight_gradient` needs.
        """
        function = self.traced.function(
            "input_gradient",
            self.traced.kept,
            [*self._dx, *self.traced.crossing],
        )
        results = iter(function(self._values(arguments, kept, dy, dlosses)))
        return _like(self.traced.dx, results), list(results)

    def weight_gradient(
        self,
        arguments: Arguments,
        kept: list[tf.Tensor],
        dy: list[Any],
        dlosses: list[Any],
        sums: list[Any],
        m: int,
    ) -> list[Any]:
        """Computes the gradients of the weights.

        Args:
            arguments: The cell's arguments.
            kept: What `forward` or `recompute` returned, and then what
                `input_gradient` did.
            dy: The gradients of the output tensors.
            dlosses: Those of the losses.
            sums: The gradients so far.
            m: Index of the micro-batch.

        Returns:
            The new sums.
        """
        values = self._values(arguments, kept, dy, dlosses)
        inputs = [*self.traced.kept, *self.traced.crossing]
        return self._summed([], inputs, values, sums, m)[1]

    def _values(
        self,
        arguments: Arguments,
        kept: list[tf.Tensor],
        dy: list[Any],
        dlosses: list[Any],
    ) -> dict[Any, Any]:
        traced = self.traced
        return {
            **traced.values(arguments),
            **by_reference([*traced.kept, *traced.crossing], kept),
            **by_reference(traced.dy, dy),
            **by_reference(traced.dlosses, dlosses),
        }

    def _summed(
        self,
        dx: list[tf.Tensor],
        inputs: list[tf.Tensor],
        values: dict[Any, Any],
        sums: list[Any],
        m: int,
    ) -> tuple[list[Any], list[Any]]:
        """Calls a function that adds the gradients of the weights to sums."""
        dw = self.traced.dw
        fetches = [*dx, *tensors(dw)]
        is_dense = [isinstance(d, tf.Tensor) for d in dw]
        # Sums that are not of the same kind are added outside.
        alike = all(
            d is None or gradients.is_sparse(d) == gradients.is_sparse(s)
            for d, s in zip(dw, sums)
        )
        inside = sums if alike else []
        places, place = [], len(dx)
        for d, dense in zip(dw, is_dense):
            if dense:
                places.append(place)
            place += len(tensors([d]))
        function = self.traced.function(
            ("backward", len(dx), len(inputs), bool(inside)),
            inputs,
            fetches,
            places if inside else (),
        )
        dense_sums = [s for s, dense in zip(inside, is_dense) if dense]
        results = iter(function(values, dense_sums))
        found = _like(self.traced.dx, results) if dx else []
        if not dx:
            found = [None] * len(self.traced.dx)
        combine = gradients.collect if inside or not sums else gradients.add
        new = _like(dw, results)
        return found, combine(sums, new, m, self.traced.repeated)


def _like(nest: Any, values: Any) -> Any:
    """A nest like this one of values taken from an iterator."""
    flat = tf.nest.flatten(nest, expand_composites=True)
    return tf.nest.pack_sequence_as(
        nest,
        [None if t is None else next(values) for t in flat],
        expand_composites=True,
    )
