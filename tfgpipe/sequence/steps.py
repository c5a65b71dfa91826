"""The steps of a model: what cells are made of.

The model runs once on shapes, by its own call, see `cells/outline.py`. What a
user counts are calls: of the items of a list, or in the graph of a functional
model. Each is some sections of that run:

    calls       dense | block                    | dense
    sections    ......|.......|........|.........|......
    steps       ......|.......|........|.........|......

A call is one step; one with a good share of the weights, or one of a few calls,
is several, so that cells can begin inside of it. That is so whatever sizes the
inputs have. Of a model with a `call` of its own nobody knows the calls before
it runs: each section is a step.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import keras
from keras import tree

from tfgpipe.cells import (
    LayerCall,
    Outline,
    Section,
    SectionCall,
    is_named,
    is_whole,
    nonempty_sections,
    outline,
)
from tfgpipe.checks import is_amount
from tfgpipe.costs import example_of
from tfgpipe.graphs import Repeat, TracedModel, operation_flops
from tfgpipe.partition import cut_graph
from tfgpipe.sequence.restrictions import check_model_rows

# Larger calls are several steps, and all calls of fewer than this makes: four
# cells can be even to a tenth.
SHARE = 1 / 40

# Where a model does not take unknown sizes: rows, and any other.
_ROWS, _SIZE = 2, 8


class Source:
    """What a `GPipe` is made of.

    Attributes:
        layers: The Keras layers.
        model: The model that they are of; None for a list, and for what is
            called as one.
        user_model: The model that the user gave; None for a list.
        calls: The calls that the user counts; empty for a model with its own
            `call`.
        costs: For each what the user said of its cost, or None.
        steps: What cells are made of, once inputs are known.
        live_bytes: What crosses if a cell begins with a step, for one row.
        made_bytes: What each step makes, for one row.
        flops: FLOPs of each step's forward pass, for one row.
        repeats: Runs of equal blocks of steps.
        arguments: What each call was given in that run.
        input_spec: Nest of `keras.KerasTensor`s that comes in, or None.
        problems: What is wrong.
        models: The models that share these layers, if they are known.
    """

    layers: list[keras.layers.Layer]
    model: keras.Model | None
    user_model: keras.Model | None
    models: Sequence[keras.Model]

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self.costs: list[Any] = []
        self.steps: list[SectionCall] = []
        self.live_bytes: list[int] = []
        self.made_bytes: list[int] = []
        self.flops: list[float] = []
        self.repeats: list[Repeat] = []
        self.input_spec: Any = None
        self.problems: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []
        self._counts: list[int] = []  # steps of each call
        self._traced: TracedModel | None = None
        self._apart: Collection[str] = ()

    def call(self, x: Any, training: bool | None) -> Any:
        """Calls the model; None for what its layers do by default."""
        raise NotImplementedError

    def opened(self) -> set[int]:
        """The ids of models that have calls of their own."""
        return set()

    def run_on_shapes(
        self, spec: Any, is_split: bool, apart: Collection[str] = ()
    ) -> tuple[Any, list[float]]:
        """Runs the model on shapes; layers get variables by it, no storage.

        `is_split` if mini-batches become several micro-batches; `apart` are
        the names of layers that are steps by themselves. Returns specs of its
        outputs, and the costs of the steps.

        Raises:
            ValueError: If a layer does not take what the one before returns, or
                the outputs have no row for each row of the inputs.
        """
        self._apart = apart
        found, output = self.outlined(spec, is_split)
        self._traced = found.traced
        if is_split:
            self._check_rows(found)
        known = [
            None if cost is None else _cost(*given)
            for cost, *given in zip(
                self.costs, self.calls, self.costs, self.arguments
            )
        ]
        return output, self.spread(known) if self.calls else found.flops

    def _check_rows(self, found: Outline) -> None:
        """Refuses outputs that are not one a row, see `check_model_rows`."""

        def maker(tensor: Any) -> str:
            if tensor.op.type == "Identity":
                tensor = tensor.op.inputs[0]
            if tensor.op.type == "Placeholder":
                return "no call"
            return f"'{self.call_of(found.step_of(tensor))}'"

        name = None if self.model is None else self.model.name
        check_model_rows(name, found, maker)

    def take_traced(self) -> TracedModel | None:
        """The graph of the run on shapes, once: the caller may add to it."""
        traced, self._traced = self._traced, None
        return traced

    def outlined(
        self, spec: Any, is_split: bool = False
    ) -> tuple[Outline, Any]:
        """One run, whose steps are taken, and specs of what it returns."""
        found, output = self._run(spec, is_split)
        self.steps, self.live_bytes = found.steps, found.live_bytes
        self.made_bytes = found.made_bytes
        self.flops, self.repeats = found.flops, found.repeats
        return found, output

    def _run(self, spec: Any, is_split: bool) -> tuple[Outline, Any]:
        # Code that looks at sizes may need some; what cannot be trained may do
        # for `predict`.
        example = example_of(spec, _ROWS, _SIZE)
        errors = []
        ways = itertools.product((spec, example), (True, False))
        for given, training in ways:
            try:
                with self.explaining():
                    found = outline(
                        self.call,
                        self.layers,
                        given,
                        operation_flops,
                        self._starts,
                        training,
                        is_split,
                    )
            except Exception as error:
                errors.append(error)
                continue
            if given is spec:
                return found, found.output
            return found, tree.map_structure(_of_any_size, found.output)
        raise errors[0]

    def explaining(self) -> contextlib.AbstractContextManager[None]:
        """Inside, errors say what layers must accept."""
        return contextlib.nullcontext()

    # ------------------------------------------------------ calls and steps
    def _starts(
        self, sections: Sequence[Section], num_operations: Sequence[int]
    ) -> list[int]:
        """The sections with which steps begin.

        Notes how many steps each call is, and what it was given.
        """
        filled = nonempty_sections(sections, num_operations)
        if not self.calls:
            return filled
        own: list[list[int]] = [[] for _ in self.calls]
        for i, place in enumerate(self.places(sections)):
            if place is not None:
                own[place].append(i)
        sizes = [_num_values(call.layer) for call in self.calls]
        are_few, are_filled = len(sizes) * SHARE < 1, {*filled}
        starts = []
        for found, size in zip(own, sizes):
            inner = [i for i in found if i in are_filled]
            is_large = inner and (are_few or size > SHARE * sum(sizes))
            own_starts = {*(inner if is_large else found[:1])}
            starts.append(sorted(own_starts | self._around(sections, inner)))
        starts[0] = starts[0] or [0]
        self._counts = [*map(len, starts)]
        self.arguments = [
            sections[found[0]].arguments if found else () for found in own
        ]
        return [*itertools.chain(*starts)]

    def _around(
        self, sections: Sequence[Section], inner: Sequence[int]
    ) -> set[int]:
        """Of some sections those that are steps, and those behind them."""
        own = {
            i
            for i in inner
            if any(is_named(sections[i], name) for name in self._apart)
        }
        return own | {b for a, b in itertools.pairwise(inner) if a in own}

    def places(self, sections: Sequence[Section]) -> list[int | None]:
        """The number of the call of each section.

        Calls come in their order; what is between them is of the one before.
        """
        opened = self.opened()
        place: int | None = None
        found = []
        for section in sections:
            around = [*section.around]
            while around and id(around[0]) in opened:
                del around[0]
            if len(around) == 1:
                start = 0 if place is None else place + 1
                for i in range(start, len(self.calls)):
                    if self.calls[i].operation is around[0]:
                        place = i
                        break
            found.append(place)
        return found

    def are_steps(self) -> bool:
        """Whether it is known that each call is one step."""
        return bool(self.calls) and all(
            is_whole(call.operation) for call in self.calls
        )

    def spread(self, costs: Sequence[float | None]) -> list[float]:
        """The costs of the steps: of each call's, or by FLOPs for None."""
        found: list[float] = []
        for cost, count in zip(costs, self._counts, strict=True):
            own = self.flops[len(found) : len(found) + count]
            if cost is not None:
                parts = own if any(own) else [1.0] * count
                own = [cost * (part / sum(parts)) for part in parts]
            found += own
        return found

    def by_call(self, costs: Sequence[float]) -> list[float]:
        """What the calls cost, by what the steps do."""
        if not self.calls:
            return [*costs]
        ends = itertools.accumulate(self._counts, initial=0)
        return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]

    def call_of(self, step: int) -> str:
        """The name of the call that a step is of."""
        if not self.calls:
            return str(self.steps[step].section.name)
        ends = [*itertools.accumulate(self._counts)]
        return str(self.calls[bisect.bisect_right(ends, step)].operation.name)

    def steps_per_cell(self, counts: Sequence[int]) -> list[int]:
        """The number of steps of each cell, by that of what the user counts.

        These are calls; or steps, if there are as many.

        Raises:
            ValueError: If there are as many of neither.
        """
        if self.calls and sum(counts) == len(self.calls):
            ends = [*itertools.accumulate(self._counts, initial=0)]
            cells = [*itertools.accumulate(counts, initial=0)]
            return [ends[b] - ends[a] for a, b in itertools.pairwise(cells)]
        if sum(counts) == len(self.steps):
            return [*counts]
        names = [step.layer.name for step in self.steps]
        raise ValueError(
            "`layers_per_cell` must place every layer that the model calls "
            f"exactly once. Expected a sum of {len(names)}: {names}. Received: "
            f"layers_per_cell={[*counts]} (sum {sum(counts)}). Omit it to let "
            "`GPipe` balance the cells by cost."
        )

    def cut(
        self,
        costs: Sequence[float],
        num_partitions: int,
        regions: Sequence[int] | None = None,
    ) -> list[int]:
        """The number of steps of each cell, by their costs.

        Cells begin where `regions` do, or else with one of the blocks that the
        model repeats, if that costs little balance.
        """
        if regions is None:
            regions = [i for run in self.repeats for i in run.bounds()]
        others = {*range(len(costs))} - {*regions}
        return cut_graph(costs, self.live_bytes, num_partitions, others)


