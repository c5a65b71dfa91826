"""The tasks of a head whose rows go through it in parts.

The head is the end of the last cell, which turns narrow activations into wide
outputs, such as logits over 32,000 words, and the loss. It goes forward and
back at once, some rows after the others, so that only the outputs of one part
of a micro-batch exist at a time:

    h rows 0, 1 --> logits --> loss --> dh rows 0, 1   + sums of gradients
    h rows 2, 3 --> logits --> loss --> dh rows 2, 3   + sums of gradients

The results of the parts are added up, as micro-batches' are: the loss
divides once, by the count of all rows.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells.tasks import CellTasks, KeptValues, Packed
from tfgpipe.graphs import (
    CellFunctions,
    GradientSums,
    Part,
    Values,
    is_continuous,
)
from tfgpipe.inputs import MicroBatches, check_rows_later
from tfgpipe.schedules import CellFacts

# Shapes are asked for with this number of rows, and 1 for all other sizes that
# are not known: a first axis of this length is one of rows.
_ROWS = 1009


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
        before = {id(v): t for v, t in traced.state}
        given = {t.ref() for t in part.forward_outputs}
        self._metrics_before = {
            t.ref(): before[id(v)]
            for v, t in traced.new_state
            if id(v) in metric_state and t.ref() in given
        }
        self._check_sums()
        outputs = [t for t in part.forward_outputs if t.ref() in self._outputs]
        self._with_rows = self._tensors_with_rows(
            [*part.forward_inputs, *outputs]
        )
        # Each part has its share of the gradients of sums.
        self._dsums = {
            d.ref()
            for loss, d in zip(traced.losses, part.made.dlosses)
            if d is not None and loss.ref() in self._sums
        }

    def _check_sums(self) -> None:
        """Refuses results that are not known to be sums over rows, or rows."""
        known = {*self._outputs, *self._sums, *self._metrics_before}
        others = [t for t in self.part.forward_outputs if t.ref() not in known]
        tensors = others or self.functions.totals
        if tensors:
            layers = dict.fromkeys(map(self._layer_of, tensors))
            raise ValueError(
                "`head_parts` must be 1 where the last layers, or losses and "
                "metrics, draw, assign state, normalise over the batch or add "
                f"to the loss. Received: {', '.join(layers)}. Put that before "
                "the last layer, or leave `head_parts` out."
            )

    def _tensors_with_rows(self, tensors: Sequence[tf.Tensor]) -> set[Hashable]:
        """Returns references of tensors with a row for each row of the inputs.

        And of gradients for earlier cells. Where a number of rows is not known,
        a tensor that follows from data has them; they are compared with others
        at run time.
        """
        traced = self.part.traced
        state = {t.ref() for _, t in traced.state}
        sized = traced.operations_for(_ROWS, 1)
        if sized is None:
            sized = traced.operations_for(_ROWS, None) or {}
        varies = traced.varying()

        def num_rows(tensor: tf.Tensor) -> int | None:
            shape = tensor.shape
            if tensor.op.name in sized:
                shape = sized[tensor.op.name].outputs[tensor.value_index].shape
            return None if shape.rank is None else [*shape, 0][0]

        tensors = [t for t in tensors if t.ref() not in state]
        fixed = [t for t in tensors if num_rows(t) is None and not varies(t)]
        fixed_refs = {t.ref() for t in fixed}
        gradients = self.part.gradient_outputs
        if any(map(is_continuous, fixed)) and any(
            num_rows(t) is None for t in gradients
        ):
            raise ValueError(
                "`head_parts` must be 1 where the last layer takes a trained "
                "tensor, of any size, that is the same for all rows. Received: "
                f"{[self._layer_of(t) for t in fixed]}. Give the inputs all "
                "sizes but that of the batch, or leave `head_parts` out."
            )
        with_rows = [
            t for t in [*tensors, *gradients] if num_rows(t) in (None, _ROWS)
        ]
        return {t.ref() for t in with_rows} - fixed_refs

    def _layer_of(self, tensor: tf.Tensor) -> str:
        traced = self.part.traced
        return str(traced.section_of(traced.places[tensor.op.name]).words)

    def facts(
        self, has_backward: bool, needs_dx: bool, synchronizes: bool = False
    ) -> CellFacts:
        """See `CellTasks`."""
        facts = super().facts(has_backward, needs_dx, synchronizes)
        return facts._replace(has_halves=False, recomputes=False, is_head=True)

    def forward(self, values: Values, weights: Packed, keeps: bool) -> Any:
        """See `CellTasks`; where there is no backward pass."""
        function: Any = self.functions.function(
            ("forward", len(self._results)),
            [],
            [t for _, t in self._results],
            with_effects=True,
        )

        def run(arguments: Values, p: int) -> Values:
            results = function(self.arguments(arguments, weights))
            return {t.ref(): r for (t, _), r in zip(self._results, results)}

        return lambda: (self._in_parts(values, run), KeptValues([]))

    def head(
        self, values: Values, weights: Packed, sums: GradientSums | None, m: int
    ) -> Callable[[], tuple[Values, GradientSums | None]]:
        """Returns a task that goes forward and back.

        It returns results, gradients for earlier cells, and the new sums of
        gradients; `sums` are the sums so far, None at first.
        """
        total = sums

        def run(arguments: Values, p: int) -> Values:
            nonlocal total
            call = self._summed(
                True,
                self.arguments(arguments, weights),
                total,
                m * self._num_parts + p,
                [t for _, t in self._results],
            )
            results = call.function(call.values, call.sums)
            dx, total = call.finish(results[len(self._results) :])
            made = {t.ref(): r for (t, _), r in zip(self._results, results)}
            return {**made, **dx}

        def task() -> tuple[Values, GradientSums | None]:
            results = self._in_parts(values, run)
            return results, total

        return task

    def _in_parts(
        self, values: Values, run: Callable[[Values, int], Values]
    ) -> Values:
        """Runs a function for each part, one after the other; joins results."""
        refs = [ref for ref in values if ref in self._with_rows]
        tensors = [values[ref] for ref in refs]
        _check_rows(tensors)
        parts = MicroBatches(tensors, self._num_parts)
        metrics = {
            t.ref(): values[t.ref()] for t in self._metrics_before.values()
        }
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
                made[ref] = parts.select(p, made[ref], metrics[before.ref()])
                metrics[before.ref()] = made[ref]
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


def _check_rows(tensors: Sequence[tf.Tensor]) -> None:
    """Compares numbers of rows that are known only at run time."""
    first = min(tensors, key=lambda t: t.shape[0] is None)
    for tensor in tensors:
        if tensor is not first and tensor.shape[0] is None:
            check_rows_later(
                tensor,
                tf.shape(first)[0],
                "`head_parts` must be 1 unless each tensor that the last layer "
                "takes has a row for each row of the inputs. Leave it out.",
            )
