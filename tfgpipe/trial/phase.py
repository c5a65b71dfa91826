"""One phase of a model, tried: what differs, and what could not be tried."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe.cells import Cell, ModelCall
from tfgpipe.graphs import TracedModel, is_continuous, stateful_kinds
from tfgpipe.internals import Nest
from tfgpipe.trial import compare, rows
from tfgpipe.trial.conditions import conditions_of_rows
from tfgpipe.trial.distance import distance
from tfgpipe.trial.run import Run, first_line
from tfgpipe.trial.tried_graph import State, TriedGraph
from tfgpipe.trial.units import Unit, Units, is_random

# Of a table that is copied.
_MOST_NUMBERS = 2**26


class Phase:
    """One phase of a model, tried.

    Args:
        call: How the model is called.
        cells: The cells.

    Attributes:
        graph: What is run; None if it cannot be made.
        said: What differs: by unit, and what it is about, the cell, the name
            and the words.
        tried: The units that were tried.
        errors: Why others could not be.
        differentiated: Those whose gradients were tried.
        gradient_errors: Why those of others could not be.
        varying: The ids of state that follows from rows.
        next: State, before and after a step, by id.
        weights: What the model is run with, by id.
        lookups_of_rows: The places of lookups that are by rows.
    """

    def __init__(self, call: ModelCall, cells: Sequence[Cell]):
        self.call, self.cells = call, cells
        self.graph: Any = None
        self.said: dict[tuple[int, str], tuple[Cell, str, str]] = {}
        self.tried: set[Unit] = set()
        self.errors: dict[Unit, str] = {}
        self.differentiated: set[Unit] = set()
        self.gradient_errors: dict[Unit, str] = {}
        self._failure = ""
        self._fails_anyhow = False
        self._asked: Any = None  # as `said`: code that asks for their number
        self.varying: set[int] = set()
        self.next: dict[int, tuple[keras.Variable, Any, tf.Tensor]] = {}
        self.weights: State = {}
        self.sizes_vary = False  # of what units give, by their rows
        self.lookups_of_rows: set[tuple[int, int]] = set()

    def begin(
        self,
        specs: Nest,
        known: TracedModel | None = None,
        is_of_any_rows: bool = True,
    ) -> TriedGraph | None:
        """Makes the graph, of any number of rows if asked; None if it fails.

        `known` is a run of the model on shapes, if there was one.
        """
        devices = [cell.stores[0] for cell in self.cells]
        try:
            self.graph = graph = TriedGraph(
                self.call, specs, devices, known, is_of_any_rows
            )
            self._draw_weights()
        except Exception as error:  # a user's code may raise anything
            self._failure = f"{type(error).__name__}: {error}"
            return None
        self.said, self.tried, self.errors = {}, set(), {}
        for unit in graph.units.units:
            if unit.mixes:
                self.mixes(unit, math.inf)
            elif unit in graph.units.drawing and not unit.is_known:
                self.errors[unit] = (
                    "it draws random numbers in a loop, a branch or a function"
                )
        return graph

    @property
    def wanted(self) -> list[Unit]:
        """The units that are tried as they are."""
        units = self.graph.units
        return [
            unit
            for unit in units.units
            if not (unit.is_known or unit.mixes or unit in units.drawing)
        ]

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
        kinds = stateful_kinds(graph.traced.operations)
        if not graph.is_of_any_rows or any(map(is_random, kinds)):
            return graph
        num_rows = next(t for t in step.x if t is not None).shape[0]
        first = [
            None if count is None else self._first_unlike(specs, count, known)
            for count, known in ((num_rows, (step, units)), (total, None))
        ]
        if not any(first):
            return graph
        if total and not all(first):  # where both differ, they may do the same
            cell, name = next(one for one in first if one)
            self._asked = cell, name, compare.of_known_rows(total)
        return self.begin(specs, is_of_any_rows=False)

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
            here, there = (
                graph.shown(traced, units, tree.flatten(whole), self.weights)
                for traced, units in (
                    (graph.traced, graph.units),
                    known or graph.traced_for(num_rows),
                )
            )
        except Exception:  # of rows that it cannot take
            return None
        unlike = [
            there[key][0]
            for key in there
            if (key in here or there[key][0] is not None)
            and distance(
                here.get(key, (None, None))[1], there[key][1], num_bytes=least
            )
        ]
        if None not in unlike:
            return None
        first = unlike[0]
        return self.place(first) if first else (self.cells[0], "the model")

    def _draw_weights(self) -> None:
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
        for key, (v, drawn) in [*self.weights.items()]:
            value = tf.convert_to_tensor(v.value)
            is_kept = value.shape.rank < 2 or not _is_zero(value)
            self.weights[key] = v, value if is_kept else drawn

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
        nests: Sequence[Nest],
        state: State | None = None,
        is_real: bool = False,
    ) -> None:
        """Tries the units on some rows, as a whole and in parts.

        `nests` are all rows and each part; `state` is what the step begins
        with, None for the present one. Where real data fail, the step will
        fail, too, and say more.
        """
        try:
            Run(self, parts, nests, state or {}).try_units()
        except Exception as error:  # of rows that it cannot take
            self._failure = first_line(error)
            self._fails_anyhow |= is_real

    def look_up(self, parts: rows.Parts, nests: Sequence[Nest]) -> None:
        """Finds out which lookups are by rows, and nothing else."""
        with contextlib.suppress(Exception):  # of rows that it cannot take
            Run(self, parts, nests, {}).try_lookups()

    def say(
        self, unit: Unit | None, about: str, what: str, name: str = ""
    ) -> None:
        """Notes what differs of a unit, which may be known by another name."""
        if unit is not None:
            cell, unit_name = self.place(unit)
            told = cell, name or unit_name, what
            self.said.setdefault((unit.number, about), told)

    def mixes(self, unit: Unit, apart: float, name: str = "") -> None:
        """Notes that rows of a unit follow from others."""
        self.tried.add(unit)
        self.say(unit, "outputs", compare.of_outputs(apart), name)

    def end(self) -> None:
        """Says what no unit has shown by itself."""
        units = self.graph.units
        for op in conditions_of_rows(self.graph.traced):
            if not units.is_inside_known(op):
                unit = units.maker(op.outputs[0])
                self.say(unit, "outputs", compare.of_condition())
        names = [name for _, name, _ in self.said.values()]
        if self._asked and self._asked[1] not in names:
            self.said[0, "rows"] = self._asked

    def place(self, unit: Unit) -> tuple[Cell, str]:
        """Returns where a unit is, and its name."""
        return self.cells[min(unit.cell, len(self.cells) - 1)], unit.name

    def untried(self) -> list[tuple[Cell, str, str]]:
        """Returns cells and names of what could not be tried, and why."""
        if self._fails_anyhow:
            return []
        if self.graph is None:
            return [(self.cells[0], "the model", self._failure)]
        why = self._failure or "what comes before it could not be run in parts"
        reasons = {
            unit: error
            for unit, error in self.gradient_errors.items()
            if unit not in self.differentiated
        }
        reasons |= {
            unit: self.errors.get(unit, why)
            for unit in self.graph.units.units
            if not unit.is_known and unit not in self.tried
        }
        units = sorted(reasons, key=lambda unit: unit.number)
        return [(*self.place(unit), reasons[unit]) for unit in units]


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
