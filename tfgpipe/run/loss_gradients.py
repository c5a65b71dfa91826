"""Where the backward pass starts: counts, and gradients of the loss.

The counts of losses are known before the losses. A loss that is added up is
divided by a number of rows, unmasked positions or weights. It rarely depends on
what the layers compute: a function cut out of each cell computes nothing but
what the numbers follow from, so that a backward pass can start before the last
forward pass has ended. Where they do depend on it, that is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.cells import CellTasks
from tfgpipe.graphs import (
    Differentiated,
    TracedModel,
    Values,
    by_reference,
)
from tfgpipe.inputs import MicroBatches


class LossGradients(NamedTuple):
    """Where the backward pass starts: gradients of the loss.

    Attributes:
        outputs: For each micro-batch, with respect to the flat outputs: of the
            shape of an output each, or None.
        head: With respect to the head's losses, scalars, the same for every
            micro-batch; [] without a head.
        extra: With respect to each of the layers' own losses, scalars, or
            None.
    """

    outputs: Sequence[Sequence[tf.Tensor | None]]
    head: list[tf.Tensor]
    extra: Sequence[tf.Tensor | None]

    def for_micro_batch(
        self, m: int, micro_batches: MicroBatches, made: Differentiated
    ) -> Values:
        """Returns a micro-batch's gradients, by the graph's tensors."""
        head = [micro_batches.select(m, d, tf.zeros_like(d)) for d in self.head]
        extra = [
            None if d is None else d * micro_batches.fraction(m, d.dtype)
            for d in self.extra
        ]
        return {
            **_given(made.dy, self.outputs[m]),
            **_given(made.dlosses, [*head, *extra]),
        }


def _given(keys: Sequence[Any], values: Sequence[Any]) -> Values:
    """Values by the references of what the graph has for them."""
    return {
        key.ref(): value
        for key, value in zip(keys, values, strict=True)
        if key is not None
    }


def counts_ahead(
    traced: TracedModel,
    tasks: Sequence[CellTasks],
    known: Callable[[int, int], tuple[Values, Any]],
    device: Callable[[int, int], str],
    num_micro_batches: int,
) -> list[list[tf.Tensor]]:
    """Computes what each micro-batch's losses count, scalars.

    Args:
        traced: The model.
        tasks: What runs the tasks of each cell.
        known: Values that cell k takes for micro-batch m, as far as they are
            known when nothing has run, and its weights.
        device: Where cell k computes micro-batch m.
        num_micro_batches: How many there are.
    """
    parts = _parts(traced, tasks)
    counts = []
    for m in range(num_micro_batches):
        made: Values = {}
        for k, (function, wanted) in enumerate(parts):
            if not wanted:
                continue
            values, weights = known(k, m)
            taken = tasks[k].arguments({**values, **made}, weights)
            with tf.device(device(k, m)):
                made.update(by_reference(wanted, function(taken)))
        counts.append([made[t.ref()] for t in traced.counts])
    return counts


def _parts(
    traced: TracedModel, tasks: Sequence[CellTasks]
) -> list[tuple[Any, list[tf.Tensor]]]:
    """Of each cell what the counts need: a function, and what it gives."""
    parts: list[tuple[Any, list[tf.Tensor]]] = []
    missing = {t.ref(): t for t in traced.counts}
    for cell in reversed(tasks):
        part, cut = cell.part, cell.functions
        pairs = [*zip(part.forward_outputs, cut.part.forward_outputs)]
        wanted = [(t, first) for t, first in pairs if t.ref() in missing]
        function = None
        if wanted:
            function = cut.of_forward([first for _, first in wanted])
            inputs = {id(t) for t in function.inputs}
            for t, first in zip(part.forward_inputs, cut.part.forward_inputs):
                if id(first) in inputs:
                    missing[t.ref()] = t
        parts.insert(0, (function, [t for t, _ in wanted]))
    return parts
