"""What a cell is seen to do when Python runs it, and whether it does so again.

Where there is no graph to look into, operations are noticed as they run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.cells.bundle import tensors
from tfgpipe.cells.captured import check_read, check_used
from tfgpipe.cells.cell import Cell
from tfgpipe.cells.function import Findings
from tfgpipe.cells.side_effects import check_operations, kinds_run, stateful
from tfgpipe.cells.values import CellArguments, Output, is_continuous


class Seen:
    """The operations of a cell that was run eagerly, one after the other.

    Args:
        cell: The cell.
        makers: By the id of a tensor the tensor, which may be gone, and the
            cell that made it.
    """

    def __init__(self, cell: Cell, makers: dict[int, Any]):
        self._cell = cell
        self._makers = makers
        self._kinds: list[str] = []
        self._given: set[int] = set()
        self._is_strange = False
        self._uses: list[tuple[str, Any]] = []
        self._read: Sequence[Any] = ()

    def count(self) -> int:
        """How many there are."""
        return len(self._kinds)

    @contextlib.contextmanager
    def watching(self, arguments: CellArguments) -> Iterator[None]:
        """Inside, the cell is run."""
        given = tensors(list(arguments))
        self._given = {id(t) for t in given}
        with (
            internals.watching_operations(self._notice),
            internals.reads_of_storage() as read,
        ):
            yield
        self._read = read()

    def _notice(
        self, name: str, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        self._kinds.extend(kinds_run(name))
        self._uses += [(name, t) for t in inputs if t.dtype == tf.resource]
        for tensor in inputs:
            made, cell = self._makers.get(id(tensor), (None, self._cell))
            is_other = cell is not self._cell and id(tensor) not in self._given
            if is_other and made() is tensor:
                self._is_strange = True
        for tensor in outputs:
            self._makers[id(tensor)] = weakref.ref(tensor), self._cell

    def check(self, findings: Findings, recomputes: bool) -> None:
        """Refuses, and warns of, what a trace would show, see `tracer.py`."""
        if self._is_strange:
            self._cell.refuse_strangers()
        check_used(self._cell, self._uses)
        check_read(self._cell, self._read)
        check_operations(
            self._cell,
            lambda start, end: stateful(self._kinds[start:end]),
            findings.starts,
            recomputes,
        )


def differ(first: Output, again: Output) -> bool:
    """Whether outputs are others, by more than operations that round at will.

    Args:
        first: Those of the forward pass.
        again: Those of the recomputation.
    """
    pairs = zip(_compared(first), _compared(again), strict=True)
    return any(_are_apart(a, b) for a, b in pairs)


def _compared(output: Output) -> list[tf.Tensor]:
    found = tensors([output.tensors, output.losses])
    return [t for t in found if is_continuous(t)]


def _are_apart(a: tf.Tensor, b: tf.Tensor) -> bool:
    """Of what is not finite, nothing is said."""
    if a.shape != b.shape:
        return True
    limit = 1e-2 if a.dtype.size < 4 else 1e-3
    return bool(tf.reduce_any(abs(a - b) > limit * tf.reduce_max(abs(a))))
