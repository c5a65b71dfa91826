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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.boundary import CellArguments, Output
from tfgpipe.graphs import (
    CellGraph,
    Gradient,
    GradientSums,
    TraceFindings,
    by_reference,
    tensors,
)
from tfgpipe.schedules import CellFacts


class CellTasks:
    """Makes the tasks of a cell; equal cells share their graph.

    With `needs_dx`, the gradients of the inputs are computed, too.
    """

    def __init__(self, cut: CellGraph, needs_dx: bool):
        self.graph = cut
        self.needs_dx = needs_dx

    @property
    def findings(self) -> TraceFindings:
        """What the layers were seen to do."""
        return self.graph.traced.findings

    def facts(
        self, has_backward: bool, synchronizes: bool = False
    ) -> CellFacts:
        """What the program of a step has to know of the cell."""
        cut = self.graph
        return CellFacts.of(
            has_backward,
            self.needs_dx,
            has_dx=bool(self._dx),
            can_be_split=cut.can_be_split,
            keeps=bool(cut.kept.slots) and not cut.recomputes_in_backward,
            synchronizes=synchronizes,
        )

    @property
    def _dx(self) -> list[tf.Tensor]:
        return tensors(self.graph.backward.dx) if self.needs_dx else []

    @property
    def weight_dtypes(self) -> list[tf.DType]:
        """The dtypes of the flat weights, or of what a cell only casts to."""
        return [t.dtype for t in self.graph.weights.tensors]

    def pack_weights(self, weights: list[list[Any]]) -> Any:
        """What tasks take for weights that are cast, a list a layer."""
        return self.graph.weights.pack(tf.nest.flatten(weights))

    def forward(self, arguments: CellArguments, keeps: bool) -> TaskCall:
        """A task that returns the `Output`, and what is kept.

        The arguments have packed weights; `keeps` says whether to return what
        the backward pass needs.
        """
        cut, outputs = self.graph, self.graph.traced.outputs
        kept = [cut.kept] if keeps else []
        if keeps and cut.recomputes_in_backward:
            cut.check_kept()
        # In a row: the tensors of the output, the totals, what is kept.
        function = cut.function(
            ("forward", keeps),
            [],
            [*tensors(outputs), *cut.totals, *kept],
            with_effects=True,
        )

        def finish(results: list[Any]) -> tuple[Output, KeptValues]:
            values = iter(results)
            output = _like(outputs, values)
            totals = [next(values) for _ in cut.totals]
            return output, KeptValues(totals, next(values, None))

        return TaskCall(function, cut.values(arguments), (), finish)

    def recompute(self, arguments: CellArguments, kept: KeptValues) -> TaskCall:
        """A task that computes again what the backward pass keeps.

        `kept` is what `forward` did keep.
        """
        cut = self.graph
        function = cut.function("recompute", cut.totals, [cut.kept])
        return TaskCall(
            function,
            self._values(arguments, kept),
            (),
            lambda results: kept._replace(values=results[0]),
        )

    def backward(
        self,
        arguments: CellArguments,
        kept: KeptValues,
        dy: Sequence[Any],
        dlosses: Sequence[tf.Tensor],
        sums: GradientSums | None,
        m: int,
    ) -> TaskCall:
        """A task that returns the gradients of the inputs, and the new sums.

        What `forward` or `recompute` did not keep is computed again. `dy` are
        the gradients of the output tensors, None where there is none, and
        `dlosses` those of the losses, scalars; `sums` are those so far, None at
        first. None among the results where an input has no gradient.
        """
        values = self._values(arguments, kept, dy, dlosses)
        return self._summed(self._dx, values, sums, m)

    def input_gradient(
        self,
        arguments: CellArguments,
        kept: KeptValues,
        dy: Sequence[Any],
        dlosses: Sequence[tf.Tensor],
    ) -> TaskCall:
        """A task that returns the inputs' gradients, and what is kept by now.

        That has what was missing in it, too.
        """
        cut = self.graph
        has_kept = kept.values is not None
        # What was dropped is computed here, and handed to the other half.
        function = cut.function(
            ("input_gradient", has_kept),
            [*cut.totals, cut.kept] if has_kept else cut.totals,
            [*self._dx, cut.crossing, *([] if has_kept else [cut.kept])],
        )

        def finish(results: list[Any]) -> tuple[list[Any], KeptValues]:
            values = iter(results)
            dx = _like(list(self.graph.backward.dx), values)
            crossing = next(values)
            known = kept.values if has_kept else next(values)
            return dx, kept._replace(crossing=crossing, values=known)

        values = self._values(arguments, kept, dy, dlosses)
        return TaskCall(function, values, (), finish)

    def weight_gradient(
        self,
        arguments: CellArguments,
        kept: KeptValues,
        dy: Sequence[Any],
        dlosses: Sequence[tf.Tensor],
        sums: GradientSums | None,
        m: int,
    ) -> TaskCall:
        """A task that returns the new sums of weights' gradients.

        It takes what `backward` does.
        """
        values = self._values(arguments, kept, dy, dlosses)
        work = self._summed([], values, sums, m)
        return work._replace(finish=lambda results: work.finish(results)[1])

    def _values(
        self,
        arguments: CellArguments,
        kept: KeptValues,
        dy: Sequence[Any] = (),
        dlosses: Sequence[Any] = (),
    ) -> dict[Any, Any]:
        """What a task may take, by what it is of the graph."""
        cut = self.graph
        carried = {cut.kept: kept.values, cut.crossing: kept.crossing}
        return {
            **cut.values(arguments),
            **by_reference(cut.totals, kept.totals),
            **{
                key: value
                for key, value in carried.items()
                if value is not None
            },
            **by_reference(self.graph.backward.dy, dy),
            **by_reference(self.graph.backward.dlosses, dlosses),
        }

    def _summed(
        self,
        dx: list[tf.Tensor],
        values: dict[Any, Any],
        sums: GradientSums | None,
        m: int,
    ) -> TaskCall:
        """A function that adds the gradients of the weights to sums."""
        cut, backward = self.graph, self.graph.backward
        sparse = [d._replace(dense=None) for d in backward.dw]
        # What is not among the values is computed again, within the function.
        kept = [one for one in (cut.kept, cut.crossing) if one in values]
        function = cut.function(
            ("backward", len(dx), len(kept), sums is None),
            [*cut.totals, *kept],
            [*dx, cut.sums, *tensors(sparse)],
            sums and cut.sums,
        )

        # results: dx, the packed dense sums, the slices of the sparse ones.
        def finish(results: list[Any]) -> tuple[list[Any], GradientSums]:
            left = iter(results)
            found = _like(
                list(backward.dx if dx else [None] * len(backward.dx)), left
            )
            dense = next(left)
            own = [
                gradient.of_micro_batch(m, repeated)
                for gradient, repeated in zip(
                    _like(sparse, left), backward.repeated
                )
            ]
            if sums is not None:
                own = [a.plus(b) for a, b in zip(sums.sparse, own)]
            return found, GradientSums(dense, own)

        return TaskCall(function, values, sums.dense if sums else (), finish)

    def unpack_sums(self, sums: GradientSums) -> list[Gradient]:
        """The finished sums of the weights."""
        dense = iter(self.graph.sums.unpack(sums.dense))
        return [
            total if d.dense is None else d._replace(dense=next(dense))
            for d, total in zip(self.graph.backward.dw, sums.sparse)
        ]


