"""The outline of a model: its sections, from one run on shapes alone.

Nothing is computed, and variables need no storage: costs of sections, variables
that they read and tensors that cross are read off the graph. A step is some
sections, one after the other.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells.cell import SectionCall
from tfgpipe.cells.sections import Home, Section
from tfgpipe.cells.tracer import ModelCall, trace_model
from tfgpipe.devices import tensor_bytes
from tfgpipe.graphs import (
    CHEAP,
    Repeat,
    TracedModel,
    TraceOptions,
    alive,
    operation_flops,
    parts_of,
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


def nonempty_sections(
    _: Sequence[Section], num_operations: Sequence[int]
) -> list[int]:
    """Returns the sections with operations; an empty one joins the next."""
    return [i for i, count in enumerate(num_operations) if count]


def outline(
    call: Callable[[Any, bool], Any],
    layers: Sequence[keras.layers.Layer],
    spec: Nest,
    starts_of: Starts = nonempty_sections,
    training: bool = True,
    is_split: bool = False,
) -> Outline:
    """Runs a model on shapes.

    Args:
        call: Calls it, with `training`.
        layers: All of its layers.
        spec: Nest of `keras.KerasTensor`s, its inputs.
        starts_of: Returns the sections with which steps begin.
        training: Whether it is trained.
        is_split: Whether there will be several micro-batches.
    """
    traced = shape_trace(call, layers, spec, training, is_split)
    sections = traced.sections
    # Operations by name, as they are for some rows.
    sized, rows = traced.operations_for(1), 1
    if not sized:
        sized, rows = traced.operations_for(2), 2
    x = [t.shape[0] for t in traced.x if t is not None and t.shape.rank]
    rows = next(filter(None, x), rows) if sized else 1
    # The last section is behind all layers, and goes with the one before.
    last = max(0, len(sections) - 2)
    costs = [0.0] * (last + 1)
    needed = internals.ancestors(traced.results, controls=lambda _: True)
    for name, op in needed.items():
        # The graphs of functions are the model's, for any rows.
        is_sized = not internals.takes_functions(op.type) and name in sized
        flops = (
            operation_flops(sized[name]) / rows
            if is_sized
            else operation_flops(op)
        )
        costs[min(traced.section_at(traced.places[name]), last)] += flops

    def bytes_of_row(tensor: tf.Tensor) -> int:
        if tensor.op.name not in sized:
            return tensor_bytes(tensor)
        tensor = sized[tensor.op.name].outputs[tensor.value_index]
        return -(-tensor_bytes(tensor) // rows)

    num_operations = [0] * len(costs)
    for i, op in enumerate(traced.operations):
        section = min(traced.section_at(i), last)
        num_operations[section] += op.type != "Placeholder"
    firsts = starts_of(sections[: len(costs)], num_operations) or [0]
    ends = [0, *firsts[1:], len(costs)]
    # Each step is a cell.
    homes = [bisect.bisect_right(firsts, i) - 1 for i in range(len(sections))]
    traced = dataclasses.replace(traced, cells=[max(0, k) for k in homes])
    parts = parts_of(traced, len(firsts), [[] for _ in traced.uses])
    by_step = [
        [op for op in part.operations if op.type != "Placeholder"]
        for part in parts
    ]
    _, *crossing, _ = alive(parts)
    live_bytes = [0, *(sum(map(bytes_of_row, ts)) for ts in crossing)]
    state = {t.ref(): v for v, t in traced.state}
    read = [
        [use.variable for use in part.uses]
        + [state[t.ref()] for t in part.state]
        for part in parts
    ]

    def output(index: int) -> keras.KerasTensor | None:
        tensor = traced.outputs[index]
        if tensor is None:
            return None
        return keras.KerasTensor(tensor.shape.as_list(), tensor.dtype.name)

    return Outline(
        traced,
        _steps(sections, firsts, read),
        [sum(costs[a:b]) for a, b in itertools.pairwise(ends)],
        live_bytes,
        [
            sum(
                bytes_of_row(tensor)
                for op in ops
                if op.type not in CHEAP
                for tensor in op.outputs
            )
            for ops in by_step
        ],
        repeats_of(traced, by_step, live_bytes),
        tree.map_structure(output, traced.structure),
    )


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


def _steps(
    sections: Sequence[Section],
    firsts: Sequence[int],
    read: Sequence[Sequence[keras.Variable]],
) -> list[SectionCall]:
    """Makes steps of the sections from each of `firsts` on."""
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
        if whole and (layer := sections[first].layer) is not None
        for variable in layer.variables
    }
    return [
        SectionCall(
            sections[first],
            whole,
            [*{id(v): v for v in variables if id(v) not in held}.values()],
        )
        for first, whole, variables in zip(firsts, are_whole, read)
    ]
