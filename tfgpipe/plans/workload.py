"""What consecutive layers take and hold, for a micro-batch: sums of the layers.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tfgpipe.costs import GradientPaths
from tfgpipe.partition import partition
from tfgpipe.plans.machine import Machine
from tfgpipe.profiles import MEASURED, CellSeconds, LayerSeconds
from tfgpipe.schedules import CellFacts


def seconds_by_flops(size: Any, rows: float, machine: Machine) -> LayerSeconds:
    """Estimates a layer's seconds: that of its FLOPs, or of its bytes if more.

    A backward pass has twice the operations of a forward pass: a matrix product
    has two gradients, of its input and of its weights. A layer whose weights
    are frozen computes one of them. The last layer of a cell is not computed
    again if it keeps nothing but its inputs. `rows` are those of a micro-batch.
    """
    results = size.kept.outputs.of(rows) + size.kept.others.of(rows)
    moved = size.weight_bytes + size.kept.inputs.of(rows) + results
    forward = max(
        rows * size.flops / (machine.flops * machine.efficiency),
        moved / machine.memory_bandwidth,
    )
    is_trained = size.num_params > 0
    is_frozen = size.num_values > 0 and not is_trained
    half = forward if is_trained else 0.0
    other = forward if is_trained or is_frozen else 2 * forward
    last = forward if results else 0.0
    backward = half + other
    seconds = forward, forward, last, backward, other, half, backward
    return LayerSeconds(dict(zip(MEASURED, seconds)))


class CellNeeds(NamedTuple):
    """What consecutive layers need for a micro-batch, most of it in bytes.

    Attributes:
        seconds: By the kind of the task.
        facts: What a program has to know of them.
        inputs: What comes in.
        outputs: What goes out.
        gradient_bytes: Gradients of what comes in.
        kept: What the backward pass needs, inputs among it.
        kept_inputs: The inputs among that.
        crossing: What the gradients of inputs keep for those of weights.
        sparse: Slices of gradients, which are not added up.
        forward: What a forward task needs besides, while it runs.
        backward: What a backward task needs besides.
        gradients: One gradient of each weight.
    """

    seconds: dict[str, float]
    facts: CellFacts
    inputs: float
    outputs: float
    gradient_bytes: float
    kept: float
    kept_inputs: float
    crossing: float
    sparse: float
    forward: float
    backward: float
    weights: int
    slots: int
    gradients: int

    @property
    def addition(self) -> float:
        """Seconds of adding gradients to sums, in each backward task but one.

        The first of a step has nothing to add to.
        """
        return self.seconds["backward"] - self.seconds["backward_first"]


class Workload:
    """The layers of a model, for micro-batches of some size.

    Sums over layers i to j take constant time. `output_bytes` are those of a
    row of the last layer's outputs; `seconds` those of each layer's tasks, to
    which a task adds `task_seconds`. If XLA compiles (`is_compiled`),
    recomputations are part of the backward tasks.
    """

    def __init__(
        self,
        sizes: Sequence[Any],
        output_bytes: float,
        seconds: Sequence[LayerSeconds],
        task_seconds: float,
        rows: float,
        is_compiled: bool = False,
    ):
        self._is_compiled = is_compiled
        self._known: dict[Any, list[list[CellNeeds]]] = {}
        self.sizes = sizes
        self.rows = rows
        self._seconds = CellSeconds(
            seconds, (size.num_params > 0 for size in sizes), task_seconds
        )
        self._paths = GradientPaths([size.kept.path for size in sizes])
        live = [rows * size.live_bytes for size in sizes]
        self._live = [*live, rows * output_bytes]
        self._floats = [rows * size.float_bytes for size in sizes]
        self._inputs = [size.kept.inputs.of(rows) for size in sizes]
        self._outputs = [size.kept.outputs.of(rows) for size in sizes]
        self._outputs[-1:] = [max(self._live[-1], *self._outputs[-1:])]
        others = [size.kept.others.of(rows) for size in sizes]
        self._others = _sums(others)
        self._between = _sums(  # what either of two neighbours keeps
            max(a, b) for a, b in zip(self._outputs, self._inputs[1:])
        )
        self._crossing = _sums(size.kept.crossing.of(rows) for size in sizes)
        self._sparse = _sums(size.kept.sparse.of(rows) for size in sizes)
        self._forward = [  # its inputs are there, too
            before + size.kept.forward.of(rows)
            for before, size in zip(self._live, sizes)
        ]
        self._backward = [size.kept.backward.of(rows) for size in sizes]
        self._weights = _sums(size.weight_bytes for size in sizes)
        self._slots = _sums(size.slot_bytes for size in sizes)
        self._gradients = _sums(size.gradient_bytes for size in sizes)

    @functools.cached_property
    def costs(self) -> list[float]:
        """Seconds of each layer's tasks, for the cut."""
        return self._seconds.costs()

    def cells(
        self, layers_per_cell: Sequence[int], num_groups: int = 1
    ) -> list[list[CellNeeds]]:
        """What the groups of each cell need, as `GPipe` cuts them."""
        key = tuple(layers_per_cell), num_groups
        if key not in self._known:
            self._known[key] = [*self._cells(*key)]
        return self._known[key]

    def _cells(
        self, layers_per_cell: tuple[int, ...], num_groups: int
    ) -> Iterator[list[CellNeeds]]:
        costs, start = self.costs, 0
        cut = functools.cache(lambda own: partition(own, num_groups))
        for count in layers_per_cell:
            sizes = [count]
            if num_groups > 1:
                sizes = cut(tuple(costs[start : start + count]))
            groups = []
            for size in sizes:
                groups.append(self.cell(start, start + size))
                start += size
            yield groups

    def cell(self, start: int, stop: int) -> CellNeeds:
        """What the layers from `start` to before `stop` need."""

        def between(sums: Sequence[float], last: int = stop) -> float:
            return sums[last] - sums[start]

        seconds, first = self._seconds.of(start, stop), self._seconds.first
        # The loss, behind the last layer, is taken to keep the outputs.
        has_loss = stop == len(self.sizes)
        keeps = has_loss or self._paths.keeps(start, stop)
        # What two neighbours both keep between them counts once: `_between`.
        inputs = kept = self._inputs[start]
        if keeps:
            kept += between(self._others) + between(self._between, stop - 1)
            kept += self._outputs[stop - 1]
        seconds["recompute"] *= keeps
        return CellNeeds(
            seconds,
            CellFacts.of(
                has_backward=stop > first,
                needs_dx=start > first,
                has_dx=self._paths.has_dx(start, stop),
                can_be_split=self._seconds.has_halves(start, stop),
                keeps=keeps and not self._is_compiled,
            ),
            inputs=self._live[start],
            outputs=self._live[stop],
            gradient_bytes=self._floats[start] if start > first else 0.0,
            kept=kept,
            kept_inputs=inputs,
            crossing=between(self._crossing),
            sparse=between(self._sparse),
            forward=max(self._forward[start:stop]),
            backward=max(self._backward[start:stop]),
            weights=int(between(self._weights)),
            slots=int(between(self._slots)),
            gradients=int(between(self._gradients)),
        )


def _sums(values: Any) -> list[float]:
    return [*itertools.accumulate(values, initial=0)]
