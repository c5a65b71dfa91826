"""The graph of a model that takes any number of rows, to be run on some.

The model is run once in Python, on shapes: on all rows and on parts of them,
TensorFlow runs what that has made. Nothing changes by it: weights are given as
tensors, and assignments are results. Weights of zeros, behind which nothing
would show, are drawn.

What all rows have drawn, each part is given: the numbers of its rows. So it is
with moments of batch normalisations, which are those of micro-batches by the
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
from tfgpipe.boundary import is_continuous
from tfgpipe.cells import Cell, ModelCall, trace_model
from tfgpipe.devices import names
from tfgpipe.failures import check_interruption
from tfgpipe.graphs import (
    TracedModel,
    TraceOptions,
    as_tensor,
    differentiate,
    without_gradients,
)
from tfgpipe.state import is_synchronized
from tfgpipe.trial.units import Unit, Units

# Values by the ids of variables.
State = Mapping[int, tuple[keras.Variable, tf.Tensor]]

Values = dict[Any, tf.Tensor]  # by the references of tensors


class TriedGraph:
    """A model to be tried.

    Args:
        call: How it is called.
        specs: Nest of what a micro-batch is.
        cells: The cells, for their devices.
        known: A run of it on shapes, which is taken if it is the same.

    Attributes:
        traced: The run.
        units: Its units.
        made: The same, differentiated where units have their own gradients.
        fed: What parts of rows are given of all rows.
        dw: The gradients of weights, by such units: pairs of variable and
            tensor.
        dx: By such units, the gradients that they make for earlier ones.
        lookups: Of trained tables: the unit, the variable, the indices.
    """

    def __init__(
        self,
        call: ModelCall,
        specs: Any,
        cells: Sequence[Cell],
        known: TracedModel | None = None,
    ):
        own = dataclasses.replace(
            call, head=None, is_split=True, synchronizes=False
        )
        any_rows = tree.map_structure(_any_rows, specs)
        synchronized = [*filter(is_synchronized, call.normalizations)]
        if (
            known is None
            or synchronized
            or not _is_run_of(known, own, any_rows)
        ):
            with contextlib.ExitStack() as plain:
                # Keras's way has a gradient of its own, which mixes rows.
                for layer in synchronized:
                    plain.enter_context(
                        internals.replaced(layer, "synchronized", False)
                    )
                known = trace_model(own, any_rows, None, TraceOptions())
        self.traced = traced = known
        self.units = Units(traced)
        made = without_gradients(traced)
        if call.training and self.units.differentiating:
            made = differentiate(
                traced,
                [is_continuous(t) for t in traced.handed_out],
                [True] * len(traced.losses),
            )
        self._place(call, [cell.device for cell in cells])
        self.made = made
        self.dw = self._of_weights()
        self.dx = self._given_back()
        self._captured = {own.ref(): t for t, own in traced.graph.captures}
        self._functions: dict[Any, Any] = {}
        moments = [
            t
            for layer, calls in zip(traced.normalizations, traced.moments)
            if not internals.has_own_moments(layer)
            for call_ in calls
            for t in call_[:2]
        ]
        self.fed: list[tf.Tensor] = [*self.units.draws, *moments]
        for unit in self.units.found:
            if unit in self.units.drawing or unit.mixes:
                self.fed += unit.gives

    def _place(self, call: ModelCall, devices: Sequence[str]) -> None:
        """Runs each layer where a step does, where that can be."""
        traced, cells = self.traced, [0]
        for section in traced.sections[1:]:
            home = call.home(section.operation, section.call)
            cells.append(max(cells[-1], home or 0))
        on_host = names.only_compiles(devices)
        for place, op in enumerate(traced.operations):
            k = cells[traced.section_at(place)]
            internals.put_on(op, "/device:CPU:0" if on_host else devices[k])

    def _of_weights(self) -> dict[Unit, list[tuple[Any, tf.Tensor]]]:
        """Gradients of the weights of units that have their own."""
        found: dict[Unit, list[Any]] = {}
        with self.traced.graph.as_default():
            for use, d in zip(self.traced.uses, self.made.dw):
                for unit in self.units.differentiating:
                    dense = as_tensor(d.finished())
                    if use.section in unit.sections and dense is not None:
                        found.setdefault(unit, []).append((use.variable, dense))
        return found

    def _given_back(self) -> dict[Unit, list[tf.Tensor]]:
        """What the backward pass of such units makes for others."""
        made = self.made
        units = {
            name: self.units.of(self.traced.operations[place].outputs[0])
            for name, place in made.places.items()
            if name in made.backward and self.traced.operations[place].outputs
        }
        found: dict[Unit, list[tf.Tensor]] = {}
        for name, unit in units.items():
            if unit not in self.units.differentiating:
                continue
            op = self.traced.graph.get_operation_by_name(name)
            found.setdefault(unit, []).extend(
                t
                for t in op.outputs
                if is_continuous(t)
                and any(
                    user.name in units and units[user.name] is not unit
                    for user in t.consumers()
                )
            )
        return found

    def gradients(self, unit: Unit) -> list[tf.Tensor]:
        """All gradients that a unit makes."""
        return [*self.dx.get(unit, []), *(t for _, t in self.dw.get(unit, []))]

    @functools.cached_property
    def lookups(self) -> list[tuple[Unit, keras.Variable, tf.Tensor]]:
        """See `TriedGraph`."""
        found = []
        for use in self.traced.uses:
            for op in _gathers(use.tensor):
                unit = self.units.of(op.outputs[0])
                if unit is not None:
                    found.append((unit, use.variable, op.inputs[1]))
        return found

    def follows(self, tensor: tf.Tensor, sources: Iterable[tf.Tensor]) -> bool:
        """Whether a tensor follows from some others."""
        wanted = {t.op.name for t in sources}
        known: set[str] = set()
        waiting = [tensor.op]
        while waiting:
            op = waiting.pop()
            if op.name in wanted:
                return True
            if op.name not in known:
                known.add(op.name)
                waiting += [t.op for t in op.inputs]
        return False

    @property
    def num_weights(self) -> int:
        """How many numbers are trained."""
        shapes = {id(u.variable): u.variable.shape for u in self.traced.uses}
        return sum(map(math.prod, shapes.values()))

    @functools.cached_property
    def smallest_table(self) -> int:
        """How many rows the smallest table has that is looked up."""
        variables = [u.tensor for u in self.traced.uses]
        variables += [t for _, t in self.traced.state]
        sizes = [t.shape[0] for t in variables if _gathers(t)]
        return max(2, min([*sizes, 100]))

    def run(
        self, wanted: Iterable[tf.Tensor], values: Mapping[Any, Any]
    ) -> Values:
        """The values of tensors, from those of others.

        What is among `values` is taken as it is.
        """
        check_interruption(in_trial=True)
        found = {t.ref(): values.get(t.ref()) for t in wanted}
        left = [ref for ref, value in found.items() if value is None]
        values = {**self._captured, **values}
        key = (*left,), frozenset(values)
        if key not in self._functions:
            self._functions[key] = internals.GraphFunction(
                self.traced.graph,
                [ref.deref() for ref in values],
                [ref.deref() for ref in left],
            )
        if left:
            made = self._functions[key]([*values.values()])
            found.update(zip(left, made))
        return found

    def given(
        self, x: Sequence[Any], weights: State, state: State
    ) -> dict[Any, Any]:
        """What it is run on: rows, and variables."""
        found = {
            t.ref(): own for t, own in zip(self.traced.x, x) if t is not None
        }
        pairs = [(use.variable, use.tensor) for use in self.traced.uses]
        for variable, tensor in [*pairs, *self.traced.state]:
            key = id(variable)
            known = state.get(key) or weights.get(key)
            value = variable.value if known is None else known[1]
            found[tensor.ref()] = tf.cast(value, tensor.dtype)
        return found


def _is_run_of(traced: TracedModel, call: ModelCall, specs: Any) -> bool:
    """Whether a run is that of a call, for such rows."""
    pairs = zip(traced.x, tree.flatten(specs), strict=True)
    trained = {id(use.variable) for use in traced.uses}
    return (
        call.training
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


def _any_rows(spec: Any) -> Any:
    if spec is None:
        return None
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _gathers(table: tf.Tensor) -> list[tf.Operation]:
    """The operations that look up rows of a table."""
    found = []
    for op in table.consumers():
        if op.type in ("Identity", "Cast"):
            found += _gathers(op.outputs[0])
        elif op.type == "GatherV2" and op.inputs[0] is table:
            found.append(op)
    return found
