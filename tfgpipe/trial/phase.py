"""One phase of a model, tried: what differs, and what could not be tried.

    whole   rows 0 1 2 3 4     unit a --> unit b --> unit c
    parts   rows 0 1           unit a --> unit b --> unit c
            rows 2 3 4         unit a --> unit b --> unit c

As long as the parts make what the whole makes, one run of each tells of all
units. Where a unit does not, the parts are run once more with what the whole
has made there, so that its fault is not taken for one of the next.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import Cell, ModelCall
from tfgpipe.graphs import TracedModel, Values, is_continuous, stateful_kinds
from tfgpipe.internals import Nest
from tfgpipe.trial import compare, rows
from tfgpipe.trial.compare import Column
from tfgpipe.trial.conditions import conditions_of_rows
from tfgpipe.trial.distance import distance, largest
from tfgpipe.trial.tried_graph import State, TriedGraph, given, traced_for
from tfgpipe.trial.units import Unit, is_random

# Of a table that is copied.
_MOST_NUMBERS = 2**26


class Phase:
    """One phase of a model, tried.

    Args:
        call: How the model is called.
        cells: The cells.
        specs: Nest of what a micro-batch is.
        known: A run of the model on shapes, if there was one.

    Attributes:
        graph: What is run; None if it cannot be made.
        said: What differs: by unit, and what it is about, the cell, the name
            and the words.
        tried: The units that were tried.
        errors: Why others could not be.
        lookups_of_rows: The places of lookups that are by rows.
        late: State in a late step: what is the same for all rows may count.
    """

    def __init__(
        self,
        call: ModelCall,
        cells: Sequence[Cell],
        specs: Nest,
        known: TracedModel | None,
    ):
        self.call, self.cells = call, cells
        self.graph: Any = None
        self.said: dict[tuple[int, str], tuple[Cell, str, str]] = {}
        self.tried: set[Unit] = set()
        self.errors: dict[Unit, str] = {}
        self.lookups_of_rows: set[tuple[int, int]] = set()
        self.late: dict[int, tf.Tensor] = {}
        self._failure = ""
        self._fails_anyhow = False
        devices = [cell.stores[0] for cell in cells]
        try:
            graph = TriedGraph(call, specs, devices, known)
            tables = {id(v) for v in graph.traced.tables}
            variables = {id(u.variable): u.variable for u in graph.traced.uses}
            self._weights: dict[bool, State] = {
                is_real: {
                    key: _weight(
                        tf.convert_to_tensor(v.value), key in tables, is_real
                    )
                    for key, v in variables.items()
                }
                for is_real in (True, False)
            }
        except Exception as error:  # a user's code may raise anything
            self._failure = _first_line(error)
            return
        self.graph = graph
        for unit in graph.units.units:
            if unit.mixes:
                self.tried.add(unit)
                self.say(unit, "outputs", math.inf)
            elif unit.draws:
                self.errors[unit] = (
                    "it draws random numbers in a loop, a branch or a function"
                )

    def ask(
        self, specs: Nest, step: TracedModel, total: int | None, asking: str
    ) -> None:
        """Looks for code that does something else where it knows the rows.

        In Keras, Python knows the number of rows of a mini-batch, `total`, and
        in a step here a micro-batch's. `step` is the graph of one, `asking` are
        the layers with code that may ask.
        """
        traced = self.graph.traced
        if any(map(is_random, stateful_kinds(traced.operations))):
            return
        num_rows = next(t for t in step.x if t is not None).shape[0]
        for count, known in ((num_rows, step), (total, None)):
            if count is None:
                continue
            parts = rows.Parts(1, count - 1)
            limit = self.graph.smallest_table
            x = tree.flatten(rows.drawn(specs, 8, limit, parts=parts)[0])
            with contextlib.suppress(Exception):  # of rows it cannot take
                known = known or traced_for(self.call, specs, count)
                # The same function as for the rows on which units are tried.
                values = given(traced, x, self._weights[False])
                values[self.graph.share.ref()] = tf.constant(1.0)
                made = self.graph.run(self.graph.results, values)
                expected = [made[t.ref()] for t in self._shown(traced)]
                pairs = itertools.zip_longest(self._results(known, x), expected)
                least = min(u.num_bytes for u in self.graph.units.units)
                if any(distance(*pair, num_bytes=least) for pair in pairs):
                    told = compare.words("rows", math.inf, f"{count} rows")
                    self.said[0, "rows"] = self.cells[0], asking, told
                    return

    def _shown(self, traced: TracedModel) -> list[tf.Tensor]:
        """Returns what a run hands out, adds to the loss, and assigns."""
        ids = {id(v) for v, _ in self.graph.traced.new_state}
        return [
            *(t for t in traced.handed_out if t is not None),
            *traced.losses[traced.num_head_losses :],
            *(t for v, t in traced.new_state if id(v) in ids),
        ]

    def _results(
        self, traced: TracedModel, x: Sequence[Any]
    ) -> list[tf.Tensor]:
        values = given(traced, x, self._weights[False])
        values.update((inner.ref(), t) for t, inner in traced.graph.captures)
        function = internals.GraphFunction(
            traced.graph, [ref.deref() for ref in values], self._shown(traced)
        )
        with tf.device("CPU:0"):
            return function([*values.values()])

    def run(
        self, parts: rows.Parts, nests: Sequence[Nest], is_real: bool
    ) -> None:
        """Tries the units on some rows: all of them, and each part.

        Real ones with weights as they are: drawn biases hide what is smaller.
        Where a real mini-batch fails, Keras would fail, too. Drawn ones as in a
        late step, where one was seen.
        """
        values = self._weights[is_real] | ({} if is_real else self.late)
        run = _Run(self, parts, nests, values)
        try:
            run.try_units()
        except Exception as error:  # of rows that it cannot take
            self._failure = _first_line(error)
            self._fails_anyhow |= is_real and parts != rows.FEW
        self.tried |= run.tried

    def say(
        self, unit: Unit | None, about: str, apart: float, name: str = ""
    ) -> None:
        """Notes by how much a unit differs, if it does, and in what."""
        if unit is not None and apart:
            text = compare.words(about, apart, name)
            self.said.setdefault(
                (unit.number, about), (*self._place(unit), text)
            )

    def end(self) -> None:
        """Says what the graph alone shows."""
        units = self.graph.units
        for op in conditions_of_rows(self.graph.traced):
            if not units.is_inside_known(op):
                unit = units.maker(op.outputs[0])
                if unit and (unit.number, "outputs") not in self.said:
                    self.say(unit, "condition", math.inf)

    @property
    def facts(self) -> list[tuple[str, Cell, str, str]]:
        """What to say: what it is about, the cell, the name, and the words.

        Of what differs, unit by unit, and then of what could not be tried.
        """
        said = sorted(self.said.items(), key=lambda pair: pair[0][0])
        facts = [(about, *told) for (_, about), told in said]
        untried = []
        if self.graph is None:
            untried = [(self.cells[0], "the model", self._failure)]
        elif not self._fails_anyhow:
            why = self._failure or "what comes before it cannot run in parts"
            untried = [
                (*self._place(unit), self.errors.get(unit, why))
                for unit in self.graph.units.units
                if not unit.is_known and unit not in self.tried
            ]
        for cell, name, why in untried:
            text = compare.words("untried", math.inf, why)
            facts.append(("untried", cell, name, text))
        return facts

    def _place(self, unit: Unit) -> tuple[Cell, str]:
        return self.cells[min(unit.cell, len(self.cells) - 1)], unit.name


class _Run:
    """All units on some rows, for a phase, which notes what differs."""

    def __init__(
        self,
        phase: Phase,
        parts: rows.Parts,
        nests: Sequence[Nest],
        values: State,
    ):
        self._phase, self._graph, self._parts = phase, phase.graph, parts
        traced = self._graph.traced
        self._given = [
            given(traced, tree.flatten(nest), values)
            | {self._graph.share.ref(): tf.constant(count / parts.total)}
            for nest, count in zip(nests, (parts.total, *parts))
        ]
        self._fed: list[Values] = [{}, {}, {}]
        self._made: list[Values] = [{}, {}, {}]
        self._metrics = {id(v) for v in phase.call.metric_state}
        self._new = {
            id(v): t for v, t in traced.new_state if id(v) not in traced.draws
        }
        self.tried: set[Unit] = set()

    def _run(self, wanted: Sequence[tf.Tensor], place: int) -> Values:
        return self._graph.run(wanted, self._given[place] | self._fed[place])

    def _columns(self, tensors: Sequence[tf.Tensor]) -> list[Column]:
        return [[made[t.ref()] for made in self._made] for t in tensors]

    def try_units(self) -> None:
        """Tries the units, one after the other."""
        fed, wanted = self._graph.fed, self._graph.results
        if fed and not self._feed(fed, [self._run(fed, p) for p in range(3)]):
            return
        whole, start = self._run(wanted, 0), 0
        while start < len(self._graph.units.units):
            self._made = [whole, *self._parts_of(wanted)]
            self._note_late()
            fault = self._first_fault(start)
            if fault is None:
                break
            if not self._feed(fault.gives, self._made):
                return
            start = fault.number + 1
        for place, unit, variable, indices in self._graph.lookups:
            is_of_rows, are_repeated = compare.of_indices(
                *self._columns([indices])
            )
            if is_of_rows and not are_repeated:
                self._phase.lookups_of_rows.add(place)
            elif not is_of_rows and not are_repeated:
                self._phase.say(unit, "lookup", math.inf, variable.name)

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
        """Runs the parts: metrics run on from part to part, state does not.

        In all but the first of several replicas they are zero, and added up.
        """
        first, added = self._run(wanted, 1), []
        has_replicas = len(self._phase.cells[0].devices) > 1
        for v, t in self._graph.traced.state:
            new = self._new.get(id(v))
            if id(v) in self._metrics and new is not None:
                value = first[new.ref()]
                if has_replicas and v.aggregation == "sum":
                    added.append(new.ref())
                    value = tf.zeros_like(value)
                self._given[2][t.ref()] = value
        other = self._run(wanted, 2)
        return [first, other | {ref: first[ref] + other[ref] for ref in added}]

    def _note_late(self) -> None:
        for v, t in self._graph.traced.state:
            if id(v) in self._new and id(v) not in self._metrics:
                ((new, *parts),) = self._columns([self._new[id(v)]])
                is_number = new.dtype.is_integer or new.dtype.is_floating
                if is_number and not any(distance(new, one) for one in parts):
                    old = self._given[0][t.ref()]
                    self._phase.late.setdefault(id(v), new + 999 * (new - old))

    def _first_fault(self, start: int) -> Unit | None:
        """Judges units; returns the first whose outputs differ, if any."""
        phase, parts, graph = self._phase, self._parts, self._graph
        for unit in graph.units.units[start:]:
            if not unit.is_wanted:
                continue
            inputs = [column[0] for column in self._columns(unit.takes)]
            noise, num_bytes = compare.rounding_of(inputs), unit.num_bytes
            gives = [t for t in unit.gives if t.ref() not in self._fed[0]]
            apart = max(
                (
                    compare.of_outputs(column, parts, noise, num_bytes)
                    for column in self._columns(gives)
                ),
                default=0.0,
            )
            self.tried.add(unit)
            losses = [
                t for t in graph.traced.losses if graph.units.maker(t) is unit
            ]
            for whole, *others in self._columns(losses):
                mean = compare.by_rows(others, parts)
                loss = distance(whole, mean, num_bytes=num_bytes)
                phase.say(unit, "losses", loss)
            self._judge_state(unit, noise)
            if apart:
                phase.say(unit, "outputs", apart)
                return unit
            self._judge_gradients(unit)
        return None

    def _judge_state(self, unit: Unit, noise: float) -> None:
        phase, maker = self._phase, self._graph.units.maker
        assigned = {
            key for key, tensor in self._new.items() if maker(tensor) is unit
        }
        for variable, tensor in self._graph.traced.new_state:
            if id(variable) in assigned - self._metrics:
                ((whole, *others),) = self._columns([tensor])
                expected = others[0]
                if is_continuous(whole) and not variable.trainable:
                    expected = compare.by_rows(others, self._parts)
                apart = distance(
                    whole, expected, noise=noise, num_bytes=unit.num_bytes
                )
                phase.say(unit, "state", apart, variable.name)
        for metric in (m for x in phase.call.layers for m in x.metrics):
            if any(id(v) in assigned for v in metric.variables):
                pairs = zip(*(self._results(metric, p) for p in (0, 2)))
                apart = max(distance(*pair) for pair in pairs)
                phase.say(unit, "metrics", apart, metric.name)

    def _results(
        self, metric: keras.metrics.Metric, place: int
    ) -> list[tf.Tensor]:
        """Returns a metric's results, with the values that it has now."""
        values = [
            (v, self._made[place][t.ref()])
            for v, t in self._graph.traced.new_state
        ]
        with keras.StatelessScope(values):
            return [*map(tf.convert_to_tensor, tree.flatten(metric.result()))]

    def _judge_gradients(self, unit: Unit) -> None:
        """Those of a unit that has its own way."""
        gradients = self._graph.gradients.get(unit, ())
        columns = self._columns([t for _, t in gradients])
        pairs = [(v, column) for (v, _), column in zip(gradients, columns)]
        sizes = [max(map(largest, c)) for v, c in pairs if v is not None]
        for variable, column in pairs:
            apart = compare.of_gradient(
                variable,
                column,
                max(sizes, default=0.0),
                self._parts,
                unit.num_bytes,
            )
            if apart:
                name = "inputs" if variable is None else variable.name
                self._phase.say(unit, "gradients", apart, name)


def _first_line(error: Exception) -> str:
    """Returns the first line of an error that says something."""
    lines = [
        line
        for line in str(error).splitlines()
        if line.strip() and not line.endswith("root error(s) found.")
    ]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


def _weight(value: tf.Tensor, is_table: bool, is_real: bool) -> tf.Tensor:
    """Draws zeros; makes a table of small numbers larger, up to around 1.

    Behind zeros nothing would show, nor would what is looked up behind what is
    drawn: tables begin with numbers around 0.05. With real data, only matrices
    of zeros are drawn.
    """
    with tf.device(value.device):
        if (
            is_continuous(value)
            and (not is_real or value.shape.rank >= 2)
            and not tf.reduce_any(value != 0)
        ):
            drawn = tf.random.stateless_normal(value.shape, (1, 2))
            return tf.cast(drawn, value.dtype)
        is_small = math.prod(value.shape) <= _MOST_NUMBERS
        if is_real or not (is_table and is_small and value.dtype.is_floating):
            return value
        wide = tf.cast(value, tf.float32)
        size = tf.sqrt(tf.reduce_mean(wide**2))
        return value / tf.cast(tf.minimum(size, 1), value.dtype)
