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

from tfgpipe import internals
from tfgpipe.cells import Cell, ModelCall
from tfgpipe.graphs import TracedModel
from tfgpipe.internals import Nest
from tfgpipe.trial import rows
from tfgpipe.trial.phase import Phase
from tfgpipe.trial.tried_graph import TriedGraph, traced_for
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
        self._data: Callable[[int], Any] = lambda _: None
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
        kept = rows.first_rows(data, min(self._num_rows, _MOST_ROWS))
        self._data = lambda count: cast(rows.first_rows(kept, count))

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
        is_known = all(unit.is_known for unit in Units(traced).units)
        # Code that asks for a number of rows may show at another one alone.
        asking = [] if flat[0].shape[0] is None else _with_own_code(call)
        if self._rule == "off":
            # Lookups that seem to be the same for all rows may not be.
            varies = traced.varying()
            is_tried = not is_known and not all(
                varies(op.inputs[1]) for *_, op in traced.all_lookups()
            )
        else:
            is_tried = bool(asking) or not is_known or self._rule == "keep"
        if not is_tried:
            return
        with _unnoticed():
            phase = Phase(call, cells, specs, known)
            if phase.graph is not None:
                many = self._many(phase.graph, flat, count)
                if asking:
                    total = flat[0].shape[0] if many else None
                    names = " or ".join(asking[:3])
                    phase.ask(specs, traced, total, names)
                for given in () if is_known else self._rows(phase, specs, many):
                    phase.run(*given)
                phase.end()
            elif asking:  # for a number that it has to know
                with contextlib.suppress(Exception):  # of any code of a user's
                    phase.lookups_of_rows = _with_more_indices(
                        call, specs, flat[0].shape[0], traced
                    )
        self._phases.add(key)
        self.lookups_of_rows |= phase.lookups_of_rows
        if self._rule != "off":
            self.tried.append(phase)

    def _rows(
        self, phase: Phase, specs: Nest, many: rows.Parts | None
    ) -> Iterator[tuple[rows.Parts, list[Any], bool]]:
        """Yields what to try layers on, and whether it is real data."""
        real = [
            parts
            for parts in (rows.FEW, many)
            if parts is not None and parts.total <= self._num_rows
        ]
        try:
            if real and not rows.are_like(self._data(1), specs):
                real = []  # a subclass's step makes others
        except Exception:  # the step itself will tell the user
            real = []
        for parts in real:
            yield parts, rows.with_parts(self._data(parts.total), parts), True
        flat = [spec for spec in tree.flatten(specs) if spec is not None]
        is_long = any(None in tuple(spec.shape)[1:] for spec in flat)
        lengths = rows.LENGTHS if is_long else (1,)
        drawn = [(rows.FEW, length, 0) for length in lengths]
        if not real:
            drawn.append((many or rows.FEW, lengths[0], 1))
        limit = phase.graph.smallest_table
        for parts, length, seed in drawn:
            yield parts, rows.drawn(specs, length, limit, seed, parts), False

    def _many(
        self, graph: TriedGraph, flat: Sequence[Any], count: int
    ) -> rows.Parts | None:
        """As many rows as a mini-batch has; None if that takes long."""
        total = self._num_rows or flat[0].shape[0]
        if total == 1:
            return None
        many = rows.MANY
        if total is not None:
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
        facts = [fact for phase in self.tried for fact in phase.facts]
        self.tried = []
        texts = [
            f"{cell.describe(name)} {what}"
            for about, cell, name, what in facts
            if about != "untried"
        ]
        try:
            if self._rule == "error" and texts:
                raise ValueError(
                    'With trial="error", layers must treat a mini-batch as '
                    "they treat its micro-batches. Received:\n* "
                    + "\n* ".join(text[0].upper() + text[1:] for text in texts)
                    + '\nFollow the cures, or pass trial="warn".'
                )
            for about, cell, name, what in facts:
                if (name, about) not in self._told:  # in another phase
                    cell.warn_of(name, what)
                    self._told.add((name, about))
        except (ValueError, Warning):  # a warning that a filter raises
            self._phases.clear()
            raise


def _with_more_indices(
    call: ModelCall, specs: Nest, num_rows: int, step: TracedModel
) -> set[tuple[int, int]]:
    """Returns the places of lookups that have more indices for more rows.

    For so many, of a mini-batch, than in a step of a micro-batch.
    """
    whole = traced_for(call, specs, num_rows)
    return {
        place
        for (place, _, few), (*_, many) in zip(
            step.all_lookups(), whole.all_lookups()
        )
        if few.inputs[1].shape != many.inputs[1].shape
    }


def _with_own_code(call: ModelCall) -> list[str]:
    """Returns the layers that run code that is not Keras's, in words."""
    return [
        f"layer '{one.name}'"
        for layer in call.layers
        for one in internals.flat_layers(layer)
        if isinstance(one, keras.layers.Lambda)
        or not internals.is_keras(type(one))
    ]


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
