"""The tasks of a cell as TensorFlow functions, cut out of one graph.

    forward          outputs, and if asked for what the backward pass needs
    recompute        what the backward pass needs, again: re-materialisation
    backward         the gradients of inputs and weights
    input_gradient   the first half of `backward`: the cell before waits for it;
                     the second half is `backward` without gradients of inputs
    metrics          of the last cell, where they are a function of their own

Re-materialisation by `tf.recompute_grad` would wait for the gradient before it
computes anything, makes sparse gradients dense, refuses boolean tensors, and
has no place for new state.

The sum of the gradients over micro-batches is an argument: the function adds
its gradients to it. So is a cast of a weight, as mixed precision makes, to be
computed once a mini-batch. Where there are many tensors, they go in bundles.

A task that takes a result of a function waits for the whole function. Metrics
may take long, above all where an accelerator has no kernel for them and the
host computes them, as the accuracy of classes. Only the end of the step needs
them, so they may be a function of their own:

    forward ----+--> backward ----> ...
                |
                +--> metrics        while the device runs other tasks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.graphs import (
    CellFunctions,
    Gradient,
    GradientSums,
    Part,
    Values,
    out_of_turn,
    tensors,
)
from tfgpipe.schedules import CellFacts

Packed = Sequence[tf.Tensor]


class KeptValues(NamedTuple):
    """The results of a micro-batch's tasks that later tasks of it take.

    Attributes:
        totals: Sums over replicas.
        values: Of `CellFunctions.kept`, packed; None if they were dropped.
        crossing: Of `CellFunctions.crossing`, packed; None before they exist.
        for_metrics: Arguments of `CellTasks.metrics`.
    """

    totals: Sequence[tf.Tensor]
    values: Packed | None = None
    crossing: Packed | None = None
    for_metrics: Packed = ()


class TaskCall(NamedTuple):
    """A task with its arguments: a call without arguments.

    Attributes:
        function: A `Subfunction`, or a `StagedFunction`, see `run/chain.py`.
        values: Arguments, by the tensors of the graph that they stand for.
        sums: The sums of gradients so far, packed.
        finish: Makes the results of the task from the function's.
    """

    function: Any
    values: Values
    sums: Packed
    finish: Callable[[list[Any]], Any]

    def __call__(self) -> Any:
        """Runs the task, and returns its results."""
        return self.finish(self.function(self.values, self.sums))


class CellTasks:
    """Makes the tasks of a cell; equal cells share their functions.

    `values` are the tensors that are known of a micro-batch, `weights` are
    packed.

    Args:
        part: The cell's part of the model's graph.
        functions: Functions that are cut out of this part or of an equal one.
        metric_state: The ids of the variables of metrics that `metrics`
            computes, and not `forward`.
    """

    def __init__(
        self,
        part: Part,
        functions: CellFunctions,
        metric_state: Collection[int] = (),
    ):
        self.part = part
        self.functions = functions
        shared = functions.part
        # Pairs of a tensor of this cell and of the shared functions.
        self._arguments = [
            *zip(part.forward_inputs, shared.forward_inputs),
            *zip(part.gradient_inputs, shared.gradient_inputs),
        ]
        results = list(zip(part.forward_outputs, shared.forward_outputs))
        values = part.traced.new_state
        updated = {t.ref() for v, t in values if id(v) in metric_state}
        self._results = [
            pair for pair in results if pair[0].ref() not in updated
        ]
        self._metrics = [pair for pair in results if pair[0].ref() in updated]
        if not self._results:
            self._results, self._metrics = results, []
        self._metric_state: set[Hashable] = set()
        self._for_metrics: list[tf.Tensor] = []
        if self._metrics:
            state = part.traced.state
            self._metric_state = {
                t.ref() for v, t in state if id(v) in metric_state
            }
            self._for_metrics = functions.taken_by(
                [t for _, t in self._metrics], [t for _, t in self._results]
            )

    def facts(
        self, has_backward: bool, needs_dx: bool, synchronizes: bool = False
    ) -> CellFacts:
        """Returns the properties of the cell that a program depends on."""
        cut, has_dx = self.functions, bool(self.part.gradient_outputs)
        keeps = bool(cut.kept.slots) and not cut.recomputes_in_backward
        return CellFacts(
            has_backward,
            needs_dx,
            has_halves=needs_dx and has_dx and cut.can_be_split,
            recomputes=has_backward and keeps,
            synchronizes=synchronizes,
        )

    def hide(self, tensors: Sequence[tf.Tensor | None]) -> None:
        """Leaves these out of results of forward tasks: no task takes them."""
        hidden = {t.ref() for t in tensors if t is not None}
        self._results = [p for p in self._results if p[0].ref() not in hidden]

    @property
    def weight_dtypes(self) -> list[tf.DType]:
        """The dtypes of the weights, or of their casts if only those count."""
        return [t.dtype for t in self.functions.weights.tensors]

    @property
    def awaits(self) -> list[tf.Tensor]:
        """Tensors of the graph that `forward` waits for."""
        return [
            t
            for t in self.part.forward_inputs
            if t.ref() not in self._metric_state
        ]

    def pack_weights(self, weights: Sequence[tf.Tensor]) -> Packed:
        """Packs weights, which are cast already, for tasks."""
        return self.functions.weights.pack(weights)

    def forward(self, values: Values, weights: Packed, keeps: bool) -> TaskCall:
        """Returns a task that computes the cell's results, and kept values.

        `keeps` says whether it returns what the backward pass needs.
        """
        cut = self.functions
        kept = [cut.kept] if keeps else []
        function = cut.function(
            ("forward", keeps, bool(self._for_metrics), len(self._results)),
            [],
            [
                *(t for _, t in self._results),
                *self._for_metrics,
                *cut.totals,
                *kept,
            ],
            with_effects=True,
        )

        def finish(results: list[Any]) -> tuple[Values, KeptValues]:
            left = iter(results)
            made = {t.ref(): next(left) for t, _ in self._results}
            for_metrics = [next(left) for _ in self._for_metrics]
            totals = [next(left) for _ in cut.totals]
            return made, KeptValues(
                totals, next(left, None), for_metrics=for_metrics
            )

        return TaskCall(function, self.arguments(values, weights), (), finish)

    def metrics(
        self, values: Values, weights: Packed, kept: KeptValues
    ) -> TaskCall | None:
        """Returns a task that computes what `forward` leaves to it, or None."""
        if not self._metrics:
            return None
        with out_of_turn():  # it runs while the device runs other functions
            function = self.functions.function(
                "metrics", self._for_metrics, [t for _, t in self._metrics]
            )
        return TaskCall(
            function,
            self.arguments(values, weights, kept),
            (),
            lambda results: {
                t.ref(): value for (t, _), value in zip(self._metrics, results)
            },
        )

    def recompute(
        self, values: Values, weights: Packed, kept: KeptValues
    ) -> TaskCall:
        """Returns a task that computes again what the backward pass needs.

        `kept` is what `forward` has kept.
        """
        cut = self.functions
        function = cut.function("recompute", cut.totals, [cut.kept])
        return TaskCall(
            function,
            self.arguments(values, weights, kept),
            (),
            lambda results: kept._replace(values=results[0]),
        )

    def backward(
        self,
        values: Values,
        weights: Packed,
        kept: KeptValues,
        sums: GradientSums | None,
        m: int,
        with_dx: bool = True,
    ) -> TaskCall:
        """Returns a task that computes gradients for earlier cells, and sums.

        Args:
            values: The known tensors.
            weights: The weights, packed.
            kept: Kept values; others are computed again.
            sums: The sums of gradients so far, None at first.
            m: The number of the micro-batch.
            with_dx: Whether it computes gradients for earlier cells, which
                `input_gradient` may have computed.
        """
        arguments = self.arguments(values, weights, kept)
        return self._summed(with_dx, arguments, sums, m)

    def input_gradient(
        self, values: Values, weights: Packed, kept: KeptValues
    ) -> TaskCall:
        """Returns a task that computes gradients for earlier cells.

        It also returns the kept values, and with them those that were dropped.
        """
        cut = self.functions
        has_kept = kept.values is not None
        bundles = [cut.crossing] if has_kept else [cut.crossing, cut.kept]
        function = cut.function(
            ("input_gradient", has_kept),
            [*cut.totals, cut.kept] if has_kept else cut.totals,
            [*cut.part.gradient_outputs, *bundles],
        )

        def finish(results: list[Any]) -> tuple[Values, KeptValues]:
            left = iter(results)
            dx = {t.ref(): next(left) for t in self.part.gradient_outputs}
            crossing = next(left)
            return dx, kept._replace(
                crossing=crossing, values=next(left, kept.values)
            )

        arguments = self.arguments(values, weights, kept)
        return TaskCall(function, arguments, (), finish)

    def arguments(
        self, values: Values, weights: Packed, kept: KeptValues | None = None
    ) -> Values:
        """Returns the arguments of a task, by tensors of the shared part."""
        cut = self.functions
        arguments: Values = {
            shared.ref(): values[tensor.ref()]
            for tensor, shared in self._arguments
            if tensor.ref() in values
        }
        arguments[cut.weights] = weights
        if kept is not None:
            pairs = [
                *((t.ref(), v) for t, v in zip(cut.totals, kept.totals)),
                *(
                    (t.ref(), v)
                    for t, v in zip(self._for_metrics, kept.for_metrics)
                ),
                (cut.kept, kept.values),
                (cut.crossing, kept.crossing),
            ]
            arguments.update((key, v) for key, v in pairs if v is not None)
        return arguments

    def _summed(
        self,
        with_dx: bool,
        values: Values,
        sums: GradientSums | None,
        m: int,
        forward: Sequence[tf.Tensor] = (),
    ) -> TaskCall:
        """Returns a call that adds the gradients of the weights to sums.

        Its function returns `forward`, some tensors of the forward pass, before
        the results that `finish` takes.
        """
        cut, part = self.functions, self.part
        shared = cut.part
        sparse = [d._replace(dense=None) for d in shared.dw]
        # What is not among the values is computed again, within the function.
        bundles = [b for b in (cut.kept, cut.crossing) if b in values]
        with_sums = sums is not None or cut.sums.begins
        function = cut.function(
            ("backward", with_dx, len(bundles), with_sums, len(forward)),
            [*cut.totals, *bundles],
            [
                *forward,
                *(shared.gradient_outputs if with_dx else []),
                cut.sums,
                *tensors(sparse),
            ],
            cut.sums if with_sums else None,
            with_effects=bool(forward),
        )

        # results: dx, the packed dense sums, the slices of the sparse ones.
        def finish(results: list[Any]) -> tuple[Values, GradientSums]:
            left = iter(results)
            sent = part.gradient_outputs if with_dx else []
            dx = {t.ref(): next(left) for t in sent}
            dense = next(left)
            gradients = [
                gradient.of_micro_batch(m, indices)
                for gradient, indices in zip(
                    _filled(sparse, left), part.indices
                )
            ]
            if sums is not None:
                gradients = [a.plus(b) for a, b in zip(sums.sparse, gradients)]
            return dx, GradientSums(dense, gradients)

        return TaskCall(
            function, values, self._sums_so_far(values, sums), finish
        )

    def _sums_so_far(self, values: Values, sums: GradientSums | None) -> Packed:
        """Returns the sums so far, as a function takes them.

        A function that also begins sums takes weights, which exist already,
        instead of sums that do not; zeros where the dtypes differ.
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
        """Returns the finished sum of each weight's gradients."""
        dense = iter(self.functions.sums.unpack(sums.dense))
        return [
            total if d.dense is None else d._replace(dense=next(dense))
            for d, total in zip(self.functions.part.dw, sums.sparse)
        ]


def _filled(
    gradients: Sequence[Gradient], values: Iterator[tf.Tensor]
) -> list[Gradient]:
    """Returns gradients whose tensors are replaced by an iterator's."""
    flat = tf.nest.flatten(gradients, expand_composites=True)
    return tf.nest.pack_sequence_as(
        gradients,
        [None if t is None else next(values) for t in flat],
        expand_composites=True,
    )
