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

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.graphs import CellFunctions, Gradient, GradientSums, Part, tensors
from tfgpipe.schedules import CellFacts


class CellTasks:
    """Makes the tasks of a cell; equal cells share what is cut out.

    Values go by the references of the tensors of the model's graph: `values`
    are those that are known of a micro-batch.

    Attributes:
        part: The cell's own.
        functions: What is cut out, of this part or of an equal one.
    """

    def __init__(self, part: Part, functions: CellFunctions):
        self.part = part
        self.functions = functions
        first = functions.part
        self._gives = list(zip(part.gives, first.gives))
        # What another function takes besides, of the graph that was cut.
        self._shows: list[tf.Tensor] = []
        # The tensors of the part from which it was cut, and its own.
        self._taken = [
            *zip(first.takes, part.takes),
            *zip(first.takes_back, part.takes_back),
        ]

    def facts(
        self, has_backward: bool, needs_dx: bool, synchronizes: bool = False
    ) -> CellFacts:
        """What the program of a step has to know of the cell."""
        cut = self.functions
        return CellFacts.of(
            has_backward,
            needs_dx,
            has_dx=bool(self.part.gives_back),
            can_be_split=cut.can_be_split,
            keeps=bool(cut.kept.slots) and not cut.recomputes_in_backward,
            synchronizes=synchronizes,
        )

    def hide(self, tensors: Sequence[Any]) -> None:
        """Has forward tasks return none of these, which nothing else takes."""
        hidden = {t.ref() for t in tensors if t is not None}
        self._gives = [
            (t, first) for t, first in self._gives if t.ref() not in hidden
        ]

    @property
    def weight_dtypes(self) -> list[tf.DType]:
        """The dtypes of the weights, or of what a cell only casts them to."""
        return [t.dtype for t in self.functions.weights.tensors]

    @property
    def awaits(self) -> list[tf.Tensor]:
        """What a forward task needs of the graph before it can run."""
        return self.part.takes

    def pack_weights(self, weights: list[Any]) -> Any:
        """What tasks take for weights, which are cast already."""
        return self.functions.weights.pack(weights)

    def forward(
        self, values: Mapping[Any, Any], weights: Any, keeps: bool
    ) -> TaskCall:
        """A task that returns what the cell gives, and what is kept.

        `weights` are packed; `keeps` says whether to return what the backward
        pass needs.
        """
        cut = self.functions
        kept = [cut.kept] if keeps else []
        gives = [first for _, first in self._gives]
        # In a row: what it gives and shows, the totals, what is kept.
        function = cut.function(
            ("forward", keeps, bool(self._shows), len(gives)),
            [],
            [*gives, *self._shows, *cut.totals, *kept],
            with_effects=True,
        )

        def finish(results: list[Any]) -> tuple[dict[Any, Any], KeptValues]:
            left = iter(results)
            given = {t.ref(): next(left) for t, _ in self._gives}
            shown = [next(left) for _ in self._shows]
            totals = [next(left) for _ in cut.totals]
            return given, KeptValues(totals, next(left, None), shown=shown)

        return TaskCall(function, self.values(values, weights), (), finish)

    def metrics(
        self, values: Mapping[Any, Any], weights: Any, kept: KeptValues
    ) -> TaskCall | None:
        """What computes metrics that `forward` does not, or None."""
        return None

    def recompute(
        self, values: Mapping[Any, Any], weights: Any, kept: KeptValues
    ) -> TaskCall:
        """A task that computes again what the backward pass keeps.

        `kept` is what `forward` did keep.
        """
        cut = self.functions
        function = cut.function("recompute", cut.totals, [cut.kept])
        return TaskCall(
            function,
            self.values(values, weights, kept),
            (),
            lambda results: kept._replace(values=results[0]),
        )

    def backward(
        self,
        values: Mapping[Any, Any],
        weights: Any,
        kept: KeptValues,
        sums: GradientSums | None,
        m: int,
    ) -> TaskCall:
        """A task that returns what goes to earlier cells, and the new sums.

        What `forward` or `recompute` did not keep is computed again. `sums` are
        those of the gradients so far, None at first.
        """
        return self._summed(True, self.values(values, weights, kept), sums, m)

    def input_gradient(
        self, values: Mapping[Any, Any], weights: Any, kept: KeptValues
    ) -> TaskCall:
        """A task that returns what goes to earlier cells, and what is kept.

        That has what was missing in it, too.
        """
        cut = self.functions
        has_kept = kept.values is not None
        # What was dropped is computed here, and handed to the other half.
        function = cut.function(
            ("input_gradient", has_kept),
            [*cut.totals, cut.kept] if has_kept else cut.totals,
            [
                *cut.part.gives_back,
                cut.crossing,
                *([] if has_kept else [cut.kept]),
            ],
        )

        def finish(results: list[Any]) -> tuple[dict[Any, Any], KeptValues]:
            left = iter(results)
            given = {t.ref(): next(left) for t in self.part.gives_back}
            crossing = next(left)
            known = kept.values if has_kept else next(left)
            return given, kept._replace(crossing=crossing, values=known)

        own = self.values(values, weights, kept)
        return TaskCall(function, own, (), finish)

    def weight_gradient(
        self,
        values: Mapping[Any, Any],
        weights: Any,
        kept: KeptValues,
        sums: GradientSums | None,
        m: int,
    ) -> TaskCall:
        """A task that returns the new sums of weights' gradients.

        It takes what `backward` does.
        """
        own = self.values(values, weights, kept)
        work = self._summed(False, own, sums, m)
        return work._replace(finish=lambda results: work.finish(results)[1])

    def values(
        self,
        values: Mapping[Any, Any],
        weights: Any,
        kept: KeptValues | None = None,
    ) -> dict[Any, Any]:
        """The values that a task may take, by the tensors of the cut graph."""
        cut = self.functions
        found = {
            first.ref(): values[own.ref()]
            for first, own in self._taken
            if own.ref() in values
        }
        found[cut.weights] = weights
        if kept is not None:
            found.update((t.ref(), v) for t, v in zip(cut.totals, kept.totals))
            found.update((t.ref(), v) for t, v in zip(self._shows, kept.shown))
            carried = ((cut.kept, kept.values), (cut.crossing, kept.crossing))
            found.update((key, v) for key, v in carried if v is not None)
        return found

    def _summed(
        self,
        with_dx: bool,
        values: dict[Any, Any],
        sums: GradientSums | None,
        m: int,
        forward: Sequence[tf.Tensor] = (),
    ) -> TaskCall:
        """A function that adds the gradients of the weights to sums.

        It returns some tensors of the forward pass before them, which are not
        for `finish`.
        """
        cut, part = self.functions, self.part
        first = cut.part
        sparse = [d._replace(dense=None) for d in first.dw]
        # What is not among the values is computed again, within the function.
        kept = [one for one in (cut.kept, cut.crossing) if one in values]
        with_sums = sums is not None or cut.sums.begins
        function = cut.function(
            ("backward", with_dx, len(kept), with_sums, len(forward)),
            [*cut.totals, *kept],
            [
                *forward,
                *(first.gives_back if with_dx else []),
                cut.sums,
                *tensors(sparse),
            ],
            cut.sums if with_sums else None,
            with_effects=bool(forward),
        )

        # results: dx, the packed dense sums, the slices of the sparse ones.
        def finish(results: list[Any]) -> tuple[dict[Any, Any], GradientSums]:
            left = iter(results)
            given = {}
            if with_dx:
                given = {t.ref(): next(left) for t in part.gives_back}
            dense = next(left)
            own = [
                gradient.of_micro_batch(m, indices)
                for gradient, indices in zip(_like(sparse, left), part.indices)
            ]
            if sums is not None:
                own = [a.plus(b) for a, b in zip(sums.sparse, own)]
            return given, GradientSums(dense, own)

        return TaskCall(function, values, self._so_far(values, sums), finish)

    def _so_far(
        self, values: Mapping[Any, Any], sums: GradientSums | None
    ) -> Sequence[tf.Tensor]:
        """The sums so far, as a function takes them.

        With one that begins them, weights stand for sums that are not there
        yet, which are there already; zeros do where their dtype is another.
        """
        cut = self.functions
        if not cut.sums.begins:
            return () if sums is None else sums.dense
        if sums is not None:
            return [*sums.dense, tf.constant(False)]
        weights = [
            weight
            for weight, d in zip(values[cut.weights], cut.part.dw, strict=True)
            if d.dense is not None
        ]
        # Where rows are not known, TensorFlow may not know a sum's shape.
        stand_ins = [
            weight
            if weight.dtype == spec.dtype
            else tf.zeros(weight.shape, spec.dtype)
            for weight, spec in zip(weights, cut.sums.specs, strict=True)
        ]
        return [*stand_ins, tf.constant(True)]

    def unpack_sums(self, sums: GradientSums) -> list[Gradient]:
        """The finished sums of the weights."""
        dense = iter(self.functions.sums.unpack(sums.dense))
        return [
            total if d.dense is None else d._replace(dense=next(dense))
            for d, total in zip(self.functions.part.dw, sums.sparse)
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
        values: What `CellFunctions.kept` names, packed; None if it was dropped.
        crossing: What `CellFunctions.crossing` names, packed; None before it is
            there.
        shown: What metrics take that are computed beside the tasks.
    """

    totals: list[tf.Tensor]
    values: list[tf.Tensor] | None = None
    crossing: list[tf.Tensor] | None = None
    shown: Sequence[tf.Tensor] = ()


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