def _like(nest: Any, values: Iterator[Any]) -> Any:
    """A nest like this one of values taken from an iterator."""
    flat = tf.nest.flatten(nest, expand_composites=True)
    return tf.nest.pack_sequence_as(
        nest,
        [None if t is None else next(values) for t in flat],
        expand_composites=True,
    )


class KeptValues(NamedTuple):
    """What later tasks of a micro-batch take of earlier ones.

    Attributes:
        totals: What was added up over replicas.
        values: What `CellGraph.kept` names, packed; None if it was dropped.
        crossing: What `CellGraph.crossing` names, packed; None before it is
            there.
    """

    totals: list[tf.Tensor]
    values: list[tf.Tensor] | None = None
    crossing: list[tf.Tensor] | None = None


class TaskCall(NamedTuple):
    """A task, ready to be run: a call without arguments.

    Attributes:
        function: A `Subfunction`; for a cell that takes moments over replicas
            `StagedFunction`, see `run/chain.py`.
        values: What it takes, by what that is of the graph.
        sums: The sums of gradients so far, packed.
        finish: Makes what the task returns of what the function does.
    """

    function: Any
    values: dict[Any, Any]
    sums: Sequence[tf.Tensor]
    finish: Callable[[list[Any]], Any]

    def __call__(self) -> Any:
        """Runs the task, and returns what it is to return."""
        return self.finish(self.function(self.values, self.sums))
