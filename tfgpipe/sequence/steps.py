"""The steps of a model, of which cells are made.

The model runs once on shapes, by its `call`, see `cells/outline.py`. Users
count calls: of the items of a list, or in the graph of a functional model. Each
is some sections of that run:

    calls       dense | block                    | dense
    sections    ......|.......|........|.........|......
    steps       ......|.......|........|.........|......

A call is one step; a call with a good share of the weights, or one of a few
calls, is several, so that cells can begin inside of it, whatever sizes the
inputs have. The calls of a model with another `call` are not known before it
runs: each section is a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import keras
from keras import tree

from tfgpipe import internals
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
from tfgpipe.graphs import Repeat, TracedModel
from tfgpipe.internals import Nest
from tfgpipe.partition import cut_graph, partition

# Larger calls are several steps, and all calls of fewer than this makes: four
# cells can be even to a tenth.
SHARE = 1 / 40

# Where a model does not take unknown sizes: rows, and any other.
_ROWS, _SIZE = 2, 8

# Primes, which no other axis has.
_MANY_ROWS, _FEWER_ROWS = 7919, 7907

_ANY_LENGTH = 8


class Source:
    """The model of a `GPipe`: its layers, calls and steps.

    Attributes:
        layers: The Keras layers.
        model: The model that has them; None for a list, and for a model that
            is called as one.
        user_model: The model that the user gave; None for a list.
        calls: The calls that the user counts; empty for a model with another
            `call`.
        costs: For each the cost that the user gave, or None.
        steps: The steps, once inputs are known.
        live_bytes: Bytes that cross if a cell begins with a step, for one row.
        made_bytes: Bytes of the results of each step, for one row.
        flops: FLOPs of each step's forward pass, for one row.
        repeats: Runs of equal blocks of steps.
        arguments: The arguments of each call in that run.
        input_spec: Nest of `keras.KerasTensor`s, its inputs, or None.
        problems: Errors of arguments.
        models: The models that share these layers, if they are known.
        opened: Those that have calls of their own.
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
        self.input_spec: Nest = None
        self.problems: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []
        self._counts: list[int] = []  # steps of each call
        self._traced: TracedModel | None = None
        self._apart: Collection[str] = ()
        self.opened: list[keras.Model] = []

    def call(self, x: Nest, training: bool | None) -> Any:
        """Calls the model; `training` is None for the layers' defaults."""
        raise NotImplementedError

    def arranged(self, x: Nest) -> Any:
        """Returns data in the structure of the inputs, if that is known.

        As in Keras, tensors may be in a dict by the names of inputs, which may
        hold more, and lists are taken for tuples.
        """
        spec, flat = self.input_spec, tree.flatten(x)
        if spec is None:
            return x
        names = [tensor.name for tensor in tree.flatten(spec)]
        if isinstance(x, dict) and isinstance(spec, dict):
            flat = tree.flatten({k: v for k, v in x.items() if k in spec})
        elif isinstance(x, dict):
            flat = [x[name] for name in names if name in x]
        if len(flat) != len(names):
            received = [*x] if isinstance(x, dict) else f"{len(flat)} tensors"
            raise ValueError(
                f"`x` must have the inputs {names}. Received: {received}."
            )
        return tree.pack_sequence_as(spec, flat)

    def run_on_shapes(
        self, spec: Nest, is_split: bool, apart: Collection[str] = ()
    ) -> tuple[Any, list[float]]:
        """Runs the model on shapes; layers get variables without storage.

        Args:
            spec: Nest of `keras.KerasTensor`s, the inputs.
            is_split: Whether mini-batches become several micro-batches.
            apart: Names of layers that are steps by themselves.

        Returns:
            Specs of the outputs, and the costs of the steps.
        """
        self._apart = apart
        run, output = self.outlined(spec, is_split)
        self._traced = run.traced
        if is_split:
            self._check_rows(run)
        if not self.calls:
            return output, run.flops
        return output, self._spread()

    def _check_rows(self, run: Outline) -> None:
        """Refuses outputs that are not one a row.

        Inside, the model may use rows as it likes: recurrent layers may have
        time first, and rows second. A trial finds where rows mix.
        """
        traced = run.traced
        given = [t.shape for t in traced.x if t is not None]
        if not all(shape.rank and shape[0] is None for shape in given):
            return
        counts = [_MANY_ROWS]
        # An axis that follows from the rows has another length with others.
        if any(
            t is not None and (t.shape.rank is None or None in t.shape[1:])
            for t in traced.outputs
        ):
            counts.append(_FEWER_ROWS)
        sized = [traced.operations_for(n, _ANY_LENGTH) for n in counts]
        for (path, spec), tensor in zip(
            tree.flatten_with_path(run.output), traced.outputs
        ):
            if tensor is None or not all(sized):
                continue
            name, i = tensor.op.name, tensor.value_index
            shapes = [made[name].outputs[i].shape for made in sized]
            if any(shape.rank is None for shape in shapes):
                continue
            first, *others = (shape.as_list() for shape in shapes)
            has_rows = first[:1] in ([None], [_MANY_ROWS])
            if has_rows and all(shape[1:] == first[1:] for shape in others):
                continue
            raise ValueError(
                "A model must have outputs with a row for each row of the "
                "batch, and no other axis that depends on their number, or "
                f"num_micro_batches=1. Received: output {path!r} of shape "
                f"{spec.shape}. Compute what needs the whole batch in the loss."
            )

    def take_traced(self) -> TracedModel | None:
        """Returns the graph of the run on shapes, once: it may be added to."""
        traced, self._traced = self._traced, None
        return traced

    def outlined(
        self, spec: Nest, is_split: bool = False
    ) -> tuple[Outline, Any]:
        """Runs the model on shapes, takes its steps, returns output specs."""
        # Code that looks at sizes may need some; a model that cannot be trained
        # may predict.
        example = example_of(spec, _ROWS, _SIZE)
        errors = []
        for sizes, training in itertools.product(
            (spec, example), (True, False)
        ):
            try:
                run = outline(
                    self.call,
                    self.layers,
                    sizes,
                    self._starts,
                    training,
                    is_split,
                )
            except Exception as error:
                errors.append(error)
                continue
            self.steps, self.live_bytes = run.steps, run.live_bytes
            self.made_bytes = run.made_bytes
            self.flops, self.repeats = run.flops, run.repeats
            if sizes is spec:
                return run, run.output
            return run, tree.map_structure(_of_any_size, run.output)
        raise errors[0]

    # ------------------------------------------------------ calls and steps
    def _starts(
        self, sections: Sequence[Section], num_operations: Sequence[int]
    ) -> list[int]:
        """Returns the sections with which steps begin.

        Notes the number of steps and the arguments of each call.
        """
        nonempty = nonempty_sections(sections, num_operations)
        if not self.calls:
            return nonempty
        sections_of_calls: list[list[int]] = [[] for _ in self.calls]
        opened, call = {id(model) for model in self.opened}, -1
        # Calls come in their order; sections between them are the last one's.
        for i, section in enumerate(sections):
            around = [*section.around]
            while around and id(around[0]) in opened:
                del around[0]
            if len(around) == 1:
                later = range(call + 1, len(self.calls))
                (operation,) = around
                called = (
                    j for j in later if self.calls[j].operation is operation
                )
                call = next(called, call)
            if call >= 0:
                sections_of_calls[call].append(i)
        sizes = [
            sum(math.prod(weight.shape) for weight in call.layer.weights)
            for call in self.calls
        ]
        are_few = len(sizes) * SHARE < 1
        starts = []
        for indexes, size in zip(sections_of_calls, sizes):
            inner = [i for i in indexes if i in {*nonempty}]
            is_large = inner and (are_few or size > SHARE * sum(sizes))
            begun = {*(inner if is_large else indexes[:1])}
            apart = {
                i
                for i in inner
                if any(is_named(sections[i], name) for name in self._apart)
            }
            behind = {b for a, b in itertools.pairwise(inner) if a in apart}
            starts.append(sorted(begun | apart | behind))
        starts[0] = starts[0] or [0]
        self._counts = [*map(len, starts)]
        self.arguments = [
            sections[indexes[0]].arguments if indexes else ()
            for indexes in sections_of_calls
        ]
        return [*itertools.chain(*starts)]

    def are_steps(self) -> bool:
        """Returns whether it is known that each call is one step."""
        return bool(self.calls) and all(
            is_whole(call.operation) for call in self.calls
        )

    def _spread(self) -> list[float]:
        """Returns the costs of steps; of calls, some are the user's."""
        of_steps: list[float] = []
        for call, cost, arguments, count in zip(
            self.calls, self.costs, self.arguments, self._counts, strict=True
        ):
            shares = self.flops[len(of_steps) : len(of_steps) + count]
            if cost is not None:
                specs = tree.map_structure(_as_spec, arguments)
                spec = specs[0] if len(specs) == 1 else specs
                value = resolve_cost(call.layer, cost, spec)
                shares = shares if any(shares) else [1.0] * count
                shares = [value * (share / sum(shares)) for share in shares]
            of_steps += shares
        return of_steps

    def by_call(self, costs: Sequence[float]) -> list[float]:
        """Returns the costs of calls from costs of steps."""
        if not self.calls:
            return [*costs]
        ends = itertools.accumulate(self._counts, initial=0)
        return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]

    def steps_per_cell(self, counts: Sequence[int]) -> list[int]:
        """Returns the number of steps of each cell, by the user's counts.

        They count calls; or steps, if there are as many.
        """
        if self.calls and sum(counts) == len(self.calls):
            ends = [*itertools.accumulate(self._counts, initial=0)]
            cells = [*itertools.accumulate(counts, initial=0)]
            return [ends[b] - ends[a] for a, b in itertools.pairwise(cells)]
        if sum(counts) == len(self.steps):
            return [*counts]
        names = [step.layer.name for step in self.steps]
        raise ValueError(
            f"`layers_per_cell` must have a sum of {len(names)}: {names}. "
            f"Received: layers_per_cell={[*counts]} (sum {sum(counts)})."
        )

    def cut(
        self,
        costs: Sequence[float],
        num_partitions: int,
        regions: Sequence[int] | None = None,
    ) -> list[int]:
        """Returns the number of steps of each cell, by their costs.

        Cells begin where `regions` do, or else with one of the blocks that the
        model repeats, if that costs little balance.
        """
        if self.model is None and len(costs) == len(self.layers):
            return partition(costs, num_partitions)
        if regions is None:
            regions = [i for run in self.repeats for i in run.bounds()]
        others = {*range(len(costs))} - {*regions}
        return cut_graph(costs, self.live_bytes, num_partitions, others)


