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
a mini-batch. Where there are many tensors, they go in bundles.

A task is a generator: where it adds up over replicas, see `moments.py`, it
yields its own tensors, and is sent the totals. The recomputation knows them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import gradients
from tfgpipe.bundle import Bundle, by_reference, tensors
from tfgpipe.cell_values import Arguments, Output
from tfgpipe.failures import out_of_turn
from tfgpipe.stages import Exchange
from tfgpipe.subfunction import Subfunction
from tfgpipe.traced_cell import TracedCell


class Sums(NamedTuple):
    """The sums of gradients so far.

    Attributes:
        dense: Those of `TracedCell.sums`, packed.
        sparse: For each weight what is sparse, see `gradients.py`, or None.
    """

    dense: list[tf.Tensor]
    sparse: list[Any]


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
        with out_of_turn():
            return self.traced.function(key, [], fetches).whole

    @property
    def weight_dtypes(self) -> list[tf.DType]:
        """Those of the flat weights; where the cell only casts, of the casts.

        No operation may be added to the cell after this.
        """
        self.traced.finish()
        return [t.dtype for t in self.traced.weights.tensors]

    def pack_weights(self, weights: list[list[Any]]) -> Any:
        """What tasks take for weights that are cast, a list a layer."""
        return self.traced.weights.pack(tf.nest.flatten(weights))

    def forward(self, arguments: Arguments, keeps: bool) -> Exchange:
        """Computes the outputs.

        Args:
            arguments: The cell's arguments, with packed weights.
            keeps: Whether to return what the backward pass needs.

        Returns:
            The outputs; the totals over replicas; and what the backward pass
            needs, packed, in a list; an empty one if that was not asked for.
        """
        totals = self.traced.totals
        kept = [self.traced.kept] if keeps else []
        function = self.traced.function(
            ("forward", keeps),
            [],
            [*tensors(self.outputs), *totals, *kept],
            with_effects=True,
        )
        results = iter((yield from function(self.traced.values(arguments))))
        output = _like(self.outputs, results)
        return output, [next(results) for _ in totals], list(results)

    def recompute(self, arguments: Arguments) -> Exchange:
        """Computes again what the backward pass needs, as `forward` does."""
        kept = self.traced.kept
        if self.traced.recomputes_in_backward:
            return []
        if not kept.slots:
            return [[]]
        function = self.traced.function("recompute", self.traced.totals, [kept])
        return (yield from function(self.traced.values(arguments)))

    def backward(
        self,
        arguments: Arguments,
        kept: list[Any],
        dy: list[Any],
        dlosses: list[Any],
        sums: Sums | None,
        m: int,
    ) -> Exchange:
        """Computes the gradients.

        Args:
            arguments: The cell's arguments.
            kept: What `forward` or `recompute` returned. Where nothing is
                kept, it is computed again.
            dy: The gradients of the output tensors.
            dlosses: Those of the losses.
            sums: The gradients so far; None at first.
            m: Index of the micro-batch.

        Returns:
            The gradients of the input tensors, None where there are none, and
            the new sums.
        """
        values = self._values(arguments, kept, dy, dlosses)
        inputs = [self.traced.kept] if kept else []
        return (yield from self._summed(self._dx, inputs, values, sums, m))

    def input_gradient(
        self,
        arguments: Arguments,
        kept: list[Any],
        dy: list[Any],
        dlosses: list[Any],
    ) -> Exchange:
        """Computes the gradients of the inputs.

        Returns:
            The gradients, and what else `weight_gradient` needs.
        """
        function = self.traced.function(
            "input_gradient",
            [*self.traced.totals, self.traced.kept],
            [*self._dx, self.traced.crossing],
        )
        values = self._values(arguments, kept, dy, dlosses)
        results = iter((yield from function(values)))
        return _like(self.traced.dx, results), list(results)

    def weight_gradient(
        self,
        arguments: Arguments,
        kept: list[Any],
        dy: list[Any],
        dlosses: list[Any],
        sums: Sums | None,
        m: int,
    ) -> Exchange:
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
        inputs = [self.traced.kept, self.traced.crossing]
        return (yield from self._summed([], inputs, values, sums, m))[1]

    def _values(
        self,
        arguments: Arguments,
        kept: list[Any],
        dy: list[Any],
        dlosses: list[Any],
    ) -> dict[Any, Any]:
        traced = self.traced
        return {
            **traced.values(arguments),
            **dict(zip([traced.kept, traced.crossing], kept)),
            **by_reference(traced.dy, dy),
            **by_reference(traced.dlosses, dlosses),
        }

    def _summed(
        self,
        dx: list[tf.Tensor],
        inputs: list[Bundle],
        values: dict[Any, Any],
        sums: Sums | None,
        m: int,
    ) -> Exchange:
        """Calls a function that adds the gradients of the weights to sums."""
        traced = self.traced
        sparse = [d if gradients.is_sparse(d) else None for d in traced.dw]
        function = traced.function(
            ("backward", len(dx), len(inputs), sums is None),
            [*traced.totals, *inputs],
            [*dx, traced.sums, *tensors(sparse)],
            sums and traced.sums,
        )
        run = function(values, sums.dense if sums else ())
        results = iter((yield from run))
        found = _like(traced.dx if dx else [None] * len(traced.dx), results)
        return found, Sums(
            next(results),
            gradients.collect(
                sums.sparse if sums else [],
                _like(sparse, results),
                m,
                traced.repeated,
            ),
        )

    def unpack_sums(self, sums: Sums) -> list[Any]:
        """The finished sums of the weights, see `gradients.py`."""
        dense = iter(self.traced.sums.unpack(sums.dense))
        return [
            next(dense) if isinstance(d, tf.Tensor) else total
            for d, total in zip(self.traced.dw, sums.sparse)
        ]


def _like(nest: Any, values: Any) -> Any:
    """A nest like this one of values taken from an iterator."""
    flat = tf.nest.flatten(nest, expand_composites=True)
    return tf.nest.pack_sequence_as(
        nest,
        [None if t is None else next(values) for t in flat],
        expand_composites=True,
    )
