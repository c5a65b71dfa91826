"""The graph of a model that takes any number of rows, to be run on some.

The model is run once in Python, on shapes: on all rows and on parts of them,
TensorFlow runs what that has made. Nothing changes by it: weights are given as
tensors, and assignments are results.

What all rows have drawn, each part is given: the numbers of its rows. So it is
with moments of batch normalisations, which follow from micro-batches by the
paper's rule. Such tensors are `fed`:

    whole   x ------------> draw --> layer --> y
    parts   x[0:2] -- draw[0:2] --> layer --> y'      y' beside y[0:2]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import ModelCall, trace_model
from tfgpipe.devices import names
from tfgpipe.graphs import (
    TracedModel,
    TraceOptions,
    Values,
    are_distinct,
    as_tensor,
    is_continuous,
)
from tfgpipe.internals import Nest
from tfgpipe.state import is_synchronized
from tfgpipe.trial.units import Unit, Units, is_data

# Values by the ids of variables.
State = dict[int, tf.Tensor]


class TriedGraph:
    """A model to be tried.

    Args:
        call: How it is called.
        specs: Nest of what a micro-batch is.
        devices: Those of the cells.
        known: A run of it on shapes, which is taken if it is the same.

    Attributes:
        traced: The run.
        units: Its units.
        gradients: Those of units that have their own way, each with the weight,
            or None for inputs.
        share: Of all rows those that are run, a placeholder.
        lookups: The places of lookups of trained tables, see
            `TracedModel.all_lookups`, with units, tables, and indices.
        fed: What parts of rows are given of all rows.
        results: All that is compared.
    """

    def __init__(
        self,
        call: ModelCall,
        specs: Nest,
        devices: Sequence[str],
        known: TracedModel | None = None,
    ):
        traced = traced_for(call, specs, None, known)
        # A run on shapes knows of no cells.
        cells = traced.cells_by(call.home)
        self.traced = traced = dataclasses.replace(traced, cells=cells)
        self.units = Units(traced)
        # Each layer runs where it does in a step, where that can be, and its
        # gradient there, too.
        on_host = names.only_compiles(devices)
        for place, op in enumerate(traced.operations):
            device = devices[traced.cell_of(place)]
            internals.put_on(op, "/device:CPU:0" if on_host else device)
        with traced.graph.as_default():
            self.share = tf.compat.v1.placeholder(tf.float32, ())
        self.gradients = {
            unit: self._differentiated(unit)
            for unit in self.units.units
            if call.training and unit.has_gradient and unit.is_wanted
        }
        self._captured = {inner.ref(): t for t, inner in traced.graph.captures}
        self._functions: dict[Any, Any] = {}
        # Distinct indices are added up by index, whatever they follow from.
        self.lookups = [
            (place, unit, use.variable, op.inputs[1])
            for place, use, op in traced.all_lookups()
            if (unit := self.units.maker(op.outputs[0])) is not None
            and call.training
            and not unit.draws
            and not are_distinct(op.inputs[1])
        ]
        fed = [*self.units.random, *self._moments]
        results = [
            *traced.losses,
            *(t for _, t in traced.new_state),
            *(t for t in traced.handed_out if t is not None),
            *(indices for *_, indices in self.lookups),
            *(t for made in self.gradients.values() for _, t in made),
        ]
        for unit in self.units.units:
            if unit.draws or unit.mixes:
                fed += unit.gives
            if not unit.is_known:
                results += [*unit.takes, *unit.gives]
        self.fed = [*filter(is_data, fed)]
        unique = {t.ref(): t for t in results if is_data(t)}
        self.results = [*unique.values()]

    @property
    def _moments(self) -> list[tf.Tensor]:
        """Those by which batch normalisations normalise."""
        return [
            t
            for calls in self.traced.moments
            for call in calls
            for t in call[:2]
        ]

    def _differentiated(
        self, unit: Unit
    ) -> list[tuple[keras.Variable | None, tf.Tensor]]:
        """A unit by itself: no fault of one is taken for one of another.

        What gradients begin with follows from what they are of, so that a row
        has the same in each run; what has no rows gets of each part a share.
        """
        traced = self.traced
        losses = [t for t in traced.losses if self.units.maker(t) is unit]
        made = [*filter(is_continuous, [*unit.gives, *losses])]
        takes = [*filter(is_continuous, unit.takes)]
        by: list[tuple[keras.Variable | None, tf.Tensor]]
        by = [(None, t) for t in takes]
        by += [
            (use.variable, use.tensor)
            for use in traced.trained_uses
            if use.section in unit.sections
        ]
        with traced.graph.as_default():
            starts = [tf.cos(3 * t + 1) for t in made]
            for i, start in enumerate(starts):
                if start.shape.is_fully_defined():
                    starts[i] *= tf.cast(self.share, start.dtype)
            made_by = tf.gradients(
                made,
                [t for _, t in by],
                starts,
                stop_gradients=[*takes, *self._moments],
            )
            return [
                (variable, as_tensor(d))
                for (variable, _), d in zip(by, made_by)
                if d is not None
            ]

    @property
    def num_weights(self) -> int:
        """How many numbers are trained."""
        trained = [use.variable for use in self.traced.trained_uses]
        shapes = {id(variable): variable.shape for variable in trained}
        return sum(map(math.prod, shapes.values()))

    @functools.cached_property
    def smallest_table(self) -> int:
        """How many rows the smallest table has that is looked up."""
        sizes = [variable.shape[0] for variable in self.traced.tables]
        return max(2, min([*sizes, 100]))

    def run(
        self, wanted: Iterable[tf.Tensor], values: Mapping[Any, Any]
    ) -> Values:
        """Computes tensors from others.

        What is among `values` is taken as it is.
        """
        results = {t.ref(): values.get(t.ref()) for t in wanted}
        left = [ref for ref, value in results.items() if value is None]
        values = {**self._captured, **values}
        key = (*left,), frozenset(values)
        if left and key not in self._functions:
            inputs, outputs = (
                [ref.deref() for ref in keys] for keys in (values, left)
            )
            self._functions[key] = internals.GraphFunction(
                self.traced.graph, inputs, outputs
            )
        if left:
            made = self._functions[key]([*values.values()])
            results.update(zip(left, made))
        return results


def traced_for(
    call: ModelCall,
    specs: Nest,
    num_rows: int | None,
    known: TracedModel | None = None,
) -> TracedModel:
    """Returns a run for so many rows, None for any number; without the head.

    `known` is a run on shapes, which is returned if it is the same.
    """
    call = dataclasses.replace(call, head=None, is_split=True)
    specs = tree.map_structure(
        lambda t: (
            None
            if t is None
            else tf.TensorSpec([num_rows, *t.shape[1:]], t.dtype)
        ),
        specs,
    )
    synchronized = [*filter(is_synchronized, call.normalizations)]
    if known and not synchronized and _is_run_of(known, call, specs):
        return known
    with contextlib.ExitStack() as plain:
        # Keras's way has a gradient of its own, which mixes rows.
        for layer in synchronized:
            plain.enter_context(
                internals.replaced(layer, "synchronized", False)
            )
        return trace_model(call, specs, None, TraceOptions())


def given(
    traced: TracedModel, x: Sequence[Any], values: State
) -> dict[Any, Any]:
    """Returns what a run is run on: rows, and variables."""
    pairs = [*((use.variable, use.tensor) for use in traced.uses)]
    return {t.ref(): row for t, row in zip(traced.x, x) if t is not None} | {
        tensor.ref(): tf.cast(values.get(id(v), v.value), tensor.dtype)
        for v, tensor in [*pairs, *traced.state]
    }


def _is_run_of(traced: TracedModel, call: ModelCall, specs: Nest) -> bool:
    """Returns whether a call has run so, on such rows, with such weights."""
    x, wanted = (
        [None if t is None else (t.dtype, t.shape.as_list()) for t in tensors]
        for tensors in (traced.x, tree.flatten(specs))
    )
    trained = {id(use.variable) for use in traced.uses}
    read = [
        *(use.variable for use in traced.uses),
        *(v for v, _ in traced.state),
    ]
    return (
        call.training
        and traced.tape is not None
        and x == wanted
        and trained == {id(v) for v in read if internals.is_trained(v)}
        and trained <= {id(v) for layer in call.layers for v in layer.variables}
        and {*map(id, call.normalizations)} == {*map(id, traced.normalizations)}
    )
