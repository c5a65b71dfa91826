"""The sections of a model, from one run on shapes alone.

Nothing is computed, and variables need no storage: what a section costs, what
it reads and what crosses before it is read off the graph.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells.cell import LayerCall, stand_in
from tfgpipe.cells.model_trace import ModelCall, trace_model
from tfgpipe.cells.sections import Section, is_whole
from tfgpipe.graphs import TracedModel, TraceOptions, follows


class SectionCall(LayerCall):
    """A section as a step of a model.

    Its layer is what it has to hold: that of the section; for code between
    layers, and around those that are gone into, one that stands for it.

    Attributes:
        section: The section.
        operations: Those of the graph that it made, with those of sections
            before it that made nothing by themselves.
    """

    def __init__(
        self,
        section: Section,
        operations: list[tf.Operation],
        variables: list[keras.Variable],
    ):
        layer = section.layer
        if layer is None or not is_whole(layer):
            layer = stand_in(section.name, variables)
        super().__init__(layer)
        self.section = section
        self.operations = operations


class Outline(NamedTuple):
    """What one run of a model has shown.

    Attributes:
        traced: The run itself; no variable has a value in it.
        steps: One for each section that makes something.
        flops: Of each, for one row.
        live_bytes: What crosses if a cell begins there, for one row.
        output: Specs of the outputs, a nest.
    """

    traced: TracedModel
    steps: list[SectionCall]
    flops: list[float]
    live_bytes: list[int]
    output: Any


def outline(
    call: Callable[[Any, bool], Any],
    layers: Sequence[keras.layers.Layer],
    spec: Any,
    flops: Callable[[tf.Operation], float],
) -> Outline:
    """Runs a model on shapes.

    Args:
        call: Calls it, with `training`.
        layers: All that it consists of.
        spec: Nest of `keras.KerasTensor`s that it takes.
        flops: Counts those of an operation.
    """
    specs = tree.map_structure(
        lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), spec
    )

    def run() -> TracedModel:
        model = ModelCall(
            call,
            layers,
            training=True,
            head=None,
            is_split=False,
            synchronizes=False,
            home=lambda *_: 0,
            around=lambda *_: contextlib.nullcontext(),
            num_cells=1,
        )
        return trace_model(model, specs, None, TraceOptions())

    with (
        internals.outside_functions(),
        internals.deferred_variables(),
        internals.random_state_kept(),
    ):
        if not all(layer.built for layer in layers):
            # Keras builds a model by a run inside its first call, where all
            # that is read seems to be read by the model itself.
            run()
        traced = run()
    for layer in layers:
        internals.forget_losses(layer)
    return _read(traced, flops)


def _read(
    traced: TracedModel, flops: Callable[[tf.Operation], float]
) -> Outline:
    made = [op for op in traced.operations if op.type != "Placeholder"]
    place = {op.name: i for i, op in enumerate(traced.operations)}
    # What makes nothing goes with the next one; the last is behind all layers.
    starts = [section.start for section in traced.sections]
    filled = {
        min(len(starts) - 2, bisect.bisect_right(starts, place[op.name]) - 1)
        for op in made
    }
    sections = [traced.sections[i] for i in sorted(filled)]
    starts = [section.start for section in sections]

    def step_of(tensor_op: tf.Operation) -> int:
        return max(0, bisect.bisect_right(starts, place[tensor_op.name]) - 1)

    costs = [0.0] * len(sections)
    operations: list[list[tf.Operation]] = [[] for _ in sections]
    given = {u.tensor.ref(): u.variable for u in traced.uses}
    given |= {tensor.ref(): variable for variable, tensor in traced.state}
    read: list[dict[int, keras.Variable]] = [{} for _ in sections]
    last: dict[Any, int] = {}  # by tensor, the last step that takes it
    free: set[Any] = {t.ref() for _, t in traced.graph.captures}
    for op in made:
        own = step_of(op)
        operations[own].append(op)
        costs[own] += flops(op)
        for tensor in op.inputs:
            if tensor.ref() in given:
                variable = given[tensor.ref()]
                read[own][id(variable)] = variable
            elif not follows(tensor, free):
                last[tensor.ref()] = max(own, last.get(tensor.ref(), 0))
    for tensor in traced.handed_out:
        if tensor is not None:
            last[tensor.ref()] = len(sections) - 1
    inputs = {t.ref() for t in traced.x if t is not None}
    live = [0] * len(sections)
    for ref, end in last.items():
        tensor = ref.deref()
        # The rows themselves come from the host, to each cell that takes them.
        start = end if ref in inputs else step_of(tensor.op)
        for i in range(start + 1, end + 1):
            live[i] += _bytes(tensor)
    steps = [
        SectionCall(section, made_there, [*own.values()])
        for section, made_there, own in zip(sections, operations, read)
    ]
    flat = [
        None if t is None else keras.KerasTensor(_shape(t), t.dtype.name)
        for t in traced.outputs
    ]
    output = tree.map_structure(lambda i: flat[i], traced.structure)
    return Outline(traced, steps, costs, live, output)


def _shape(tensor: tf.Tensor) -> list[int | None]:
    return tensor.shape.as_list()


def _bytes(tensor: tf.Tensor) -> int:
    """Of one row; sizes that are not known count as 1."""
    sizes = tensor.shape.as_list() if tensor.shape.rank is not None else []
    return max(tensor.dtype.size, 1) * math.prod(n or 1 for n in sizes)
