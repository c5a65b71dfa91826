"""Tries a model before its first step: on all rows, and on parts of them.

A layer trains as in Keras if what it makes of a batch follows from what it
makes of parts of it, as `compare.py` says. That is tried for each phase
(`training=True` and `False`): on the first rows of the data, where they are at
hand, and on drawn ones, of several lengths where a length is not known. What
differs is warned of by the layer's name.

Cost: TensorFlow runs the graph of the run on shapes, from which the cells are
made, on a few rows, some ten times. Python runs the model once more in another
phase, if it acts on the number of rows, and, if code of the user's is in it, to
learn whether it does, where a mini-batch has a known number. A model of layers
that are known to treat each row by itself is not tried at all.

Limits: what other values alone would show is not seen.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
from keras import tree

from tfgpipe import failures, internals
from tfgpipe.cells import Cell, ModelCall
from tfgpipe.graphs import TracedModel
from tfgpipe.internals import Nest
from tfgpipe.trial import rows
from tfgpipe.trial.phase import Phase
from tfgpipe.trial.tried_graph import TriedGraph
from tfgpipe.trial.units import Units

TRIALS = ("warn", "error", "off")

# Of a mini-batch's rows, on which layers are tried besides: FLOPs of a run,
# numbers that go in, and rows.
_AFFORDABLE, _MOST_NUMBERS, _MOST_ROWS = 3e8, 2**18, 1024


class Trial:
    """Tries a model, each phase once.

    `rule` says what happens where a layer differs: "warn", "error", or "off",
    which is nothing. With "keep", `tried` has all of it, and nothing is said.

    Attributes:
        lookups_of_rows: Which lookups of weights have shown to be those of
            rows, by their places, see `TracedModel.all_lookups`.
        tried: The phases that were tried, and of which nothing was said yet.
    """

    def __init__(self, rule: str):
        self._data: Callable[[int], Any] | None = None
        self._num_rows = 0  # of a mini-batch, where data are at hand
        self._rule = rule
        self.tried: list[Phase] = []
        self._phases: set[Hashable] = set()
        self._told: set[tuple[str, str]] = set()
        self.lookups_of_rows: set[tuple[int, int]] = set()

    def note_data(self, data: Nest, cast: Callable[[Any], Any]) -> None:
        """Takes rows of a mini-batch to try layers on.

        `cast` makes of them what the first layer takes.
        """
        self._num_rows = rows.num_rows(data)
        if not self._num_rows:
            self._data = None
            return
        kept = min(self._num_rows, _MOST_ROWS)
        first = rows.first_rows(data, kept)
        self._data = lambda count: cast(rows.first_rows(first, count))

    def run(
        self,
        call: ModelCall,
        traced: TracedModel,
        cells: Sequence[Cell],
        specs: Nest,
        count: int,
        source: Any = None,
    ) -> None:
        """Tries a model, if it has not been tried in this phase.

        What differs is for `tell`.

        Args:
            call: How the model is called.
            traced: The same, as the step runs it.
            cells: The cells.
            specs: Nest of tensors, or of specs, that the model takes.
            count: The number of micro-batches.
            source: Has a run of it on shapes, if there was one.
        """
        trained = frozenset(id(u.variable) for u in traced.trained_uses)
        flat = [spec for spec in tree.flatten(specs) if spec is not None]
        sizes = (*(tuple(spec.shape)[1:] for spec in flat),)
        key = call.training, trained, sizes
        known = None if source is None else source.take_traced()
        if key in self._phases:
            return
        units = Units(traced)
        is_known = all(unit.is_known for unit in units.units)
        # Code that asks for a number of rows may show at another one alone.
        asks = flat[0].shape[0] is not None and _has_own_code(call)
        phase = Phase(call, cells)
        if self._rule == "off":
            if not is_known and _has_same_lookups(traced):
                with _unnoticed():
                    graph = phase.begin(specs, known)
                    if graph is not None:
                        drawn = rows.drawn(specs, 8, graph.smallest_table)
                        phase.look_up(rows.FEW, drawn)
        elif asks or not is_known or self._rule == "keep":
            with _unnoticed():
                self._try(phase, specs, count, known, (traced, units), is_known)
            self.tried.append(phase)
        self._phases.add(key)
        self.lookups_of_rows |= phase.lookups_of_rows

    def _try(
        self,
        phase: Phase,
        specs: Nest,
        count: int,
        known: TracedModel | None,
        step: tuple[TracedModel, Units],
        is_known: bool,
    ) -> None:
        """Tries a phase; `step` is the step's graph, with its units."""
        graph = phase.begin(specs, known)
        if graph is None:
            return
        flat = [spec for spec in tree.flatten(specs) if spec is not None]
        many = self._many(graph, flat, count)
        total = flat[0].shape[0] if many else None
        graph = phase.know_rows(specs, *step, total)
        if graph is None:
            return
        wanted = [] if is_known else self._rows(graph, specs, many)
        for parts, nests, is_real in wanted:
            phase.run(parts, nests, is_real=is_real)
        for state in phase.later():
            phase.run(parts, nests, state)
        phase.keep_weights()
        for parts, nests, is_real in wanted:
            if is_real:
                phase.run(parts, nests, is_real=True)
        phase.end()

    def _rows(
        self, graph: TriedGraph, specs: Nest, many: rows.Parts | None
    ) -> list[tuple[rows.Parts, list[Any], bool]]:
        """Returns what to try layers on, and whether it is real data."""
        of_data: list[Any] = []
        real: list[rows.Parts] = []
        if self._data is not None:
            real = [parts for parts in (rows.FEW, many) if parts is not None]
            real = [parts for parts in real if parts.total <= self._num_rows]
            try:
                of_data = [
                    (p, rows.with_parts(self._data(p.total), p), True)
                    for p in real
                ]
            except Exception as error:  # the step itself will tell the user
                failures.inform(f"Layers are tried on drawn rows: {error}")
                real = []
            firsts = [nests[0] for _, nests, _ in of_data]
            if not all(rows.are_like(first, specs) for first in firsts):
                of_data, real = [], []  # a subclass's step makes others
        lengths = rows.LENGTHS if rows.has_unknown_sizes(specs) else (1,)
        tried = [(rows.FEW, n, 0) for n in lengths]
        if not real:
            tried.append((many or rows.FEW, lengths[0], 1))
        limit = graph.smallest_table
        return of_data + [
            (p, rows.drawn(specs, n, limit, seed, p), False)
            for p, n, seed in tried
        ]

    def _many(
        self, graph: TriedGraph, flat: Sequence[Any], count: int
    ) -> rows.Parts | None:
        """As many rows as a mini-batch has; None if that takes long."""
        total = self._num_rows or flat[0].shape[0]
        if total is None:
            many = rows.MANY
        elif total < 2:
            return None
        else:
            first = max(1, total // count)
            many = rows.Parts(first, total - first)
        sizes = [size or 1 for s in flat for size in tuple(s.shape)[1:-1]]
        work = 2 * graph.num_weights * many.total * math.prod(sizes)
        num_numbers = many.total * sum(
            math.prod(size or 1 for size in tuple(s.shape)[1:]) for s in flat
        )
        is_cheap = work <= _AFFORDABLE and num_numbers <= _MOST_NUMBERS
        return many if is_cheap and many.total <= _MOST_ROWS else None

    def tell(self) -> None:
        """Warns of layers that were found to differ, once.

        Raises:
            ValueError: If there are any, and the rule is "error". The next step
                is tried again, and refused again.
        """
        if self._rule == "keep":
            return
        passes, self.tried = self.tried, []
        try:
            for phase in passes:
                self._tell(phase)
        except (ValueError, Warning):  # a warning that a filter raises
            self._phases.clear()
            raise

    def _tell(self, phase: Phase) -> None:
        said = sorted(phase.said.items(), key=lambda pair: pair[0][0])
        if self._rule == "error" and said:
            texts = [
                f"{cell.describe(name)} {what}"
                for _, (cell, name, what) in said
            ]
            raise ValueError(
                'With trial="error", layers must treat a mini-batch as they '
                "treat its micro-batches. Received:\n"
                + "\n".join(f"* {text[0].upper()}{text[1:]}" for text in texts)
                + '\nFollow the cures, or pass trial="warn".'
            )
        for (_, about), (cell, name, what) in said:
            if (name, about) not in self._told:  # in another phase
                cell.warn_of(name, what)
                self._told.add((name, about))
        for cell, name, why in phase.untried():
            if (name, "untried") not in self._told:
                cell.warn_of(
                    name,
                    f"was not tried: {why}. Whether it treats a mini-batch as "
                    "its micro-batches is not known. To be sure, pass "
                    "num_micro_batches=1.",
                )
                self._told.add((name, "untried"))


def _has_own_code(call: ModelCall) -> bool:
    """Returns whether code that is not Keras's runs in calls of the model."""
    return any(
        isinstance(one, keras.layers.Lambda)
        or not internals.is_keras(type(one))
        for layer in call.layers
        for one in internals.flat_layers(layer)
    )


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """Inside, a model may be run without anything to be seen of it."""
    with (
        internals.outside_functions(),
        internals.recording(),
        internals.without_strategy(),
        internals.random_state_kept(),
        internals.random_numbers_kept(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the real calls will warn
        yield


def _has_same_lookups(traced: TracedModel) -> bool:
    """Returns whether some lookups seem to be the same for all rows."""
    varies = traced.varying()
    return any(not varies(op.inputs[1]) for *_, op in traced.all_lookups())
