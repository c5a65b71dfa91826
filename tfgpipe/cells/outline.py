"""The sections of a model, from one run on shapes alone.

Nothing is computed, and variables need no storage: what a section costs, what
it reads and what crosses before it is read off the graph. Steps are some
sections each, one after the other.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells.cell import LayerCall, stand_in
from tfgpipe.cells.model_trace import ModelCall, trace_model
from tfgpipe.cells.sections import Section
from tfgpipe.graphs import (
    CHEAP,
    Repeat,
    TracedModel,
    TraceOptions,
    follows,
    repeats_of,
)


class SectionCall(LayerCall):
    """Some sections as a step of a model.

    `layer` holds its variables: the called layer, if the whole call is in the
    step; else a stand-in with the variables that are read.

    Attributes:
        section: The first section.
        read: The variables that they read, and no layer of a step holds.
    """

    def __init__(
        self,
        section: Section,
        is_whole: bool,
        read: list[keras.Variable],
    ):
        called = section.operation if is_whole else None
        super().__init__(called or stand_in(section.name, read))
        self.section = section
        self.read = read

    @property
    def variables(self) -> list[keras.Variable]:
        """All that the step has to hold."""
        held = {id(v): v for v in [*self.layer.variables, *self.read]}
        return [*held.values()]


# With which sections a step begins, see `outline`.
Starts = Callable[[Sequence[Section], Sequence[int]], Sequence[int]]


def cell_of_call(
    steps_by_cell: Iterable[Iterable[SectionCall]],
) -> Callable[[keras.Operation, int], int | None]:
    """Tells in which cell a call of a layer is to be, see `Sections`."""
    cells = {
        (id(step.section.operation), step.section.call): k
        for k, steps in enumerate(steps_by_cell)
        for step in steps
    }
    return lambda operation, call: cells.get((id(operation), call))


class Outline(NamedTuple):
    """What one run of a model has shown.

    Attributes:
        traced: The run itself; no variable has a value in it.
        steps: Some sections each.
        flops: Of each, for one row.
        live_bytes: What crosses if a cell begins there, for one row.
        made_bytes: What each makes, for one row: of it a part is kept.
        repeats: Runs of equal blocks of steps.
        output: Specs of the outputs, a nest.
    """

    traced: TracedModel
    steps: list[SectionCall]
    flops: list[float]
    live_bytes: list[int]
    made_bytes: list[int]
    repeats: list[Repeat]
    output: Any

    def step_of(self, tensor: tf.Tensor) -> int:
        """The number of the step that makes a tensor."""
        place = self.traced.places[tensor.op.name]
        starts = [step.section.start for step in self.steps]
        return max(0, bisect.bisect_right(starts, place) - 1)


def makers(_: Sequence[Section], num_operations: Sequence[int]) -> list[int]:
    """Sections that make something, as steps: others go with the next one."""
    return [i for i, count in enumerate(num_operations) if count]


def outline(
    call: Callable[[Any, bool], Any],
    layers: Sequence[keras.layers.Layer],
    spec: Any,
    flops: Callable[[tf.Operation], float],
    starts: Starts = makers,
    training: bool = True,
    is_split: bool = False,
) -> Outline:
    """Runs a model on shapes.

    Args:
        call: Calls it, with `training`.
        layers: All that it consists of.
        spec: Nest of `keras.KerasTensor`s that it takes.
        flops: Counts those of an operation.
        starts: Says with which sections a step begins, by the sections and by
            how many operations of each make something.
        training: Whether it is trained.
        is_split: Whether there will be several micro-batches.
    """

    def one(spec: Any) -> Any:
        if spec is None:
            return None
        return keras.KerasTensor([size or 1 for size in spec.shape], spec.dtype)

    run = functools.partial(
        shape_trace, call, layers, training=training, is_split=is_split
    )
    reader = _Reader(run(spec), flops)
    if not reader.knows_sizes:
        example = tree.map_structure(one, spec)
        with contextlib.suppress(Exception):  # it may need other sizes
            reader.take_flops_of(run(example))
    return reader.outline(starts)


def shape_trace(
    call: Callable[[Any, bool], Any],
    layers: Sequence[keras.layers.Layer],
    spec: Any,
    training: bool = True,
    is_split: bool = False,
) -> TracedModel:
    """The graph of a model, from shapes alone; see `outline`."""
    specs = tree.map_structure(
        lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), spec
    )

    # Which variables are the layers' is known when they are built: behind it.
    model = ModelCall(call, layers, training, is_split, trains_others=True)
    with (
        internals.outside_functions(),
        internals.deferred_variables(),
        internals.random_state_kept(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the run of a step will warn
        traced = trace_model(model, specs, None, TraceOptions())
    for layer in layers:
        internals.forget_losses(layer)
    return traced


class _Reader:
    """Reads off a graph what its sections are.

    Attributes:
        knows_sizes: Whether the sizes of all that is computed are known, for
            one row, and 1 for others that inputs do not have.
    """

    def __init__(
        self, traced: TracedModel, flops: Callable[[tf.Operation], float]
    ):
        self._traced = traced
        self._flops = flops
        self._made = [
            op for op in traced.operations if op.type != "Placeholder"
        ]
        self._sized: dict[str, tf.Operation] = {}
        self._rows = 1
        x = [t for t in traced.x if t is not None and t.shape.rank]
        for rows, size in ((1, 1), (1, None), (2, 1), (2, None)):
            sized = traced.operations_for(rows, size)
            if sized is not None:
                known = next((t.shape[0] for t in x if t.shape[0]), None)
                self._sized, self._rows = sized, known or rows
                break
        self.knows_sizes = True
        self._costs = self._flops_by_section(traced, self._sized, self._rows)

    def take_flops_of(self, example: TracedModel) -> None:
        """Takes those of a run for one row, whose calls are the same."""
        calls, others = (
            [([*map(id, s.around)], s.call) for s in traced.sections]
            for traced in (self._traced, example)
        )
        if calls == others:
            self._costs = self._flops_by_section(example, {}, 1)

    def outline(self, starts_of: Starts) -> Outline:
        """The steps, which begin with the sections that `starts_of` says."""
        traced, sections = self._traced, self._traced.sections
        count = [0] * len(self._costs)
        for op in self._made:
            own = traced.section_at(self._traced.places[op.name])
            count[min(own, len(count) - 1)] += 1
        firsts = starts_of(sections[: len(count)], count) or [0]
        ends = [0, *firsts[1:], len(count)]
        places = [sections[i].start for i in firsts]

        def step_of(op: tf.Operation) -> int:
            place = self._traced.places[op.name]
            return max(0, bisect.bisect_right(places, place) - 1)

        operations: list[list[tf.Operation]] = [[] for _ in firsts]
        for op in self._made:
            operations[step_of(op)].append(op)
        read, last_taken = self._reads(operations)
        steps = self._steps(firsts, read)
        live = self._live_bytes(len(steps), last_taken, step_of)
        return Outline(
            traced,
            steps,
            [sum(self._costs[a:b]) for a, b in itertools.pairwise(ends)],
            live,
            [sum(map(self._made_bytes, own)) for own in operations],
            repeats_of(traced, operations, live),
            tree.map_structure(self._output, traced.structure),
        )

    def _flops_by_section(
        self,
        traced: TracedModel,
        sized: Mapping[str, tf.Operation],
        rows: int,
    ) -> list[float]:
        """Those of the operations that the results need, for one row.

        `sized` are operations by their names, as they are for so many rows.
        """
        # The last section is behind all layers, and goes with the one before.
        costs = [0.0] * max(1, len(traced.sections) - 1)
        found: set[str] = set()
        waiting = [t.op for t in traced.results]
        while waiting:
            op = waiting.pop()
            if op.name in found:
                continue
            found.add(op.name)
            waiting += [t.op for t in op.inputs] + [*op.control_inputs]
            own = traced.section_at(traced.places[op.name])
            # The graphs of functions are those of the model, of any rows.
            count = 1
            if not internals.takes_functions(op.type) and op.name in sized:
                op, count = sized[op.name], rows
            amount = self._flops(op) / count
            tensors = [*op.inputs, *op.outputs]
            if amount and not all(t.shape.is_fully_defined() for t in tensors):
                self.knows_sizes = False
            costs[min(own, len(costs) - 1)] += amount
        return costs

    def _reads(
        self, operations: Sequence[Sequence[tf.Operation]]
    ) -> tuple[list[dict[int, keras.Variable]], dict[Any, int]]:
        """The variables that steps read; the last that takes each tensor."""
        traced = self._traced
        given = {u.tensor.ref(): u.variable for u in traced.uses}
        given |= {tensor.ref(): variable for variable, tensor in traced.state}
        free: set[Any] = {t.ref() for _, t in traced.graph.captures}
        read: list[dict[int, keras.Variable]] = [{} for _ in operations]
        last: dict[Any, int] = {}
        for i, own in enumerate(operations):
            for tensor in (t for op in own for t in op.inputs):
                if (variable := given.get(tensor.ref())) is not None:
                    read[i][id(variable)] = variable
                elif not follows(tensor, free):
                    last[tensor.ref()] = max(i, last.get(tensor.ref(), 0))
        for tensor in traced.handed_out:
            if tensor is not None:
                last[tensor.ref()] = len(operations) - 1
        return read, last

    def _steps(
        self,
        firsts: Sequence[int],
        read: Sequence[dict[int, keras.Variable]],
    ) -> list[SectionCall]:
        sections = self._traced.sections
        are_whole = []
        for first, stop in zip(firsts, [*firsts[1:], None]):
            around = sections[first].around
            behind = () if stop is None else sections[stop].around
            goes_on = len(behind) > len(around)
            goes_on = goes_on and behind[: len(around)] == around
            are_whole.append(bool(around) and not goes_on)
        layers = [
            sections[first].layer
            for first, whole in zip(firsts, are_whole)
            if whole and sections[first].layer is not None
        ]
        held = {id(v) for layer in layers for v in layer.variables}
        return [
            SectionCall(
                sections[first],
                whole,
                [v for key, v in own.items() if key not in held],
            )
            for first, whole, own in zip(firsts, are_whole, read)
        ]

    def _live_bytes(
        self,
        num_steps: int,
        last: dict[Any, int],
        step_of: Callable[[tf.Operation], int],
    ) -> list[int]:
        live = [0] * num_steps
        for ref, end in last.items():
            tensor = ref.deref()
            for i in range(step_of(tensor.op) + 1, end + 1):
                live[i] += self._bytes(tensor)
        return live

    def _made_bytes(self, op: tf.Operation) -> int:
        return 0 if op.type in CHEAP else sum(map(self._bytes, op.outputs))

    def _bytes(self, tensor: tf.Tensor) -> int:
        """Of one row; sizes that are not known count as 1."""
        sized = self._sized.get(tensor.op.name)
        rows = 1
        if sized is not None:
            tensor, rows = sized.outputs[tensor.value_index], self._rows
        sizes = tensor.shape.as_list() if tensor.shape.rank is not None else []
        size = max(tensor.dtype.size, 1) * math.prod(n or 1 for n in sizes)
        return -(-size // rows)

    def _output(self, index: int) -> Any:
        tensor = self._traced.outputs[index]
        if tensor is None:
            return None
        return keras.KerasTensor(tensor.shape.as_list(), tensor.dtype.name)
