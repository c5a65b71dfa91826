"""The graph of a model that takes any number of rows, to be run on some.

The model is run once in Python, on shapes: on all rows and on parts of them,
TensorFlow runs what that has made. (Code that needs to know how many rows there
are runs for each number of them.) Nothing changes by it: weights are given as
tensors, and assignments are results. Weights of zeros, behind which nothing
would show, are drawn.

What all rows have drawn, each part is given: the numbers of its rows. So it is
with moments of batch normalisations, which follow from micro-batches by the
paper's rule. Such tensors are `fed`:

    whole   x ------------> draw --> layer --> y
    parts   x[0:2] -- draw[0:2] --> layer --> y'      y' beside y[0:2]
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
from tfgpipe.trial import rows
from tfgpipe.trial.units import Unit, Units, is_data

# Values by the ids of variables.
State = dict[int, tuple[keras.Variable, tf.Tensor]]


class Lookup(NamedTuple):
    """A lookup of rows of a trained table.

    Attributes:
        place: Of all of its model, see `TracedModel.all_lookups`.
        unit: The unit that looks up.
        variable: The table.
        indices: A tensor.
    """

    place: tuple[int, int]
    unit: Unit
    variable: keras.Variable
    indices: tf.Tensor


class Gradients(NamedTuple):
    """The gradients of a unit, from given ones of what it makes.

    Attributes:
        made: What it makes, losses too.
        dy: The gradients by that, placeholders.
        dx: The gradients by what it takes.
        dw: Those by its weights: pairs of variable and tensor.
    """

    made: list[tf.Tensor]
    dy: list[tf.Tensor]
    dx: list[tf.Tensor]
    dw: list[tuple[keras.Variable, tf.Tensor]]

    @property
    def all_gradients(self) -> list[tf.Tensor]:
        """Returns all that it computes."""
        return [*self.dx, *(t for _, t in self.dw)]


class TriedGraph:
    """A model to be tried.

    Args:
        call: How it is called.
        specs: Nest of what a micro-batch is.
        devices: Those of the cells.
        known: A run of it on shapes, which is taken if it is the same.
        is_of_any_rows: Whether Python need not know how many rows there are.

    Attributes:
        is_of_any_rows: The same, as it has shown.
        traced: The run.
        units: Its units.
        gradients: Those of units that are differentiated.
        fed: What parts of rows are given of all rows.
        results: All that is compared.
        lookups: Those of trained tables.
    """

    def __init__(
        self,
        call: ModelCall,
        specs: Nest,
        devices: Sequence[str],
        known: TracedModel | None = None,
        is_of_any_rows: bool = True,
    ):
        self._call = dataclasses.replace(
            call, head=None, is_split=True, synchronizes=False
        )
        self._devices = devices
        self._specs = specs
        self._by_rows: dict[int | None, tuple[TracedModel, Units]] = {}
        self.is_of_any_rows = is_of_any_rows
        run: Any = None
        if is_of_any_rows:
            with contextlib.suppress(Exception):  # it may need to know them
                run = self._run_for(None, known)
        if run is None:
            self.is_of_any_rows = False
            run = self._run_for(rows.FEW.total)
        self.traced, self.units, self.gradients = run
        traced = self.traced
        self._captured = {inner.ref(): t for t, inner in traced.graph.captures}
        self._functions: dict[Any, Any] = {}
        fed = [*self.units.draws, *_moments(traced)]
        results = [
            *traced.losses,
            *(t for _, t in traced.new_state),
            *(t for t in traced.handed_out if t is not None),
            *(lookup.indices for lookup in self.lookups),
        ]
        for unit in self.units.units:
            if unit in self.units.drawing or unit.mixes:
                fed += unit.gives
            if not unit.is_known:
                results += [*unit.takes, *unit.gives]
        self.fed = [*filter(is_data, fed)]
        unique = {t.ref(): t for t in results if is_data(t)}
        self.results = [*unique.values()]

    def _run_for(
        self, num_rows: int | None, known: TracedModel | None = None
    ) -> tuple[TracedModel, Units, dict[Unit, Gradients]]:
        """The graph for so many rows, None for any number; and its units."""
        specs = tree.map_structure(
            lambda t: None if t is None else _of_rows(t, num_rows), self._specs
        )
        synchronized = [*filter(is_synchronized, self._call.normalizations)]
        if (
            known is None
            or synchronized
            or not _is_run_of(known, self._call, specs)
        ):
            with contextlib.ExitStack() as plain:
                # Keras's way has a gradient of its own, which mixes rows.
                for layer in synchronized:
                    plain.enter_context(
                        internals.replaced(layer, "synchronized", False)
                    )
                known = trace_model(self._call, specs, None, TraceOptions())
        # A run on shapes knows of no cells.
        cells = known.cells_by(self._call.home)
        known = dataclasses.replace(known, cells=cells)
        units = Units(known)
        self._place(known)  # gradients are where what they are of is
        gradients = self._differentiated(known, units)
        self._by_rows[num_rows] = known, units
        return known, units, gradients

    def _differentiated(
        self, traced: TracedModel, units: Units
    ) -> dict[Unit, Gradients]:
        """Each unit by itself: no fault of one is taken for one of another."""
        gradients: dict[Unit, Gradients] = {}
        for unit in units.units if self._call.training else ():
            if unit not in units.differentiating:
                continue
            losses = [t for t in traced.losses if units.maker(t) is unit]
            made = [*filter(is_continuous, [*unit.gives, *losses])]
            takes = [*filter(is_continuous, unit.takes)]
            uses = [
                u for u in traced.trained_uses if u.section in unit.sections
            ]
            with traced.graph.as_default():
                dy = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in made]
                flat = tf.gradients(
                    made,
                    [*takes, *(use.tensor for use in uses)],
                    dy,
                    stop_gradients=[*takes, *_moments(traced)],
                )
                left = iter([as_tensor(d) for d in flat])
            dx = [d for _, d in zip(takes, left) if d is not None]
            dw = [(u.variable, d) for u, d in zip(uses, left) if d is not None]
            gradients[unit] = Gradients(made, dy, dx, dw)
        return gradients

    def _graph_for(self, values: Mapping[Any, Any]) -> Any:
        """The graph that takes these rows."""
        if self.is_of_any_rows:
            return self.traced.graph
        x = [t.ref() for t in self.traced.x if t is not None]
        return self.traced_for(values[x[0]].shape[0])[0].graph

    def traced_for(self, num_rows: int) -> tuple[TracedModel, Units]:
        """Returns the run of Python that knows how many rows there are."""
        if num_rows not in self._by_rows:
            self._run_for(num_rows)
        return self._by_rows[num_rows]

    def shown(
        self,
        traced: TracedModel,
        units: Units,
        x: Sequence[Any],
        weights: State,
    ) -> dict[Hashable, tuple[Unit | None, tf.Tensor]]:
        """Returns what a run of the model makes of some rows, by its place.

        What tried units give, in order, each with its unit, and then, of no
        unit, outputs, losses of layers, and what these assign.
        """
        tensors: dict[Hashable, tuple[Unit | None, tf.Tensor]] = {}
        counts: collections.Counter[str] = collections.Counter()
        for unit in units.units:
            counts[unit.name] += 1
            for i, t in enumerate(() if unit.is_known else unit.gives):
                if is_data(t):
                    tensors[unit.name, counts[unit.name], i] = unit, t
        losses = traced.losses[traced.num_head_losses :]
        results = [t for t in traced.handed_out if t is not None]
        tensors |= {("result", i): (None, t) for i, t in enumerate(results)}
        tensors |= {("loss", i): (None, t) for i, t in enumerate(losses)}
        tensors |= {id(v): (None, t) for v, t in traced.new_state}
        values = self.given(x, weights, {}, traced)
        values.update((inner.ref(), t) for t, inner in traced.graph.captures)
        function = internals.GraphFunction(
            traced.graph,
            [ref.deref() for ref in values],
            [t for _, t in tensors.values()],
        )
        with tf.device("CPU:0"):
            made = function([*values.values()])
        pairs = zip(tensors.items(), made)
        return {key: (unit, value) for (key, (unit, _)), value in pairs}

    def _place(self, traced: TracedModel) -> None:
        """Runs each layer where a step does, where that can be."""
        on_host = names.only_compiles(self._devices)
        for place, op in enumerate(traced.operations):
            device = self._devices[traced.cell_of(place)]
            internals.put_on(op, "/device:CPU:0" if on_host else device)

    @functools.cached_property
    def lookups(self) -> list[Lookup]:
        """See `TriedGraph`."""
        lookups = []
        # Distinct indices are added up by index, whatever they follow from.
        places = self.traced.all_lookups() if self._call.training else []
        for place, use, op in places:
            unit, indices = self.units.maker(op.outputs[0]), op.inputs[1]
            is_drawing = unit in self.units.drawing
            if unit and not is_drawing and not are_distinct(indices):
                lookups.append(Lookup(place, unit, use.variable, indices))
        return lookups

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
        graph = self._graph_for(values)
        values = {**self._captured, **values}
        key = graph, (*left,), frozenset(values)
        if key not in self._functions:
            # By their names, which they have in the graph of other rows, too.
            inputs, outputs = (
                [graph.get_tensor_by_name(ref.deref().name) for ref in keys]
                for keys in (values, left)
            )
            self._functions[key] = internals.GraphFunction(
                graph, inputs, outputs
            )
        if left:
            made = self._functions[key]([*values.values()])
            results.update(zip(left, made))
        return results

    def given(
        self,
        x: Sequence[Any],
        weights: State,
        state: State,
        traced: TracedModel | None = None,
    ) -> dict[Any, Any]:
        """Returns what a run is run on: rows, and variables."""
        traced = traced or self.traced
        values = {t.ref(): row for t, row in zip(traced.x, x) if t is not None}
        pairs = [(use.variable, use.tensor) for use in traced.uses]
        for variable, tensor in [*pairs, *traced.state]:
            key = id(variable)
            known = state.get(key) or weights.get(key)
            value = variable.value if known is None else known[1]
            values[tensor.ref()] = tf.cast(value, tensor.dtype)
        return values


def _moments(traced: TracedModel) -> list[tf.Tensor]:
    """Those by which batch normalisations normalise."""
    return [
        t
        for layer, calls in zip(traced.normalizations, traced.moments)
        if not internals.has_own_moments(layer)
        for call in calls
        for t in call[:2]
    ]


def _is_run_of(traced: TracedModel, call: ModelCall, specs: Nest) -> bool:
    """Returns whether a call has run so, on such rows."""
    pairs = zip(traced.x, tree.flatten(specs), strict=True)
    trained = {id(use.variable) for use in traced.uses}
    variables = {id(v) for layer in call.layers for v in layer.variables}
    return (
        call.training
        and trained <= variables
        and {*map(id, call.normalizations)} == {*map(id, traced.normalizations)}
        and traced.tape is not None
        and all(
            t is spec
            or (
                t is not None
                and spec is not None
                and t.dtype == spec.dtype
                and t.shape.as_list() == spec.shape.as_list()
            )
            for t, spec in pairs
        )
        and all(internals.is_trained(use.variable) for use in traced.uses)
        and not any(
            internals.is_trained(v) and id(v) not in trained
            for v, _ in traced.state
        )
    )


def _of_rows(spec: Nest, num_rows: int | None) -> tf.TensorSpec:
    return tf.TensorSpec([num_rows, *spec.shape[1:]], spec.dtype)