def called_model(model: keras.Model, x: Nest, training: bool | None) -> Any:
    """Calls a model as Keras's steps do; None for its own default."""
    if training is not None and internals.takes_training(model):
        return model(x, training=training)
    return model(x)


def too_many_cells(
    num_partitions: int, num_layers: int, default: str = ""
) -> str:
    """Says that there are fewer layers than cells."""
    return (
        f"`num_partitions` must be at most the number of layers, {num_layers}. "
        f"Received: num_partitions={num_partitions}{default}."
    )


def resolve_cost(
    layer: keras.layers.Layer, cost: Any, input_spec: Nest
) -> float:
    """Returns the cost of a layer that the user gave, in its unit.

    `cost` is a finite number from 0, or a function of the layer and
    `input_spec`, a nest of `keras.KerasTensor`, that returns one.

    Example:

    >>> spec = keras.KerasTensor((None, 3))
    >>> resolve_cost(keras.layers.Dense(4), lambda layer, x: layer.units, spec)
    4.0
    """
    value = cost(layer, input_spec) if callable(cost) else cost
    if is_amount(value):
        return float(value)
    raise ValueError(cost_problem(layer, value))


def cost_problem(layer: keras.layers.Layer, cost: Any) -> str:
    """Says what is wrong with the cost of a layer."""
    return (
        f"`cost` of layer '{layer.name}' must be a finite number from 0, or a "
        f"function of (layer, input spec). Received: cost={cost!r}."
    )


def _as_spec(tensor: Any) -> Any:
    """Returns the spec of a tensor of known rank; all else as it is."""
    shape = getattr(tensor, "shape", None)
    if shape is None or shape.rank is None:
        return tensor
    return keras.KerasTensor(shape.as_list(), tensor.dtype.name)


def _of_any_size(spec: keras.KerasTensor | None) -> keras.KerasTensor | None:
    """Returns the spec of an output, whose sizes follow from an example's."""
    if spec is None:
        return None
    shape = [None if n == _SIZE else n for n in spec.shape[1:]]
    return keras.KerasTensor((None, *shape), spec.dtype)
