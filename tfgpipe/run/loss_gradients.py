"""Where the backward pass starts: counts, and gradients of the loss.

What losses count is known before they are. A loss that is added up is divided
by a number of rows, unmasked positions or weights. It rarely depends on what
the layers compute: a function cut out of each cell computes nothing but what
the numbers follow from, so that a backward pass can start before the last
forward pass has ended. Where they do depend on it, that is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.boundary import CellArguments
from tfgpipe.cells import CellFunction, CellTasks
from tfgpipe.micro_batches import MicroBatches


class LossGradients(NamedTuple):
    """Where the backward pass starts: gradients of the loss.

    Attributes:
        outputs: For each micro-batch, with respect to the last cell's flat
            outputs: of the shape of an output each, or None.
        head: With respect to the head's losses, scalars, the same for every
            micro-batch; [] without a head.
        extra: For each cell, with respect to each of its layers' own losses,
            scalars, or None.
    """

    outputs: list[list[Any]]
    head: list[tf.Tensor]
    extra: list[list[Any]]

    def of_losses(
        self, k: int, m: int, has_head: bool, micro_batches: MicroBatches
    ) -> list[Any]:
        """Gradients with respect to cell k's losses, for micro-batch m."""
        head = [
            micro_batches.select(m, d, tf.zeros_like(d))
            for d in (self.head if has_head else [])
        ]
        return head + [
            None if d is None else d * micro_batches.fraction(m, d.dtype)
            for d in self.extra[k]
        ]


def counts_ahead(
    functions: Sequence[CellFunction],
    tasks: Sequence[CellTasks],
    arguments: Callable[[int, int], CellArguments],
    device: Callable[[int, int], str],
    num_micro_batches: int,
) -> list[list[tf.Tensor]]:
    """What each micro-batch's losses count, scalars.

    Args:
        functions: The cells' functions.
        tasks: What runs the tasks of each cell.
        arguments: Of cell k for micro-batch m; of inputs, those of the first
            cell are enough.
        device: Where cell k computes micro-batch m.
        num_micro_batches: How many there are.

    Raises:
        ValueError: If they follow from a variable that an earlier cell
            assigns, which is not known before that cell has run.
    """
    parts = _parts(tasks)
    _check_assigned(functions, tasks, [part for part, _ in parts])
    counts = []
    for m in range(num_micro_batches):
        flat = tf.nest.flatten(arguments(0, m).inputs)
        found = [flat[i] for i in parts[0][1]]
        for k, (part, places) in enumerate(parts):
            graph = tasks[k].graph
            inputs = graph.traced.inputs.inputs
            flat = [None] * len(tf.nest.flatten(inputs))
            for i, value in zip(places, found):
                flat[i] = value
            values = arguments(k, m)._replace(
                inputs=tf.nest.pack_sequence_as(inputs, flat)
            )
            with tf.device(device(k, m)):
                found = part(graph.values(values))
        counts.append(found)
    return counts


def _parts(tasks: Sequence[CellTasks]) -> list[tuple[Any, list[int]]]:
    """Of each cell what the counts need, and which flat inputs it takes."""
    parts: list[tuple[Any, list[int]]] = []
    wanted = list(tasks[-1].graph.traced.outputs.counts)
    for k in reversed(range(len(tasks))):
        part = tasks[k].graph.part(wanted)
        taken = {t.ref() for t in part.inputs if isinstance(t, tf.Tensor)}
        inputs = tf.nest.flatten(tasks[k].graph.traced.inputs.inputs)
        places = [
            i
            for i, t in enumerate(inputs)
            if t is not None and t.ref() in taken
        ]
        parts.insert(0, (part, places))
        if k > 0:
            outputs = tasks[k - 1].graph.traced.outputs
            flat = [*outputs.tensors, *outputs.masks]
            wanted = [flat[i] for i in places]
    return parts


def _check_assigned(
    functions: Sequence[CellFunction],
    tasks: Sequence[CellTasks],
    parts: Sequence[Any],
) -> None:
    """Refuses counts that follow from what earlier cells assign."""
    assigned: set[int] = set()
    for function, own, part in zip(functions, tasks, parts):
        traced = own.graph.traced
        taken = {t.ref() for t in part.inputs if isinstance(t, tf.Tensor)}
        for variable, tensor in [
            *zip(function.state, traced.inputs.state),
            *zip(function.flat_weights, traced.inputs.assigned),
        ]:
            is_taken = tensor is not None and tensor.ref() in taken
            if is_taken and id(variable) in assigned:
                raise ValueError(
                    "What a loss is divided by must be known before all "
                    "forward tasks are done, under a schedule that goes "
                    f"backward early. Received: '{variable.path}', which a "
                    "layer of an earlier cell than cell "
                    f"{function.cell.number} assigns, and from which a size, "
                    "a mask or a weight follows. Pass "
                    'schedule="gpipe", put both layers into one cell with '
                    "`layers_per_cell`, or use batches of a fixed shape."
                )
        seeds = {id(v) for v in function.seeds}
        outputs = traced.outputs
        assigned |= {
            id(variable)
            for variable, new in [
                *zip(function.state, outputs.state),
                *zip(function.flat_weights, outputs.weights),
            ]
            if new is not None and id(variable) not in seeds
        }
