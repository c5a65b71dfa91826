"""All units of a model on some rows: as a whole, and in parts.

    whole   rows 0 1 2 3 4     unit a --> unit b --> unit c
    parts   rows 0 1           unit a --> unit b --> unit c
            rows 2 3 4         unit a --> unit b --> unit c

As long as the parts make what the whole makes, one run of each tells of all
units. Where a unit does not, the parts are run once more with what the whole
has made there, so that its fault is not taken for one of the next.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.graphs import Values
from tfgpipe.internals import Nest
from tfgpipe.trial import compare, rows
from tfgpipe.trial.compare import Column
from tfgpipe.trial.distance import distance
from tfgpipe.trial.tried_graph import State
from tfgpipe.trial.units import Unit, is_data

_BY_OTHER_MEANS = "it draws by other means than a seed"


class Run:
    """All units on some rows, for a `Phase`, which notes what differs.

    `nests` are all rows and each part; `state` is what the step begins with.
    """

    def __init__(
        self,
        phase: Any,
        parts: rows.Parts,
        nests: Sequence[Nest],
        state: State,
    ):
        self._phase, self._graph, self._parts = phase, phase.graph, parts
        self._traced, self._units = self._graph.traced, self._graph.units
        self._state = state
        self._flat = [tree.flatten(nest) for nest in nests]
        self._fed: list[Values] = [{}, {}, {}]
        self._made: list[Values] = [{}, {}, {}]
        self._metrics = {id(v) for v in phase.call.metric_state}
        self._all_metrics = [m for x in phase.call.layers for m in x.metrics]
        self._new = [
            (v, t)
            for v, t in self._traced.new_state
            if id(v) not in self._traced.draws
        ]

    def _values(
        self, place: int, more: Sequence[tuple[keras.Variable, Any]] = ()
    ) -> dict[Hashable, Any]:
        """Returns what all rows, or a part, are run on; `more` is state."""
        state = {**self._state, **{id(v): (v, value) for v, value in more}}
        values = self._graph.given(
            self._flat[place], self._phase.weights, state
        )
        return {**values, **self._fed[place]}

    def _column(self, tensor: tf.Tensor) -> Column:
        return [made[tensor.ref()] for made in self._made]

    def try_units(self) -> None:
        """Tries the units, one after the other."""
        graph, wanted = self._graph, self._graph.results
        fed = graph.fed
        drawn = [graph.run(fed, self._values(p)) for p in range(3) if fed]
        is_known = self._feed(fed, drawn)
        whole = graph.run(wanted, {**self._values(0), **(drawn or [{}])[0]})
        self._note_next(whole)
        start, end = 0, len(self._units.units)
        while start < end and is_known:
            self._made = [whole, *self._parts_of(wanted)]
            start = self._first_fault(start)
            if start < end:
                gives = filter(is_data, self._units.units[start].gives)
                is_known = self._feed([*gives], self._made)
                start += 1
        if not is_known:
            return
        if graph.lookups:  # here, metrics do not run on
            last = graph.run(wanted, self._values(2))
            self._judge_lookups([*self._made[:2], last])
        self._try_drawing()
        self._try_draws()
        self._try_replicas()
        self._try_gradients()

    def _feed(
        self, tensors: Sequence[tf.Tensor], made: Sequence[Values]
    ) -> bool:
        """Gives parts what the whole has; returns whether that is known."""
        for tensor in tensors:
            column = [run[tensor.ref()] for run in made]
            each = rows.of_each(column[0], column, self._parts)
            if each is None:
                return False
            for values, value in zip(self._fed, each):
                values[tensor.ref()] = value
        return True

    def _parts_of(self, wanted: Sequence[tf.Tensor]) -> list[Values]:
        """Runs the parts: metrics run on from part to part, state does not."""
        first = self._graph.run(wanted, self._values(1))
        chained = [
            (v, first[t.ref()]) for v, t in self._new if id(v) in self._metrics
        ]
        return [first, self._graph.run(wanted, self._values(2, chained))]

    def _first_fault(self, start: int) -> int:
        """Judges units; returns the first whose outputs differ, or the end."""
        phase, parts = self._phase, self._parts
        for variable, tensor in self._new:
            whole, *others = self._column(tensor)
            if any(distance(whole, other) for other in others):
                phase.varying.add(id(variable))
        for unit in phase.wanted:
            if unit.number < start:
                continue
            gives = [
                self._column(t)
                for t in unit.gives
                if is_data(t) and t.ref() not in self._fed[0]
            ]
            inputs = [self._column(t)[0] for t in unit.takes if is_data(t)]
            num_bytes = unit.num_bytes
            apart = compare.output_distance(gives, inputs, parts, num_bytes)
            if apart and not self._is_repeatable(unit):
                phase.errors[unit] = _BY_OTHER_MEANS
                return unit.number
            phase.tried.add(unit)
            losses = [
                self._column(t)
                for t in self._traced.losses
                if self._units.maker(t) is unit
            ]
            for text in compare.of_losses(losses, parts, num_bytes):
                phase.say(unit, "losses", text)
            self._judge_state(unit, inputs)
            if apart:
                phase.mixes(unit, apart, self._inner_name(unit))
                axes = [rows.row_axis(column, parts) for column in gives]
                phase.sizes_vary |= rows.UNCLEAR in axes
                return unit.number
        return len(self._units.units)

    def _is_repeatable(self, unit: Unit) -> bool:
        """Returns whether a unit equals itself; else none can be compared."""
        gives = [t for t in unit.gives if is_data(t)]
        again = self._graph.run(gives, self._values(0))
        made = self._made[0]
        return not any(distance(made[t.ref()], again[t.ref()]) for t in gives)

    def _inner_name(self, unit: Unit) -> str:
        """Returns the name of what inside a unit is the first that differs."""
        inner = unit.inner(self._traced)
        tensors = [t for _, t in inner]
        made = [self._graph.run(tensors, self._values(p)) for p in range(3)]
        for name, tensor in inner:
            column = [run[tensor.ref()] for run in made]
            if compare.is_clearly_apart(column, self._parts, unit.num_bytes):
                return name
        return unit.name

    # ------------------------------------------------------------------ state
    def _note_next(self, whole: Values) -> None:
        for variable, tensor in self._traced.new_state:
            key = id(variable)
            if key not in self._metrics:
                old = self._state.get(key, (None, variable.value))[1]
                self._phase.next.setdefault(
                    key, (variable, old, whole[tensor.ref()])
                )

    def _judge_state(self, unit: Unit, inputs: Sequence[tf.Tensor]) -> None:
        assigned = {
            id(v): (v, t) for v, t in self._new if self._units.maker(t) is unit
        }
        for key, (variable, tensor) in assigned.items():
            if key not in self._metrics:
                for text in compare.of_state(
                    variable,
                    self._column(tensor),
                    inputs,
                    self._parts,
                    unit.num_bytes,
                ):
                    self._phase.say(unit, f"state {key}", text)
        for metric in self._all_metrics:
            if any(id(v) in assigned for v in metric.variables):
                results = [self._results(metric, place) for place in (0, 2)]
                for text in compare.of_metrics(*results):
                    self._phase.say(unit, "metrics", text)

    def _results(
        self, metric: keras.metrics.Metric, place: int
    ) -> dict[str, tf.Tensor]:
        """Returns a metric's results, with the values that it has now."""
        made = self._made[place]
        with keras.StatelessScope([(v, made[t.ref()]) for v, t in self._new]):
            return {
                f"{metric.name}.{i}": tf.convert_to_tensor(result)
                for i, result in enumerate(tree.flatten(metric.result()))
            }

    def _try_drawing(self) -> None:
        """Units that draw inside, which parts are not given: by other rows.

        rows 0 1 2 3 4 --> unit --> y
        rows 0 1 0 1 0 --> unit --> y'      y'[0:2] beside y[0:2]
        """
        phase, graph = self._phase, self._graph
        for unit in self._units.units:
            if unit not in self._units.drawing or unit.is_known or unit.mixes:
                continue
            # What it gave is computed again, of the same seeds.
            gives = [t for t in unit.gives if is_data(t)]
            values = self._values(0)
            for t in gives:
                del values[t.ref()]
            takes = [t for t in unit.takes if is_data(t)]
            values.update((t.ref(), self._made[0][t.ref()]) for t in takes)
            others = {t.ref(): self._with_first_rows(t) for t in takes}
            if any(value is None for value in others.values()):
                continue
            one, again, other = (
                [*graph.run(gives, {**values, **run}).values()]
                for run in ({}, {}, others)
            )
            if any(map(distance, one, again)):
                phase.errors[unit] = _BY_OTHER_MEANS
                continue
            phase.tried.add(unit)
            for t, *pair in zip(gives, one, other):
                fed = [run[t.ref()] for run in self._fed]
                a, b = (
                    (rows.of_each(value, fed, self._parts) or [None] * 2)[1]
                    for value in pair
                )
                if apart := distance(a, b, num_bytes=unit.num_bytes):
                    phase.mixes(unit, apart)

    def _with_first_rows(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Of all rows, with the first ones again and again; None if unclear."""
        column = self._column(tensor)
        axis = rows.row_axis(column, self._parts)
        if axis < 0:
            return column[0] if axis == rows.NONE else None
        places = tf.range(self._parts.total) % self._parts.first
        return tf.gather(column[0], places, axis=axis)

    def _try_draws(self) -> None:
        """State that is drawn, and not row by row, is another with each seed.

        One that follows from rows, which draw, is a mean over more of them.
        """
        drawn = [
            draw
            for draw in self._units.draws
            if draw.ref() in self._fed[0]
            and len({tuple(run[draw.ref()].shape) for run in self._fed}) == 1
        ]
        for variable, tensor in self._new:
            before = internals.ancestors([tensor])
            is_drawn = any(draw.op.name in before for draw in drawn)
            if is_drawn and id(variable) not in self._metrics:
                about, text = (
                    f"state {id(variable)}",
                    compare.of_drawn(variable),
                )
                self._phase.say(self._units.maker(tensor), about, text)

    def _try_replicas(self) -> None:
        """A metric of several replicas is zero in all but the first."""
        if len(self._phase.cells[0].devices) == 1:
            return
        for variable, tensor in self._new:
            if (
                id(variable) not in self._metrics
                or variable.aggregation != "sum"
            ):
                continue
            nine = 9 * keras.ops.ones_like(variable.value)
            starts = [nine, nine, keras.ops.zeros_like(nine)]
            whole, one, other = (
                self._graph.run([tensor], self._values(p, [(variable, start)]))[
                    tensor.ref()
                ]
                for p, start in enumerate(starts)
            )
            if distance(whole, one + other):
                about = f"replicas {id(variable)}"
                text = compare.of_replicas(variable.name)
                self._phase.say(self._units.maker(tensor), about, text)

    # -------------------------------------------------------------- gradients
    def try_lookups(self) -> None:
        """Finds out which lookups are by rows."""
        tensors = [lookup.indices for lookup in self._graph.lookups]
        if tensors:
            self._judge_lookups(
                [self._graph.run(tensors, self._values(p)) for p in range(3)]
            )

    def _judge_lookups(self, runs: Sequence[Values]) -> None:
        """Slices of sparse gradients are of rows, or of all of them."""
        phase = self._phase
        for lookup in self._graph.lookups:
            column = [values[lookup.indices.ref()] for values in runs]
            is_of_rows, are_repeated = compare.of_indices(column)
            if is_of_rows and not are_repeated:
                phase.lookups_of_rows.add(lookup.place)
            if not (is_of_rows or are_repeated or phase.sizes_vary):
                about = f"lookup {id(lookup.variable)}"
                text = compare.of_lookups(lookup.variable)
                phase.say(lookup.unit, about, text)

    def _try_gradients(self) -> None:
        """Those of units that are differentiated."""
        phase, graph, parts = self._phase, self._graph, self._parts
        faulty = {place for place, _ in phase.said}
        tried = {
            unit: graph.gradients[unit]
            for unit in phase.wanted
            if unit in graph.gradients and unit.number not in faulty
        }
        tensors = [t for g in tried.values() for t in g.all_gradients]
        if not tensors:
            return
        given: list[Values] = [{}, {}, {}]
        for gradients in tried.values():
            for i, (t, dy) in enumerate(zip(gradients.made, gradients.dy)):
                each = rows.cotangents(i, self._column(t), parts)
                for values, d in zip(given, each):
                    values[dy.ref()] = d
        try:
            made = [
                graph.run(tensors, {**self._values(place), **given[place]})
                for place in range(3)
            ]
        except Exception as error:  # of rows that they cannot take
            text = f"its gradients: {first_line(error)}"
            phase.gradient_errors.update(dict.fromkeys(tried, text))
            return
        phase.differentiated.update(tried)

        def column(tensor: tf.Tensor) -> Column:
            return [run[tensor.ref()] for run in made]

        for unit, gradients in tried.items():
            shapes = [
                self._made[0][t.ref()].shape
                for t in (*unit.takes, *unit.gives)
                if is_data(t)
            ]
            for text in compare.of_gradients(
                [column(t) for t in gradients.dx],
                [(v, column(t)) for v, t in gradients.dw],
                parts,
                unit.num_bytes,
                max((math.prod(shape[:-1]) for shape in shapes), default=1),
            ):
                phase.say(unit, "gradients", text)


def first_line(error: Exception) -> str:
    """Returns the first line of an error that says something."""
    lines = [
        line
        for line in str(error).splitlines()
        if line.strip() and not line.endswith("root error(s) found.")
    ]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
