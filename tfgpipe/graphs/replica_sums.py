"""Functions that wait for other replicas, cut into stages.

Where the graph of a cell adds up over replicas, see
`state/batch_normalization.py`, a function ends, and the next one takes the
total:

    sums of stage 1 -> totals -> sums of stage 2 -> totals -> ... -> results

Sums that do not need each other's totals are of one stage. What a stage makes
and a later one takes is carried, so that nothing is computed twice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.graphs.bundle import Bundle, as_bundle
from tfgpipe.graphs.cut import GraphCutter, Subfunction


class Stage(NamedTuple):
    """A part of a function, up to where partners add up.

    Attributes:
        function: Returns this replica's sums, and what is carried.
        received: The totals, tensors of the graph, one for each sum.
        carried: What later stages take besides.
    """

    function: Subfunction
    received: list[tf.Tensor]
    carried: Bundle


class StagedFunction:
    """A function cut out of a graph, in stages; see `GraphCutter.function`."""

    def __init__(
        self,
        graph: GraphCutter,
        inputs: Iterable[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        controls: Sequence[tf.Operation],
        sums: Bundle | None,
    ):
        self._graph = graph
        self._inputs = list(inputs)
        self._cut = fetches, controls, sums

    @property
    def before_last(self) -> list[Stage]:
        """All stages but the last one."""
        return self._stages[0]

    @property
    def last(self) -> Subfunction:
        """The last stage, which returns what the function does."""
        return self._stages[1]

    @functools.cached_property
    def whole(self) -> Subfunction:
        """The function in one stage.

        Raises:
            ValueError: If it adds up over replicas.
        """
        if self._levels:
            raise ValueError(
                "What a loss is divided by must not follow from a batch "
                "normalisation over replicas, where it has to be known before "
                "all forward tasks are done. Received: a size, a mask or a "
                "weight that does, or a loss class of your own, after a layer "
                'with synchronized=True. Pass schedule="gpipe", '
                "synchronized=False, or batches of a fixed shape."
            )
        return self.last

    @functools.cached_property
    def _levels(self) -> list[list[tf.Operation]]:
        """The additions, those first that need none of the others."""
        fetches, controls, _ = self._cut
        names, _ = self._graph.reached(self._inputs, fetches, controls)
        levels: list[list[tf.Operation]] = []
        depth: dict[str, int] = {}
        for op in self._graph.operations:
            if op.name not in names:
                continue
            own = max((depth.get(t.op.name, 0) for t in op.inputs), default=0)
            if is_sum(op):
                if own == len(levels):
                    levels.append([])
                levels[own].append(op)
                own += 1
            depth[op.name] = own
        return levels

    @functools.cached_property
    def _stages(self) -> tuple[list[Stage], Subfunction]:
        """All stages but the last one, and that."""
        graph, inputs = self._graph, list(self._inputs)
        fetches, controls, sums = self._cut
        totals = [op.outputs[0] for level in self._levels for op in level]
        done: set[str] = set()  # operations of earlier stages
        stages: list[Stage] = []
        #     stage 0    inputs                       -> sums 0, carried 0
        #                partners add up sums 0: totals 0
        #     stage 1    inputs, totals 0, carried 0  -> sums 1, carried 1
        #                ...
        #     last       inputs, all totals, all carried  -> fetches
        for i, level in enumerate(self._levels):
            own_sums = [op.inputs[0] for op in level]
            received = [op.outputs[0] for op in level]
            own = graph.reached(inputs, own_sums)[0] - done
            done |= own
            wanted = list(fetches)
            for later in self._levels[i + 1 :]:
                wanted += [op.inputs[0] for op in later]
            known = [*inputs, *totals]
            rest, _ = graph.reached(known, wanted, controls, done)
            at_hand = [t for one in known for t in as_bundle(one).aliases]
            direct = [t for one in wanted for t in as_bundle(one).tensors]
            taken = graph.entering(rest - done, direct, at_hand)
            made = {t.ref(): t for t in taken if t.op.name in own}
            carried = Bundle(list(made.values()), together=False)
            stage = graph.function(inputs, [*own_sums, carried])
            stages.append(Stage(stage, received, carried))
            inputs += [*received, carried]
        return stages, graph.function(inputs, fetches, controls, sums, done)


_NAME = "moments_over_replicas"

_TYPE = "PlaceholderWithDefault"


@tf.custom_gradient
def sum_over_replicas(tensor: tf.Tensor) -> Any:
    """The point of a cell's graph where the partners' tensors are added up."""

    def point(value: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.PlaceholderWithDefault(
            input=value, shape=value.shape, name=_NAME
        )

    return point(tensor), point


def is_sum(op: tf.Operation) -> bool:
    """Whether an operation is what `sum_over_replicas` added to the graph."""
    return op.type == _TYPE and op.name.split("/")[-1].startswith(_NAME)


def sums_over_replicas(
    operations: Iterable[tf.Operation],
) -> list[tf.Tensor]:
    """What `sum_over_replicas` returned in the graph of some operations."""
    return [op.outputs[0] for op in operations if is_sum(op)]
