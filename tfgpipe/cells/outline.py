"""The outline of a model: its sections, from one run on shapes alone.

Nothing is computed, and variables need no storage: costs of sections, variables
that they read and tensors that cross are read off the graph. A step is some
sections, one after the other.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells.cell import SectionCall
from tfgpipe.cells.model_trace import ModelCall, trace_model
from tfgpipe.cells.sections import Home, Section
from tfgpipe.devices import tensor_bytes
from tfgpipe.graphs import (
    CHEAP,
    Repeat,
    TracedModel,
    TraceOptions,
    follows,
    repeats_of,
)
from tfgpipe.internals import Nest

# Returns the indexes of the sections with which steps begin, by the sections
# and by how many operations each has.
Starts = Callable[[Sequence[Section], Sequence[int]], Sequence[int]]


def cell_of_call(steps_by_cell: Iterable[Iterable[SectionCall]]) -> Home:
    """Returns a function that tells the cell of a call, see `Sections`."""
    cells = {
        (id(step.section.operation), step.section.call): k
        for k, steps in enumerate(steps_by_cell)
        for step in steps
    }
    return lambda operation, call: cells.get((id(operation), call))


class Outline(NamedTuple):
    """A model's steps, as one run has shown them.

    Attributes:
        traced: The run itself; no variable has a value in it.
        steps: The steps.
        flops: FLOPs of each, for one row.
        live_bytes: Bytes that cross if a cell begins with a step, for one row.
        made_bytes: Bytes of all results of each, for one row.
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
        """Returns the index of the step that makes a tensor."""
        starts = [step.section.start for step in self.steps]
        return _index_of(starts, self.traced, tensor.op)


def _index_of(
    starts: Sequence[int], traced: TracedModel, op: tf.Operation
) -> int:
    """Returns the index of the last start that is not after an operation."""
    return max(0, bisect.bisect_right(starts, traced.places[op.name]) - 1)


def nonempty_sections(
    _: Sequence[Section], num_operations: Sequence[int]
) -> list[int]:
    """Returns the sections with operations; an empty one joins the next."""
    return [i for i, count in enumerate(num_operations) if count]


def outline(
    call: Callable[[Any, bool], Any],
    layers: Sequence[keras.layers.Layer],
    spec: Nest,
    flops: Callable[[tf.Operation], float],
    starts: Starts = nonempty_sections,
    training: bool = True,
    is_split: bool = False,
) -> Outline:
    """Runs a model on shapes.

    Args:
        call: Calls it, with `training`.
        layers: All of its layers.
        spec: Nest of `keras.KerasTensor`s, its inputs.
        flops: Returns the FLOPs of an operation.
        starts: Returns the sections with which steps begin.
        training: Whether it is trained.
        is_split: Whether there will be several micro-batches.
    """

    def of_ones(spec: Nest) -> Any:
        if spec is None:
            return None
        return keras.KerasTensor([size or 1 for size in spec.shape], spec.dtype)

    run = functools.partial(
        shape_trace, call, layers, training=training, is_split=is_split
    )
    reader = _Reader(run(spec), flops)
    if not reader.knows_sizes:
        with contextlib.suppress(Exception):  # it may need other sizes
            example = run(tree.map_structure(of_ones, spec))
            if _calls(example) == _calls(reader.traced):
                reader.costs = reader.flops_by_section(example, {}, 1)
    return reader.outline(starts)


def _calls(traced: TracedModel) -> list[tuple[list[int], int]]:
    return [([*map(id, s.around)], s.call) for s in traced.sections]


