"""The tasks of a head whose rows go through it in parts.

The head is the end of the last cell: what turns narrow activations into wide
outputs, such as logits over 32,000 words, and the loss. It goes forward and
back at once, some rows after the others, so that of a micro-batch no more
outputs exist than those of a part:

    h rows 0, 1 --> logits --> loss --> dh rows 0, 1   + sums of gradients
    h rows 2, 3 --> logits --> loss --> dh rows 2, 3   + sums of gradients

What the parts make is added up, as of micro-batches: the loss divides once, by
what all rows count.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells.tasks import CellTasks, KeptValues
from tfgpipe.devices import names
from tfgpipe.graphs import CellFunctions, GradientSums, Part, is_continuous
from tfgpipe.micro_batches import MicroBatches
from tfgpipe.schedules import CellFacts

# With so many rows shapes are asked for, and with 1 for all else that is not
# known: what has as many has rows.
_ROWS = 1009


class HeadTasks(CellTasks):
    """Makes the tasks of a head, part by part.

    Args:
        part: Of the model's graph.
        functions: What is cut out, of this part or of an equal one.
        num_parts: Into how many parts a micro-batch goes, or as many as it has
            rows.
        chained: The ids of variables that run on from part to part.

    Raises:
        ValueError: If it makes something that parts do not add up to.
    """

    def __init__(
        self,
        part: Part,
        functions: CellFunctions,
        num_parts: int,
        chained: set[int],
    ):
        super().__init__(part, functions)
        self._num_parts = num_parts
        traced = part.traced
        outputs = {t.ref() for t in traced.handed_out if t is not None}
        sums = [*traced.losses[: traced.num_head_losses], *traced.counts]
        self._sums = {t.ref() for t in sums}
        # By what a part makes of a metric, what the next one starts with.
        given = {id(v): t for v, t in traced.state}
        made = {t.ref() for t in part.gives}
        self._next = {
            t.ref(): given[id(v)]
            for v, t in traced.new_state
            if id(v) in chained and t.ref() in made
        }
        known = {*outputs, *self._sums, *self._next}
        self._check(known)
        self._outputs = outputs
        others = [t for t in part.gives if t.ref() in outputs]
        self._rows = self._with_rows([*part.takes, *others])
        # Each part has its share of the gradients of what it adds up.
        self._dsums = {
            d.ref()
            for loss, d in zip(traced.losses, part.made.dlosses)
            if d is not None and loss.ref() in self._sums
        }

    def _check(self, known: set[Any]) -> None:
        """Refuses what is not known to be a sum over rows, or one of them."""
        others = [t for t in self.part.gives if t.ref() not in known]
        if others or self.functions.totals:
            tensors = others or self.functions.totals
            names = dict.fromkeys(map(self._words, tensors))
            raise ValueError(
                "`head_parts` must be 1 where the last layers, or losses and "
                "metrics, draw, assign state, normalise over the batch or add "
                f"to the loss. Received: {', '.join(names)}. Put that before "
                "the last layer, or leave `head_parts` out."
            )

    def _with_rows(self, tensors: Sequence[tf.Tensor]) -> set[Any]:
        """Those with a row for each row of the inputs, by reference.

        And gradients that go to earlier cells, of such. Where a number of rows
        is not known, what follows from data has them, which is compared with
        others when it is there.
        """
        traced = self.part.traced
        state = {t.ref() for _, t in traced.state}
        sized = traced.operations_for(_ROWS, 1)
        if sized is None:
            sized = traced.operations_for(_ROWS, None) or {}
        varies = traced.varying()

        def rows(tensor: tf.Tensor) -> int | None:
            shape = tensor.shape
            if tensor.op.name in sized:
                shape = sized[tensor.op.name].outputs[tensor.value_index].shape
            return None if shape.rank is None else [*shape, 0][0]

        taken = [t for t in tensors if t.ref() not in state]
        open_ones = [t for t in taken if rows(t) is None and not varies(t)]
        others = {t.ref() for t in open_ones}
        found = [t for t in taken if rows(t) in (None, _ROWS)]
        back = [t for t in self.part.gives_back if rows(t) in (None, _ROWS)]
        if any(is_continuous(t) for t in open_ones) and any(
            rows(t) is None for t in back
        ):
            raise ValueError(
                "`head_parts` must be 1 where what comes to the last layer, of "
                "any size, is the same for all rows, and trained. Received: "
                f"{[self._words(t) for t in open_ones]}. Give the inputs all "
                "sizes but that of the batch, or leave `head_parts` out."
            )
        return {t.ref() for t in [*found, *back]} - others

    def _words(self, tensor: tf.Tensor) -> str:
        """What has made a tensor of the forward pass."""
        traced = self.part.traced
        return str(traced.section_of(traced.places[tensor.op.name]).words)

    def facts(
        self, has_backward: bool, needs_dx: bool, synchronizes: bool = False
    ) -> CellFacts:
        """See `CellTasks`."""
        found = super().facts(has_backward, needs_dx, synchronizes)
        return found._replace(has_halves=False, recomputes=False, is_head=True)

    def forward(
        self, values: Mapping[Any, Any], weights: Any, keeps: bool
    ) -> Any:
        """See `CellTasks`; where there is no backward pass."""
        function: Any = self.functions.function(
            ("forward", len(self._gives)),
            [],
            [t for _, t in self._gives],
            with_effects=True,
        )

        def run(own: dict[Any, Any], p: int) -> dict[Any, Any]:
            results = function(self.values(own, weights))
            return {t.ref(): r for (t, _), r in zip(self._gives, results)}

        return lambda: (self._in_parts(values, run), KeptValues([]))

    def head(
        self,
        values: Mapping[Any, Any],
        weights: Any,
        sums: GradientSums | None,
        m: int,
    ) -> Callable[[], tuple[dict[Any, Any], Any]]:
        """A task that goes forward and back.

        It returns what the head gives, and gives back, and the new sums of the
        gradients; `sums` are those so far, None at first.
        """
        total = sums

        def run(own: dict[Any, Any], p: int) -> dict[Any, Any]:
            nonlocal total
            work = self._summed(
                True,
                self.values(own, weights),
                total,
                m * self._num_parts + p,
                [t for _, t in self._gives],
            )
            results = work.function(work.values, work.sums)
            count = len(self._gives)
            given, total = work.finish(results[count:])
            made = {t.ref(): r for (t, _), r in zip(self._gives, results)}
            return {**made, **given}

        def work() -> tuple[dict[Any, Any], Any]:
            given = self._in_parts(values, run)
            return given, total

        return work

    def _in_parts(
        self,
        values: Mapping[Any, Any],
        run: Callable[[dict[Any, Any], int], dict[Any, Any]],
    ) -> dict[Any, Any]:
        """What all parts make, one after the other."""
        refs = [ref for ref in values if ref in self._rows]
        rows = [values[ref] for ref in refs]
        _check_rows(rows)
        parts = MicroBatches(rows, self._num_parts)
        state = {
            start.ref(): values[start.ref()] for start in self._next.values()
        }
        before: list[tf.Operation] = []
        found = []
        for p, own_rows in enumerate(parts.split(rows)):
            own = {**values, **dict(zip(refs, own_rows)), **state}
            for ref in self._dsums & own.keys():
                own[ref] = parts.select(p, own[ref], tf.zeros_like(own[ref]))
            with tf.control_dependencies(before):
                made = run(own, p)
            op = next(iter(made.values())).op
            if op.type == "StatefulPartitionedCall":
                internals.run_independently(op)
            before = [op]
            for ref, start in self._next.items():
                made[ref] = parts.select(p, made[ref], state[start.ref()])
                state[start.ref()] = made[ref]
            found.append(made)
        return {ref: self._joined(ref, parts, found) for ref in found[0]}

    def _joined(
        self, ref: Any, parts: MicroBatches, found: Sequence[dict[Any, Any]]
    ) -> Any:
        """What the parts made of a tensor, of the whole micro-batch."""
        values = [own[ref] for own in found]
        if ref in self._next:
            return values[-1]
        if ref in self._sums:
            values = [
                parts.select(p, v, tf.zeros_like(v))
                for p, v in enumerate(values)
            ]
        elif ref in self._rows:
            return parts.join(values)
        elif ref in self._outputs:
            return values[0]  # without rows, the same for all
        return functools.reduce(operator.add, values)


def _check_rows(rows: Sequence[tf.Tensor]) -> None:
    """Compares numbers of rows that are known only at run time."""
    first = min(rows, key=lambda t: t.shape[0] is None)
    for tensor in rows:
        if tensor is first or tensor.shape[0] is not None:
            continue
        with tf.device(names.host_of(tensor.device)):
            check = tf.debugging.assert_equal(
                tf.shape(tensor)[0],
                tf.shape(first)[0],
                message="`head_parts` must be 1 unless what comes to the last "
                "layer has a row for each row of the inputs. Leave it out.",
            )
        if check is not None:
            internals.run_independently(check)