def too_many_cells(
    num_partitions: int, num_layers: int, default: str = ""
) -> str:
    """Says that there are fewer layers than cells."""
    return (
        "`num_partitions` must be at most the number of layers, "
        f"{num_layers}. Received: num_partitions={num_partitions}{default}. "
        "Ask for fewer cells."
    )


def _num_values(layer: keras.layers.Layer) -> int:
    """How many numbers the weights of a layer have."""
    return sum(math.prod(weight.shape) for weight in layer.weights)


def _cost(call: LayerCall, cost: Any, arguments: tuple[Any, ...]) -> float:
    """What a call costs, by what the user said."""
    given = tree.map_structure(_spec, arguments)
    spec = given[0] if len(given) == 1 else given
    return resolve_cost(call.layer, cost, spec)


def resolve_cost(
    layer: keras.layers.Layer, cost: Any, input_spec: Any
) -> float:
    """What a layer costs by what the user gave, in the unit of that.

    `cost` is a finite number from 0, or a function of the layer and
    `input_spec`, a nest of `keras.KerasTensor`, that returns one.

    Raises:
        ValueError: If it is something else, or the function fails.

    Example:

    >>> spec = keras.KerasTensor((None, 3))
    >>> resolve_cost(keras.layers.Dense(4), lambda layer, x: layer.units, spec)
    4.0
    """
    if not callable(cost):
        if is_amount(cost):
            return float(cost)
        raise _bad_cost(layer, f"cost={cost!r}")
    try:
        value = cost(layer, input_spec)
    except Exception as error:
        raise _bad_cost(
            layer,
            "its function, called for an input of shape "
            f"{_shapes(input_spec)}, raised {type(error).__name__}: {error}",
        ) from error
    if is_amount(value):
        return float(value)
    raise _bad_cost(layer, f"its function returned {value!r}")


def _bad_cost(layer: keras.layers.Layer, received: str) -> ValueError:
    return ValueError(
        f"`cost` of layer '{layer.name}' must be a finite number that is not "
        "negative, or a function of (layer, input spec) that returns one. "
        f"Received: {received}. "
        "Pass the layer without a cost to have its FLOPs estimated."
    )


def _shapes(input_spec: Any) -> Any:
    return tree.map_structure(lambda x: getattr(x, "shape", None), input_spec)


def _spec(tensor: Any) -> Any:
    """That of a tensor of known rank."""
    shape = getattr(tensor, "shape", None)
    if shape is None or shape.rank is None:
        return tensor
    return keras.KerasTensor(shape.as_list(), tensor.dtype.name)


def _of_any_size(spec: Any) -> Any:
    """A spec of an output of a run with some sizes, which may be others."""
    if spec is None:
        return None
    shape = [None if n == _SIZE else n for n in spec.shape[1:]]
    return keras.KerasTensor((None, *shape), spec.dtype)