def shape_trace(
    call: Callable[[Any, bool], Any],
    layers: Sequence[keras.layers.Layer],
    spec: Nest,
    training: bool = True,
    is_split: bool = False,
) -> TracedModel:
    """Returns the graph of a model, from shapes alone; see `outline`."""
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
    """Reads costs, variables and bytes of sections off a graph.

    Attributes:
        traced: The graph.
        knows_sizes: Whether all sizes are known, for one row, and with 1 for
            sizes that inputs do not have.
        costs: FLOPs of each section, for one row.
    """

    def __init__(
        self, traced: TracedModel, flops: Callable[[tf.Operation], float]
    ):
        self.traced = traced
        self._flops = flops
        self._operations = [
            op for op in traced.operations if op.type != "Placeholder"
        ]
        # Operations by name, as they are for so many rows.
        self._sized: Mapping[str, tf.Operation] = {}
        self._rows = 1
        x = [t for t in traced.x if t is not None and t.shape.rank]
        for rows, size in ((1, 1), (1, None), (2, 1), (2, None)):
            sized = traced.operations_for(rows, size)
            if sized is not None:
                known = next((t.shape[0] for t in x if t.shape[0]), None)
                self._sized, self._rows = sized, known or rows
                break
        self.knows_sizes = True
        self.costs = self.flops_by_section(traced, self._sized, self._rows)

    def outline(self, starts_of: Starts) -> Outline:
        """Returns the outline, with steps that begin where `starts_of` says."""
        traced, sections = self.traced, self.traced.sections
        count = [0] * len(self.costs)
        for op in self._operations:
            section = traced.section_at(traced.places[op.name])
            count[min(section, len(count) - 1)] += 1
        firsts = starts_of(sections[: len(count)], count) or [0]
        ends = [0, *firsts[1:], len(count)]
        step_of = functools.partial(
            _index_of, [sections[i].start for i in firsts], traced
        )
        operations: list[list[tf.Operation]] = [[] for _ in firsts]
        for op in self._operations:
            operations[step_of(op)].append(op)
        read, last_users = self._reads(operations)
        live_bytes = [0] * len(operations)
        for ref, last in last_users.items():
            tensor = ref.deref()
            for i in range(step_of(tensor.op) + 1, last + 1):
                live_bytes[i] += self._bytes(tensor)
        return Outline(
            traced,
            self._steps(firsts, read),
            [sum(self.costs[a:b]) for a, b in itertools.pairwise(ends)],
            live_bytes,
            [
                sum(
                    self._bytes(tensor)
                    for op in ops
                    if op.type not in CHEAP
                    for tensor in op.outputs
                )
                for ops in operations
            ],
            repeats_of(traced, operations, live_bytes),
            tree.map_structure(self._output, traced.structure),
        )

    def flops_by_section(
        self, traced: TracedModel, sized: Mapping[str, tf.Operation], rows: int
    ) -> list[float]:
        """Returns FLOPs of the operations that results need, for one row.

        `sized` are operations by their names, as they are for so many rows.
        """
        # The last section is behind all layers, and goes with the one before.
        costs = [0.0] * max(1, len(traced.sections) - 1)
        seen: set[str] = set()
        waiting = [t.op for t in traced.results]
        while waiting:
            op = waiting.pop()
            if op.name in seen:
                continue
            seen.add(op.name)
            waiting += [t.op for t in op.inputs] + [*op.control_inputs]
            section = traced.section_at(traced.places[op.name])
            # The graphs of functions are the model's, for any rows.
            count = 1
            if not internals.takes_functions(op.type) and op.name in sized:
                op, count = sized[op.name], rows
            flops = self._flops(op) / count
            tensors = [*op.inputs, *op.outputs]
            if flops and not all(t.shape.is_fully_defined() for t in tensors):
                self.knows_sizes = False
            costs[min(section, len(costs) - 1)] += flops
        return costs

    def _reads(
        self, operations: Sequence[Sequence[tf.Operation]]
    ) -> tuple[list[dict[int, keras.Variable]], dict[Any, int]]:
        """Returns the variables of each step; the last user of each tensor."""
        traced = self.traced
        variables = {u.tensor.ref(): u.variable for u in traced.uses}
        variables |= {tensor.ref(): v for v, tensor in traced.state}
        free: set[Hashable] = {t.ref() for _, t in traced.graph.captures}
        read: list[dict[int, keras.Variable]] = [{} for _ in operations]
        last: dict[Any, int] = {}
        for i, ops in enumerate(operations):
            for tensor in (t for op in ops for t in op.inputs):
                ref = tensor.ref()
                if (variable := variables.get(ref)) is not None:
                    read[i][id(variable)] = variable
                elif not follows(tensor, free):
                    last[ref] = i
        for tensor in traced.handed_out:
            if tensor is not None:
                last[tensor.ref()] = len(operations) - 1
        return read, last

    def _steps(
        self,
        firsts: Sequence[int],
        read: Sequence[Mapping[int, keras.Variable]],
    ) -> list[SectionCall]:
        """Makes steps of the sections from each of `firsts` on."""
        sections = self.traced.sections
        are_whole = []
        for first, stop in zip(firsts, [*firsts[1:], None]):
            around = sections[first].around
            behind = () if stop is None else sections[stop].around
            goes_on = len(behind) > len(around)
            goes_on = goes_on and behind[: len(around)] == around
            are_whole.append(bool(around) and not goes_on)
        held = {
            id(variable)
            for first, whole in zip(firsts, are_whole)
            if whole and sections[first].layer is not None
            for variable in sections[first].layer.variables
        }
        return [
            SectionCall(
                sections[first],
                whole,
                [v for key, v in variables.items() if key not in held],
            )
            for first, whole, variables in zip(firsts, are_whole, read)
        ]

    def _bytes(self, tensor: tf.Tensor) -> int:
        """Returns the bytes of one row; unknown sizes count as 1."""
        sized = self._sized.get(tensor.op.name)
        if sized is None:
            return tensor_bytes(tensor)
        return -(-tensor_bytes(sized.outputs[tensor.value_index]) // self._rows)

    def _output(self, index: int) -> keras.KerasTensor | None:
        tensor = self.traced.outputs[index]
        if tensor is None:
            return None
        return keras.KerasTensor(tensor.shape.as_list(), tensor.dtype.name)
