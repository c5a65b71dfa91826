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

Rows may go through a head in parts. The head is the end of the last cell, which
turns narrow activations into wide outputs, such as logits over 32,000 words,
and the loss. It goes forward and back at once, some rows after the others, so
that only the outputs of one part of a micro-batch exist at a time:

    h rows 0, 1 --> logits --> loss --> dh rows 0, 1   + sums of gradients
    h rows 2, 3 --> logits --> loss --> dh rows 2, 3   + sums of gradients

The results of the parts are added up, as micro-batches' are: the loss
divides once, by the count of all rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs import (
    CellFunctions,
    Gradient,
    GradientSums,
    Part,
    Subfunction,
    Values,
    by_reference,
    gradient_sums,
    in_turn,
    is_continuous,
    tensors,
)
from tfgpipe.inputs import MicroBatches, check_rows_later
from tfgpipe.schedules import CellFacts

Packed = Sequence[tf.Tensor]

# Shapes are asked for with this number of rows, and 1 for all other sizes that
# are not known: a first axis of this length is one of rows.
_ROWS = 1009


class TaskCall(NamedTuple):
    """A task with its arguments: a call without arguments.

    Attributes:
        function: The function.
        values: Arguments, by the tensors of the graph that they stand for.
        finish: Makes the results of the task from the function's.
        sums: The sums of gradients so far, packed.
    """

    function: Subfunction
    values: Values
    finish: Callable[[list[Any]], Any]
    sums: Packed = ()

    def __call__(self) -> Any:
        """Runs the task, and returns its results."""
        return self.finish(self.function(self.values, self.sums))


