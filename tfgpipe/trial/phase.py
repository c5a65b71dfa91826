"""One phase of a model, tried unit after unit.

    whole   rows 0 1 2 3 4     unit a --> unit b --> unit c
    parts   rows 0 1           unit a --> unit b --> unit c
            rows 2 3 4         unit a --> unit b --> unit c

As long as the parts make what the whole makes, one run of each tells of all
units. Where a unit does not, the parts are run once more with what the whole
has made there, so that its fault is not taken for one of the next.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import Cell, ModelCall
from tfgpipe.graphs import TracedModel, Values, is_continuous
from tfgpipe.internals import Nest
from tfgpipe.trial import compare, rows
from tfgpipe.trial.compare import Outcome
from tfgpipe.trial.conditions import conditions_of_rows
from tfgpipe.trial.distance import distance
from tfgpipe.trial.tried_graph import State, TriedGraph
from tfgpipe.trial.units import Unit, Units, is_data

# Of a table that is copied.
_MOST_NUMBERS = 2**26


class Phase:
    """One phase of a model, tried.

    Args:
        call: How the model is called.
        cells: The cells.
        known: A run of it on shapes, if there was one.
        tries_all: Whether units are tried of which it is known what they do,
            with their gradients, and all on the host.

    Attributes:
        said: What differs: by unit, and what it is about, the cell, the name
            and the words.
    """

    def __init__(
        self,
        call: ModelCall,
        cells: Sequence[Cell],
        known: Any = None,
        tries_all: bool = False,
    ):
        self.call, self.cells, self._known = call, cells, known
        self._tries_all = tries_all
        self.graph: Any = None
        self.said: dict[tuple[int, str], tuple[Cell, str, str]] = {}
        self.tried: set[int] = set()
        self.errors: dict[int, str] = {}
        self.differentiated: set[int] = set()
        self.gradient_errors: dict[int, str] = {}
        self.failure = ""
        self._fails_anyhow = False
        self.varying: set[int] = set()  # state that follows from rows
        self.next: dict[int, Any] = {}  # state, before and after a step
        self.weights: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self.wanted: list[tuple[int, Unit]] = []
        self.metrics: set[int] = set()  # ids of their variables
        self.all_metrics: list[Any] = []
        self.asked: Any = None  # as `said`: code that asks for their number
        self.sizes_vary = False  # of what units give, by their rows
        self.lookups_of_rows: set[tuple[int, int]] = set()

    def begin(self, specs: Nest) -> TriedGraph | None:
        """Makes the graph, of any number of rows; None if that fails."""
        self.all_metrics = [
            m for layer in self.call.layers for m in layer.metrics
        ]
        self.metrics = {id(v) for v in self.call.metric_state}
        return self._made(specs, known=self._known)

    def _made(self, specs: Nest, **options: Any) -> Any:
        """A graph to try, taken; None if that fails."""
        host = "/device:CPU:0"
        try:
            graph = TriedGraph(
                self.call,
                specs,
                [
                    host if self._tries_all else cell.stores[0]
                    for cell in self.cells
                ],
                tries_all=self._tries_all,
                **options,
            )
            self._take(graph)
            self.draw_weights()
        except Exception as error:  # a user's code may raise anything
            self.failure = f"{type(error).__name__}: {error}"
            return None
        return graph

    def know_rows(
        self, specs: Nest, step: TracedModel, units: Units, total: int | None
    ) -> TriedGraph | None:
        """Looks for code that does something else where it knows the rows.

        In Keras, Python knows the number of rows of a mini-batch, and in a step
        here a micro-batch's. Where one of them makes something else of
        rows than the graph of any number of them, graphs of known numbers are
        tried; None if they cannot be made.

        Args:
            specs: Nest of what a mini-batch is.
            step: The graph of a step.
            units: Its units.
            total: The number of rows of a mini-batch that may be run; None if
                it is not known, or if that takes long.
        """
        graph = self.graph
        kinds = [t.op.type for t in graph.units.draws]
        is_drawn = not all(kind.startswith("Stateless") for kind in kinds)
        if not graph.is_of_any_rows or is_drawn:
            return graph
        num_rows = next(t for t in step.x if t is not None).shape[0]
        first = [
            None if count is None else self._first_unlike(specs, count, known)
            for count, known in (
                (num_rows, None if self.call.stand_ins else (step, units)),
                (total, None),
            )
        ]
        if not any(first):
            return graph
        if total and not all(first):  # where both differ, they may do the same
            cell, name = next(one for one in first if one)
            self.asked = cell, name, compare.of_known_rows(total)
        return self._made(specs, is_of_any_rows=False)

    def draw_weights(self) -> None:
        """Takes the weights; draws zeros, and makes tables larger.

        Behind zeros nothing would show, nor would what is looked up behind what
        is drawn: tables begin with numbers around 0.05.
        """
        traced = self.graph.traced
        tables = {id(v) for v in traced.tables}
        used = {id(use.variable): use.variable for use in traced.uses}
        self.weights = {
            key: (v, _drawn(tf.convert_to_tensor(v.value), key in tables))
            for key, v in used.items()
        }

    def keep_weights(self) -> None:
        """Takes weights as they are, but for matrices of zeros.

        Biases that are drawn may hide what is smaller.
        """
        for key, (v, drawn) in self.weights.items():
            value = tf.convert_to_tensor(v.value)
            is_kept = value.shape.rank < 2 or not _is_zero(value)
            self.weights[key] = v, value if is_kept else drawn

    def _take(self, graph: TriedGraph) -> None:
        """Takes a graph to try its units."""
        self.graph = graph
        self.said, self.tried, self.errors = {}, set(), {}
        self.differentiated, self.gradient_errors = set(), {}
        for i, unit in enumerate(graph.units.units):
            if unit.mixes:
                self.mixes(i, math.inf)
            elif unit in graph.units.drawing:
                self.errors[i] = (
                    "it draws random numbers in a loop, a branch or a function"
                )
        self.wanted = [
            (i, unit)
            for i, unit in enumerate(graph.units.units)
            if self.is_tried(unit) and i not in self.errors and not unit.mixes
        ]

    def is_tried(self, unit: Unit) -> bool:
        """Returns whether a unit is to be tried."""
        return self._tries_all or not unit.is_known

    def _first_unlike(
        self,
        specs: Nest,
        num_rows: int,
        known: tuple[TracedModel, Units] | None,
    ) -> tuple[Cell, str] | None:
        """Cell and name of what a graph of known rows makes otherwise, if any.

        What is inside may be otherwise, if the results are the same.
        """
        graph, parts = self.graph, rows.Parts(1, num_rows - 1)
        whole, *_ = rows.drawn(specs, 8, graph.smallest_table, parts=parts)
        try:
            least = min([unit.num_bytes for unit in graph.units.units])
            other, units = known or graph.traced_for(num_rows)
            pairs = graph.compare_runs(
                other, units, tree.flatten(whole), self.weights
            )
            unlike = [
                unit
                for unit, a, b in pairs
                if a is None or distance(a, b, num_bytes=least)
            ]
        except Exception:  # of rows that it cannot take
            return None
        if None not in unlike:
            return None
        first = unlike[0]
        return self._placed(first) if first else (self.cells[0], "the model")

    def later(self) -> Iterator[State]:
        """Yields the state of the second step, and of a late one.

        What is the same for all rows is taken for a counter.
        """
        if not self.next:
            return
        yield {key: (v, new) for key, (v, _, new) in self.next.items()}
        yield {
            key: (v, new if key in self.varying else new + 999 * (new - old))
            for key, (v, old, new) in self.next.items()
            if new.dtype.is_integer or new.dtype.is_floating
        }

    def run(
        self,
        parts: rows.Parts,
        nests: Sequence[Any],
        state: State | None = None,
        is_real: bool = False,
    ) -> None:
        """Tries the units on some rows, as a whole and in parts.

        `nests` are all rows and each part; `state` is what the step begins
        with, None for the present one. Where real data fail, the step will
        fail, too, and say more.
        """
        try:
            _Run(self, parts, nests, state or {}).units()
        except Exception as error:  # of rows that it cannot take
            self.failure = _told(error)
            self._fails_anyhow |= is_real

    def look_up(self, parts: rows.Parts, nests: Sequence[Any]) -> None:
        """Finds out which lookups are by rows, and nothing else."""
        with contextlib.suppress(Exception):  # of rows that it cannot take
            _Run(self, parts, nests, {}).try_lookups()

    def say(self, i: int, about: str, what: str, name: str = "") -> None:
        """Notes what differs of a unit, which may be known by another name."""
        cell, unit_name = self.place(i)
        self.said.setdefault((i, about), (cell, name or unit_name, what))

    def mixes(self, i: int, apart: float, name: str = "") -> None:
        """Notes that rows of a unit follow from others."""
        self.tried.add(i)
        self.say(i, "outputs", compare.of_outputs(apart), name)

    def end(self) -> None:
        """Says what no unit has shown by itself."""
        units = self.graph.units
        for op in conditions_of_rows(self.graph.traced):
            unit = units.of(op.outputs[0])
            if unit is not None and not units.is_inside_known(op):
                i = units.units.index(unit)
                self.say(i, "outputs", compare.of_condition())
        names = [name for _, name, _ in self.said.values()]
        if self.asked and self.asked[1] not in names:
            self.said[0, "rows"] = self.asked

    def is_clean(self) -> bool:
        """Returns whether all was tried, and nothing differs."""
        return not (self.said or self.failure or self.untried())

    def place(self, i: int) -> tuple[Cell, str]:
        """Where a unit is, and its name."""
        return self._placed(self.graph.units.units[i])

    def _placed(self, unit: Unit) -> tuple[Cell, str]:
        return self.cells[min(unit.cell, len(self.cells) - 1)], unit.name

    def untried(self) -> list[tuple[Cell, str, str]]:
        """Cells and names of what could not be tried, and why."""
        if self._fails_anyhow:
            return []
        if self.graph is None:
            return [(self.cells[0], "the model", self.failure)]
        why = self.failure or "what comes before it could not be run in parts"
        reasons = {
            i: self.errors.get(i, why)
            for i, unit in enumerate(self.graph.units.units)
            if self.is_tried(unit) and i not in self.tried
        }
        for i, error in self.gradient_errors.items():
            if i not in self.differentiated:
                reasons.setdefault(i, error)
        return [(*self.place(i), text) for i, text in sorted(reasons.items())]


class _Run:
    """All units on some rows: as a whole, and in parts.

    Of a unit whose outputs differ, the parts are given the whole's, so
    that its fault is not taken for one of the next.
    """

    def __init__(
        self,
        phase: Phase,
        parts: rows.Parts,
        nests: Sequence[Any],
        state: State,
    ):
        self._phase, self._graph, self._parts = phase, phase.graph, parts
        self._traced = phase.graph.traced
        self._state = state
        self._flat = [tree.flatten(nest) for nest in nests]
        self._counts = [rows.stop - rows.start for rows in parts.slices]
        self._fed: list[Values] = [{}, {}, {}]
        self._made: list[Values] = [{}, {}, {}]
        units = phase.graph.units
        self._losses = _grouped(self._traced.losses, units)
        self._new = [
            (v, t)
            for v, t in self._traced.new_state
            if id(v) not in self._traced.draws
        ]

    def _values(
        self, place: int, more: Sequence[Any] = ()
    ) -> dict[Hashable, Any]:
        """Returns what all rows, or a part, are run on; `more` is state."""
        state = {**self._state, **{id(v): (v, value) for v, value in more}}
        values = self._graph.given(
            self._flat[place], self._phase.weights, state
        )
        return {**values, **self._fed[place]}

    def units(self) -> None:
        """Tries the units, one after the other."""
        graph, wanted = self._graph, self._graph.results
        fed = graph.fed
        drawn = [graph.run(fed, self._values(p)) for p in range(3) if fed]
        is_known = self._feed(fed, drawn)
        whole = graph.run(wanted, {**self._values(0), **(drawn or [{}])[0]})
        self._note_next(whole)
        start, end = 0, len(graph.units.units)
        while start < end and is_known:
            self._made = [whole, *self._parts_of(wanted)]
            start = self._first_fault(start)
            if start < end:
                gives = [
                    t for t in graph.units.units[start].gives if is_data(t)
                ]
                is_known = self._feed(gives, self._made)
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
            ref = tensor.ref()
            sizes = [tuple(run[ref].shape) for run in made]
            fed = [
                rows.part_of(made[0][ref], sizes, self._parts, place)
                for place in range(3)
            ]
            if any(value is None for value in fed):
                return False
            for values, value in zip(self._fed, fed):
                values[ref] = value
        return True

    def _parts_of(self, wanted: Sequence[tf.Tensor]) -> list[Values]:
        """Runs the parts: metrics run on from part to part, state does not."""
        first = self._graph.run(wanted, self._values(1))
        chained = [
            (v, first[t.ref()])
            for v, t in self._new
            if id(v) in self._phase.metrics
        ]
        return [first, self._graph.run(wanted, self._values(2, chained))]

    def _outcomes(self, unit: Unit, **of: Any) -> list[Outcome]:
        """Returns the results of a unit for all rows, and for each part."""
        fed = self._fed[0]
        gives = [t for t in unit.gives if t.ref() not in fed]
        losses = self._losses.get(unit, [])
        return [
            Outcome(
                [made[t.ref()] for t in gives if is_data(t)],
                [made[t.ref()] for t in unit.takes if is_data(t)],
                [made[loss.ref()] for loss in losses],
                {id(v): (v, made[t.ref()]) for v, t in self._new},
                of.get("dx", [[], [], []])[place],
                of.get("dw", [{}, {}, {}])[place],
                self._parts.slices[place],
                self._parts.total,
                unit.num_bytes,
            )
            for place, made in enumerate(self._made)
        ]

    def _first_fault(self, start: int) -> int:
        """Judges units; returns the first whose outputs differ, or the end."""
        for i, unit in self._phase.wanted:
            if i < start:
                continue
            whole, *parts = self._outcomes(unit)
            apart = compare.output_distance(whole, parts)
            if apart and not self._is_repeatable(unit):
                self._phase.errors[i] = "it draws by other means than a seed"
                return i
            self._phase.tried.add(i)
            for text in compare.of_losses(whole, parts):
                self._phase.say(i, "losses", text)
            self._judge_state(i, unit, whole, parts)
            if apart:
                self._phase.mixes(i, apart, self._inner_name(unit))
                self._phase.sizes_vary |= self._has_unclear(unit)
                return i
        return len(self._graph.units.units)

    def _is_repeatable(self, unit: Unit) -> bool:
        """Returns whether a unit equals itself; else none can be compared."""
        gives = [t for t in unit.gives if is_data(t)]
        again = self._graph.run(gives, self._values(0))
        made = self._made[0]
        return not any(distance(made[t.ref()], again[t.ref()]) for t in gives)

    def _inner_name(self, unit: Unit) -> str:
        """The name of what inside a unit is the first that differs."""
        inner = unit.inner(self._traced)
        tensors = [t for _, t in inner]
        made = [self._graph.run(tensors, self._values(p)) for p in range(3)]
        for name, tensor in inner:
            values = [run[tensor.ref()] for run in made]
            if compare.is_clearly_apart(self._counts, values, unit.num_bytes):
                return name
        return unit.name

    def _has_unclear(self, unit: Unit) -> bool:
        sizes = [
            [tuple(run[t.ref()].shape) for run in self._made]
            for t in unit.gives
            if t.ref() in self._made[0]
        ]
        return rows.UNCLEAR in [rows.row_axis(s, self._counts) for s in sizes]

    # ------------------------------------------------------------------ state
    def _note_next(self, whole: Values) -> None:
        for variable, tensor in self._traced.new_state:
            key = id(variable)
            if key not in self._phase.metrics:
                old = self._state.get(key, (None, variable.value))[1]
                self._phase.next.setdefault(
                    key, (variable, old, whole[tensor.ref()])
                )

    def _judge_state(
        self, i: int, unit: Unit, whole: Outcome, parts: Sequence[Outcome]
    ) -> None:
        units = self._graph.units
        for variable, tensor in self._new:
            key = id(variable)
            made = [run.state[key][1] for run in (whole, *parts)]
            if any(distance(made[0], run) for run in made[1:]):
                self._phase.varying.add(key)
            if units.of(tensor) is not unit or key in self._phase.metrics:
                continue
            for text in compare.of_state(
                variable, made[0], whole.inputs, parts
            ):
                self._phase.say(i, f"state {key}", text)
        for metric in self._phase.all_metrics:
            ids = {id(v) for v in metric.variables}
            if not any(
                id(v) in ids and units.of(t) is unit for v, t in self._new
            ):
                continue
            results = [self._results(metric, o) for o in (whole, parts[-1])]
            for text in compare.of_metrics(*results):
                self._phase.say(i, "metrics", text)

    def _results(self, metric: Any, made: Outcome) -> dict[str, Any]:
        """Those of a metric, with the values that it has now."""
        with internals.ReadingScope([*made.state.values()]):
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
        for i, unit in enumerate(graph.units.units):
            is_wanted = phase.is_tried(unit) and not unit.mixes
            if unit not in graph.units.drawing or not is_wanted:
                continue
            # What it gave is computed again, of the same seeds.
            gives = [t for t in unit.gives if is_data(t)]
            values = self._values(0)
            for t in gives:
                del values[t.ref()]
            takes = {t.ref() for t in unit.takes if is_data(t)}
            values.update((ref, self._made[0][ref]) for ref in takes)
            others = {ref: self._with_first_rows(ref) for ref in takes}
            if any(value is None for value in others.values()):
                continue
            one, again, other = (
                [*graph.run(gives, {**values, **run}).values()]
                for run in ({}, {}, others)
            )
            if any(map(distance, one, again)):
                phase.errors[i] = "it draws by other means than a seed"
                continue
            phase.tried.add(i)
            for t, *pair in zip(gives, one, other):
                sizes = [tuple(run[t.ref()].shape) for run in self._fed]
                a, b = (rows.part_of(v, sizes, self._parts, 1) for v in pair)
                if apart := distance(a, b, num_bytes=unit.num_bytes):
                    phase.mixes(i, apart)

    def _with_first_rows(self, ref: Any) -> Any:
        """Of all rows, with the first ones again and again; None if unclear."""
        values = [run[ref] for run in self._made]
        sizes = [tuple(t.shape) for t in values]
        axis = rows.row_axis(sizes, self._counts)
        if axis < 0:
            return values[0] if axis == rows.NONE else None
        places = tf.range(self._parts.total) % self._parts.first
        return tf.gather(values[0], places, axis=axis)

    def _try_draws(self) -> None:
        """State that is drawn, and not row by row, is another with each seed.

        One that follows from rows, which draw, is a mean over more of them.
        """
        graph = self._graph
        drawn = [t for t in graph.units.draws if t.ref() in self._fed[0]]
        kept = [
            (v, t)
            for v, t in self._new
            if id(v) not in self._phase.metrics
            and graph.follows(t, [d for d in drawn if self._is_of_batch(d)])
        ]
        for variable, tensor in kept:
            unit = graph.units.of(tensor)
            if unit is not None:
                i = graph.units.units.index(unit)
                text = compare.of_drawn(variable)
                self._phase.say(i, f"state {id(variable)}", text)

    def _is_of_batch(self, draw: tf.Tensor) -> bool:
        """Returns whether random numbers are not drawn for rows."""
        sizes = {tuple(run[draw.ref()].shape) for run in self._fed}
        return len(sizes) == 1

    def _try_replicas(self) -> None:
        """A metric of several replicas is zero in all but the first."""
        graph, metrics = self._graph, self._phase.metrics
        if len(self._phase.cells[0].devices) == 1:
            return
        for variable, tensor in self._new:
            unit = graph.units.of(tensor)
            is_own = id(variable) in metrics and variable.aggregation == "sum"
            if not is_own or unit is None:
                continue
            nine = 9 * keras.ops.ones_like(variable.value)
            starts = [nine, nine, keras.ops.zeros_like(nine)]
            whole, one, other = (
                graph.run([tensor], self._values(p, [(variable, start)]))[
                    tensor.ref()
                ]
                for p, start in enumerate(starts)
            )
            if distance(whole, one + other):
                i = graph.units.units.index(unit)
                text = compare.of_replicas(variable.name)
                self._phase.say(i, f"replicas {id(variable)}", text)

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
        phase, units = self._phase, self._graph.units
        for lookup in self._graph.lookups:
            whole, *parts = (values[lookup.indices.ref()] for values in runs)
            is_of_rows, are_repeated = compare.of_indices(whole, parts)
            if is_of_rows and not are_repeated:
                phase.lookups_of_rows.add(lookup.place)
            if not (is_of_rows or are_repeated or phase.sizes_vary):
                i = units.units.index(lookup.unit)
                text = compare.of_lookups(lookup.variable)
                phase.say(i, f"lookup {id(lookup.variable)}", text)

    def _try_gradients(self) -> None:
        """Those of units that are differentiated."""
        graph = self._graph
        tried = [
            (i, unit, graph.gradients[unit])
            for i, unit in self._phase.wanted
            if unit in graph.gradients
            and not any(place == i for place, _ in self._phase.said)
        ]
        tensors = [
            t for *_, gradients in tried for t in gradients.all_gradients
        ]
        if not tensors:
            return
        given: list[Values] = [{}, {}, {}]
        for *_, gradients in tried:
            for i, (t, dy) in enumerate(zip(gradients.made, gradients.dy)):
                for place, d in enumerate(self._cotangents(i, t)):
                    given[place][dy.ref()] = d
        numbers = [i for i, *_ in tried]
        try:
            made = [
                graph.run(tensors, {**self._values(place), **given[place]})
                for place in range(3)
            ]
        except Exception as error:  # of rows that they cannot take
            text = f"its gradients: {_told(error)}"
            self._phase.gradient_errors.update(dict.fromkeys(numbers, text))
            return
        self._phase.differentiated.update(numbers)
        for i, unit, gradients in tried:
            dx = [[m[t.ref()] for t in gradients.dx] for m in made]
            dw = [
                {id(t): (v, m[t.ref()]) for v, t in gradients.dw} for m in made
            ]
            whole, *parts = self._outcomes(unit, dx=dx, dw=dw)
            for text in compare.of_gradients(whole, parts):
                self._phase.say(i, "gradients", text)

    def _cotangents(self, number: int, tensor: tf.Tensor) -> list[Any]:
        """Gradients of what was made of all rows, and of each part.

        Zeros, where it is not known which numbers are of which row.
        """
        values = [run[tensor.ref()] for run in self._made]
        sizes = [tuple(t.shape) for t in values]
        expected = [
            rows.part_of(values[0], sizes, self._parts, place)
            for place in range(3)
        ]
        if any(distance(*pair) for pair in zip(values, expected)):
            return [tf.zeros_like(t) for t in values]
        return [
            rows.cotangent(number, values, self._parts, place)
            for place in range(3)
        ]


def _told(error: Exception) -> str:
    """The first line of an error that says something."""
    lines = [
        line
        for line in str(error).splitlines()
        if line.strip() and not line.endswith("root error(s) found.")
    ]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


def _grouped(
    losses: Sequence[tf.Tensor], units: Units
) -> dict[Unit, list[tf.Tensor]]:
    """Losses of layers by the units that made them."""
    by_unit: dict[Unit, list[tf.Tensor]] = {}
    for loss in losses:
        unit = units.of(loss)
        if unit is not None:
            by_unit.setdefault(unit, []).append(loss)
    return by_unit


def _is_zero(value: tf.Tensor) -> bool:
    return is_continuous(value) and not tf.reduce_any(value != 0)


def _drawn(value: tf.Tensor, is_table: bool) -> tf.Tensor:
    """Draws zeros; makes a table of small numbers larger, up to around 1."""
    with tf.device(value.device):
        if _is_zero(value):
            drawn = tf.random.stateless_normal(value.shape, (1, 2))
            return tf.cast(drawn, value.dtype)
        is_small = math.prod(value.shape) <= _MOST_NUMBERS
        if not (is_table and is_small and value.dtype.is_floating):
            return value
        wide = tf.cast(value, tf.float32)
        size = tf.sqrt(tf.reduce_mean(wide**2))
        return value / tf.cast(tf.minimum(size, 1), value.dtype)
