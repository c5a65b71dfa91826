"""The steps of a model, its rows in a plan: parts of one graph.

The model runs on shapes, see `cells/outline.py`. A step is what a cell can
begin with, see `sequence/steps.py`:

    sections    embed | block | attention | dense | block | attention | head
    steps       embed | block                     | block             | head
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import cell_of_call, shape_trace
from tfgpipe.graphs import (
    Indices,
    Part,
    TracedModel,
    alive,
    differentiate,
    is_continuous,
    part_key,
    parts_of,
    without_gradients,
)
from tfgpipe.internals import Nest


class PlacedStep(NamedTuple):
    """A step of a model, in its graph.

    Attributes:
        layer: What it holds, see `SectionCall`.
        weights: All that it has, and what is read of no layer.
        part: What it has of the graph, without losses and new state.
        live: All tensors that are alive before it, which cross if a cell
            begins here.
    """

    layer: keras.layers.Layer
    weights: list[keras.Variable]
    part: Part
    live: list[tf.Tensor]

    @property
    def key(self) -> str:
        """A text for files: all that is computed, and all weights."""
        weights = [(tuple(v.shape), v.dtype, v.trainable) for v in self.weights]
        inputs = {t.ref() for t in self.part.inputs}
        are_inputs = [t.ref() in inputs for t in self.part.forward_inputs]
        facts = [are_inputs, repr(weights)]
        return part_key(self.part, facts, in_process=False)[:32]


class Placed:
    """A model as its steps.

    Their layers are built, without values.

    Args:
        source: The layers of the model, see `Source`.
        spec: Nest of `keras.KerasTensor`s that the model takes.

    Attributes:
        source: The same.
        spec: The same.
        steps: In order.
        layers: The layer of each step.
        home: Tells which of the steps a call of a layer begins, or None.
        output: Specs of the outputs, a nest.

    Raises:
        ValueError: If a layer fails. It is named.
    """

    def __init__(self, source: Any, spec: Nest):
        self.source = source
        self.spec = spec
        outlined, self.output = source.outlined(spec)
        self.layers = [step.layer for step in source.steps]
        self.home = cell_of_call([step] for step in source.steps)
        self.steps = self._steps(outlined.traced)

    def differentiated(self, rows: int) -> list[PlacedStep]:
        """Returns the steps for so many rows, with their backward passes.

        Without these, if the model cannot be differentiated: it may be made for
        `predict`.
        """
        source, spec = self.source, example_of(self.spec, rows)
        traced = shape_trace(source.call, source.layers, spec)
        return self._steps(traced, are_trained=True)

    @functools.cached_property
    def keys(self) -> list[str]:
        """Texts for files, which say what each step computes."""
        return [step.key for step in self.steps]

    def _steps(
        self, traced: TracedModel, are_trained: bool = False
    ) -> list[PlacedStep]:
        cells = traced.cells_by(self.home)
        alone = dataclasses.replace(
            traced, cells=cells, losses=(), counts=(), new_state=(), moments=()
        )
        nothing: list[list[Indices]] = [[] for _ in traced.uses]
        differentiated = None
        if are_trained:
            has_gradient = [*map(is_continuous, alone.handed_out)]
            with contextlib.suppress(Exception):  # of many kinds
                differentiated = differentiate(alone, has_gradient, [])
        if differentiated is None:
            differentiated = without_gradients(alone)
        parts = parts_of(differentiated, len(self.layers), nothing)
        steps = zip(self.layers, self._weights(parts), parts, alive(parts))
        return [PlacedStep(*step) for step in steps]

    def _weights(self, parts: Sequence[Part]) -> list[list[keras.Variable]]:
        known = [v for layer in self.layers for v in layer.variables]
        held = {*map(id, known + internals.seeds_of(self.source.layers))}
        by_step = []
        for layer, part in zip(self.layers, parts):
            taken = {t.ref() for t in part.forward_inputs}
            read = [use.variable for use in part.uses]
            read += [v for v, t in part.traced.state if t.ref() in taken]
            others = {id(v): v for v in read if id(v) not in held}
            by_step.append([*layer.weights, *others.values()])
        return by_step


def example_of(spec: Nest, rows: int, size: int | None = None) -> Any:
    """Returns a nest of specs of batches for so many rows.

    Sizes that are not known become `size`.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, keras.KerasTensor) or not leaf.shape:
            return leaf
        sizes = [size if d is None else d for d in leaf.shape[1:]]
        return keras.KerasTensor((rows, *sizes), leaf.dtype)

    return tree.map_structure(one, spec)