class CellTasks:
    """Makes the tasks of a cell; equal cells share their functions.

    `values` are the tensors that are known of a micro-batch, and the weights,
    packed, by their bundle. `kept` are results of a micro-batch's tasks that
    later tasks of it take, by tensors and bundles of the shared functions.

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
        updated = {
            t.ref() for v, t in part.traced.new_state if id(v) in metric_state
        }
        self._results = [p for p in results if p[0].ref() not in updated]
        self._metrics = [p for p in results if p[0].ref() in updated]
        if not self._results:
            self._results, self._metrics = results, []
        of_metrics = metric_state if self._metrics else ()
        self._metric_state = {
            t.ref() for v, t in part.traced.state if id(v) in of_metrics
        }
        self.for_metrics: list[tf.Tensor] = []  # what `metrics` takes
        if self._metrics:
            self.for_metrics = functions.taken_by(
                [t for _, t in self._metrics], [t for _, t in self._results]
            )

    def facts(self, has_backward: bool, needs_dx: bool) -> CellFacts:
        """Returns the properties of the cell that a program depends on."""
        cut, has_dx = self.functions, bool(self.part.gradient_outputs)
        keeps = bool(cut.kept.slots) and not cut.options.jit_compile
        return CellFacts(
            has_backward,
            needs_dx,
            has_halves=needs_dx and has_dx and cut.can_be_split,
            recomputes=has_backward and keeps,
        )

    def hide(self, tensors: Sequence[tf.Tensor | None]) -> None:
        """Leaves these out of results of forward tasks: no task takes them."""
        hidden = {t.ref() for t in tensors if t is not None}
        self._results = [p for p in self._results if p[0].ref() not in hidden]

    @property
    def awaits(self) -> list[tf.Tensor]:
        """Tensors of the graph that `forward` waits for."""
        inputs = self.part.forward_inputs
        return [t for t in inputs if t.ref() not in self._metric_state]

    def forward(self, values: Values, keeps: bool) -> TaskCall:
        """Returns a task that computes the cell's results, and kept values.

        `keeps` says whether it returns what the backward pass needs.
        """
        cut, outputs = self.functions, self._results
        others = self.for_metrics
        kept = [cut.kept] if keeps else []
        function = cut.function(
            ("forward", keeps, bool(self.for_metrics), len(outputs)),
            [],
            [*(t for _, t in outputs), *others, *kept],
            with_effects=True,
        )
        keys = [*(t.ref() for t in others), *kept]

        def finish(results: list[Any]) -> tuple[Values, Values]:
            made = by_reference([t for t, _ in outputs], results)
            return made, dict(zip(keys, results[len(outputs) :]))

        return TaskCall(function, self.arguments(values), finish)

    def metrics(self, values: Values, kept: Values) -> TaskCall | None:
        """Returns a task that computes what `forward` leaves to it, or None."""
        if not self._metrics:
            return None
        with in_turn(False):  # it runs while the device runs other functions
            function = self.functions.function(
                "metrics", self.for_metrics, [t for _, t in self._metrics]
            )
        made = [t for t, _ in self._metrics]
        return TaskCall(
            function,
            self.arguments(values, kept),
            lambda results: by_reference(made, results),
        )

    def recompute(self, values: Values, kept: Values) -> TaskCall:
        """Returns a task that computes again what the backward pass needs.

        `kept` is what `forward` has kept.
        """
        cut = self.functions
        return TaskCall(
            cut.function("recompute", [], [cut.kept]),
            self.arguments(values, kept),
            lambda results: {**kept, cut.kept: results[0]},
        )

    def backward(
        self,
        values: Values,
        kept: Values,
        sums: GradientSums | None,
        m: int,
        with_dx: bool = True,
        forward: Sequence[tf.Tensor] = (),
    ) -> TaskCall:
        """Returns a task that computes gradients for earlier cells, and sums.

        Args:
            values: The known tensors.
            kept: Kept values; others are computed again.
            sums: The sums of gradients so far, None at first.
            m: The number of the micro-batch.
            with_dx: Whether it computes gradients for earlier cells, which
                `input_gradient` may have computed.
            forward: Tensors of the forward pass that its function returns
                before the results that `finish` takes.
        """
        cut, shared = self.functions, self.functions.part
        sparse = [d._replace(dense=None) for d in shared.dw]
        bundles = [b for b in (cut.kept, cut.crossing) if b in kept]
        with_sums = sums is not None or cut.options.begins_sums
        function = cut.function(
            ("backward", with_dx, len(bundles), with_sums, len(forward)),
            bundles,
            [
                *forward,
                *(shared.gradient_outputs if with_dx else []),
                cut.sums,
                *tensors(sparse),
            ],
            cut.sums if with_sums else None,
            with_effects=bool(forward),
        )
        dx = self.part.gradient_outputs if with_dx else []

        # results: dx, the packed dense sums, the slices of the sparse ones.
        def finish(results: list[Any]) -> tuple[Values, GradientSums]:
            dense, *slices = results[len(dx) :]
            left = iter(slices)
            flat = tf.nest.flatten(sparse, expand_composites=True)
            filled = tf.nest.pack_sequence_as(
                sparse,
                [None if t is None else next(left) for t in flat],
                expand_composites=True,
            )
            gradients = [
                gradient.of_micro_batch(m, indices)
                for gradient, indices in zip(filled, self.part.indices)
            ]
            if sums is not None:
                gradients = [a.plus(b) for a, b in zip(sums.sparse, gradients)]
            return by_reference(dx, results), GradientSums(dense, gradients)

        arguments = self.arguments(values, kept)
        so_far: Packed = ()
        if sums is not None:
            so_far = sums.dense
        elif with_sums:
            so_far = self._no_sums(arguments)
        return TaskCall(function, arguments, finish, so_far)

    def _no_sums(self, values: Values) -> Packed:
        """Returns what a function of the arguments begins to add to."""
        cut = self.functions
        taken = [t.ref() for t in cut.part.gradient_inputs]
        # Not before the gradients are there: they take memory.
        with tf.control_dependencies([values[r] for r in taken if r in values]):
            sums = []
            for weight, d in zip(values[cut.weights], cut.part.dw):
                if d.dense is not None:
                    kind = d.dense.dtype
                    is_maximum = isinstance(d, gradient_sums.Replacement)
                    first = tf.constant(kind.min if is_maximum else 0, kind)
                    # TensorFlow may not know the shape of the gradient.
                    sums.append(tf.fill(weight.shape, first))
            return sums

    def input_gradient(self, values: Values, kept: Values) -> TaskCall:
        """Returns a task that computes gradients for earlier cells.

        It also returns the kept values, and with them those that were dropped.
        """
        cut, dx = self.functions, self.part.gradient_outputs
        taken = [cut.kept] if cut.kept in kept else []
        made = [cut.crossing] if taken else [cut.crossing, cut.kept]
        function = cut.function(
            ("input_gradient", bool(taken)),
            taken,
            [*cut.part.gradient_outputs, *made],
        )

        def finish(results: list[Any]) -> tuple[Values, Values]:
            new: Values = dict(zip(made, results[len(dx) :]))
            return by_reference(dx, results), {**kept, **new}

        return TaskCall(function, self.arguments(values, kept), finish)

    def arguments(self, values: Values, kept: Values | None = None) -> Values:
        """Returns the arguments of a task, by tensors of the shared part."""
        arguments: Values = {
            shared.ref(): values[tensor.ref()]
            for tensor, shared in self._arguments
            if tensor.ref() in values
        }
        weights = self.functions.weights
        return {**arguments, weights: values[weights], **(kept or {})}

    def unpack_sums(self, sums: GradientSums) -> list[Gradient]:
        """Returns the finished sum of each weight's gradients."""
        dense = iter(self.functions.sums.unpack(sums.dense))
        return [
            total if d.dense is None else d._replace(dense=next(dense))
            for d, total in zip(self.functions.part.dw, sums.sparse)
        ]


class HeadTasks(CellTasks):
    """Makes the tasks of a head, part by part.

    Args:
        part: The cell's part of the model's graph.
        functions: Functions that are cut out of this part or of an equal one.
        num_parts: Number of parts of a micro-batch, or its rows if it has less.
        metric_state: The ids of variables of metrics, whose values go from one
            part of the rows to the next.

    Raises:
        ValueError: If results of parts do not add up.
    """

    def __init__(
        self,
        part: Part,
        functions: CellFunctions,
        num_parts: int,
        metric_state: set[int],
    ):
        super().__init__(part, functions)
        self._num_parts = num_parts
        traced = part.traced
        self._outputs = {t.ref() for t in traced.handed_out if t is not None}
        sums = [*traced.losses[: traced.num_head_losses], *traced.counts]
        self._sums = {t.ref() for t in sums}
        # By the new value of a metric's variable, its value before.
        before = {id(v): t.ref() for v, t in traced.state}
        given = {t.ref() for t in part.forward_outputs}
        self._metrics_before = {
            t.ref(): before[id(v)]
            for v, t in traced.new_state
            if id(v) in metric_state and t.ref() in given
        }
        known = {*self._outputs, *self._sums, *self._metrics_before}
        others = [t for t in part.forward_outputs if t.ref() not in known]
        if others:
            raise ValueError(
                "`head_parts` must be 1 where the last layers, or losses and "
                "metrics, draw, assign state or add to the loss. Received: "
                f"{self._layers_of(others)}."
            )
        self._with_rows = self._tensors_with_rows()
        # Each part has its share of the gradients of sums.
        self._dsums = {
            d.ref()
            for loss, d in zip(traced.losses, traced.dlosses)
            if d is not None and loss.ref() in self._sums
        }

    def _tensors_with_rows(self) -> set[Hashable]:
        """Returns references of tensors with a row for each row of the inputs.

        Of what comes in, of outputs, and of gradients for earlier cells. Where
        a number of rows is not known, a tensor that follows from data has them;
        they are compared with others at run time.
        """
        part, traced = self.part, self.part.traced
        state = {t.ref() for _, t in traced.state}
        outputs = [t for t in part.forward_outputs if t.ref() in self._outputs]
        tensors = [t for t in part.forward_inputs if t.ref() not in state]
        tensors += outputs
        sized = traced.operations_for(_ROWS)
        varies = traced.varying()

        def num_rows(tensor: tf.Tensor) -> int | None:
            shape = tensor.shape
            if tensor.op.name in sized:
                shape = sized[tensor.op.name].outputs[tensor.value_index].shape
            return None if shape.rank is None else [*shape, 0][0]

        unknown = [t for t in tensors if num_rows(t) is None]
        fixed = {t.ref(): t for t in unknown if not varies(t)}
        gradients = part.gradient_outputs
        is_trained = any(map(is_continuous, fixed.values()))
        if is_trained and None in map(num_rows, gradients):
            raise ValueError(
                "`head_parts` must be 1 where the last layer takes a trained "
                "tensor, of any size, that is the same for all rows. Received: "
                f"{self._layers_of([*fixed.values()])}."
            )
        everything = [*tensors, *gradients]
        have_rows = {
            t.ref() for t in everything if num_rows(t) in (None, _ROWS)
        }
        return have_rows - fixed.keys()

    def _layers_of(self, tensors: Sequence[tf.Tensor]) -> str:
        traced = self.part.traced
        places = [traced.places[tensor.op.name] for tensor in tensors]
        words = [str(traced.section_of(place).words) for place in places]
        return ", ".join(dict.fromkeys(words))

    def facts(self, has_backward: bool, needs_dx: bool) -> CellFacts:
        """See `CellTasks`."""
        facts = super().facts(has_backward, needs_dx)
        return facts._replace(has_halves=False, recomputes=False, is_head=True)

    def forward(self, values: Values, keeps: bool) -> Any:
        """See `CellTasks`; where there is no backward pass."""

        def run(arguments: Values, p: int) -> Values:
            outputs: Values = CellTasks.forward(self, arguments, False)()[0]
            return outputs

        return lambda: (self._in_parts(values, run), {})

    def head(
        self, values: Values, sums: GradientSums | None, m: int
    ) -> Callable[[], tuple[Values, GradientSums | None]]:
        """Returns a task that goes forward and back.

        It returns results, gradients for earlier cells, and the new sums of
        gradients; `sums` are the sums so far, None at first.
        """
        total = sums

        def run(arguments: Values, p: int) -> Values:
            nonlocal total
            call = self.backward(
                arguments,
                {},
                total,
                m * self._num_parts + p,
                forward=[t for _, t in self._results],
            )
            results = call.function(call.values, call.sums)
            dx, total = call.finish(results[len(self._results) :])
            made = by_reference([t for t, _ in self._results], results)
            return {**made, **dx}

        return lambda: (self._in_parts(values, run), total)

    def _in_parts(
        self, values: Values, run: Callable[[Values, int], Values]
    ) -> Values:
        """Runs a function for each part, one after the other; joins results."""
        refs = [ref for ref in values if ref in self._with_rows]
        tensors = [values[ref] for ref in refs]
        # Numbers of rows that are known only at run time.
        first, *others = sorted(tensors, key=lambda t: t.shape[0] is None)
        for tensor in others:
            if tensor.shape[0] is None:
                check_rows_later(
                    tensor,
                    tf.shape(first)[0],
                    "`head_parts` must be 1 unless each tensor that the last "
                    "layer takes has a row for each row of the inputs.",
                )
        parts = MicroBatches(tensors, self._num_parts)
        befores = self._metrics_before.values()
        metrics = {ref: values[ref] for ref in befores}
        last: list[tf.Operation] = []
        results = []
        for p, rows in enumerate(parts.split(tensors)):
            arguments = {**values, **dict(zip(refs, rows)), **metrics}
            for ref in self._dsums & arguments.keys():
                d = arguments[ref]
                arguments[ref] = parts.select(p, d, tf.zeros_like(d))
            with tf.control_dependencies(last):
                made = run(arguments, p)
            op = next(iter(made.values())).op
            if op.type == "StatefulPartitionedCall":
                internals.run_independently(op)
            last = [op]
            for ref, before in self._metrics_before.items():
                made[ref] = parts.select(p, made[ref], metrics[before])
                metrics[before] = made[ref]
            results.append(made)
        return {
            ref: self._joined(ref, parts, [made[ref] for made in results])
            for ref in results[0]
        }

    def _joined(
        self, ref: Hashable, parts: MicroBatches, values: list[tf.Tensor]
    ) -> tf.Tensor:
        """Returns the value for the micro-batch, by the values for parts."""
        if ref in self._metrics_before:
            return values[-1]
        if ref in self._sums:
            values = [
                parts.select(p, v, tf.zeros_like(v))
                for p, v in enumerate(values)
            ]
        elif ref in self._with_rows:
            return parts.join(values)
        elif ref in self._outputs:
            return values[0]  # without rows, the same for all
        return functools.reduce(operator.add, values)
