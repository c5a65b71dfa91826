"""Finds what a model's graph repeats: runs of equal blocks of steps.

    steps    embed | norm attend add norm dense add | norm ... | norm head
    keys       e   |  a     b     c   a     d    c  |  a   ... |  a    h
    repeat           start 1, size 6, count 12

A step's key is all that its operations say but names: kinds, attributes,
shapes, and how they are wired; what comes from elsewhere counts by the order in
which it is taken. Of all runs of equal blocks the one comes first that leaves
the fewest operations if one block is enough for all; then what is before and
behind it is searched likewise, such as the decoder behind an encoder.

It is the forward pass alone: whether blocks share functions is for
`same_graph.py` to say, by their backward passes, too.

Cost: L^2 comparisons for L steps, in NumPy.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfgpipe.graphs.same_graph import FunctionTexts, operation_text
from tfgpipe.graphs.traced_model import TracedModel


class Repeat(NamedTuple):
    """A run of equal blocks.

    Attributes:
        start: The first step of the first block.
        size: The number of steps of a block.
        num_blocks: How many there are.
        num_operations: Those of a block's forward pass.
    """

    start: int
    size: int
    num_blocks: int
    num_operations: int

    def bounds(self, several: int = 1) -> list[int]:
        """Returns where so many blocks in a row begin, and the end.

        Example:

        >>> Repeat(1, 6, 5, 100).bounds(2)
        [1, 13, 25, 31]
        """
        starts = range(self.start, self.stop, self.size * several)
        return [*starts, self.stop]

    @property
    def stop(self) -> int:
        """The step behind the last block."""
        return self.start + self.size * self.num_blocks


def repeats_of(
    traced: TracedModel,
    operations: Sequence[Sequence[tf.Operation]],
    live_bytes: Sequence[int],
) -> list[Repeat]:
    """Finds the runs of equal blocks among the steps of a model.

    Args:
        traced: The model.
        operations: Those of each step.
        live_bytes: For each step, what crosses if a cell begins with it.

    Returns:
        The runs, in order.
    """
    writer = BlockKeys(traced)
    numbers: dict[str, int] = {}
    keys = np.array(
        [
            numbers.setdefault(writer.key(own), len(numbers))
            for own in operations
        ],
        int,
    )
    ends = np.cumsum([0, *map(len, operations)])
    found: list[Repeat] = []
    waiting = [(0, len(keys))]
    while waiting:
        start, stop = waiting.pop()
        run = _best_run(keys[start:stop], ends[start : stop + 1])
        if run is None:
            continue
        first, size, last = start + run[0], run[1], start + run[2]
        waiting += [(start, first), (last, stop)]
        count = (last - first) // size
        # Where in the run blocks begin: there the least crosses. (The norm
        # behind the last block is like the first step of a block.)
        offsets = range(last - first - size * count + 1)
        crossing = [
            sum(live_bytes[first + o : first + o + size * count : size])
            for o in offsets
        ]
        first += crossing.index(min(crossing))
        each = int(ends[first + size] - ends[first])
        repeat = Repeat(first, size, count, each)
        if _are_wired_alike(repeat, operations, writer):
            found.append(repeat)
    return sorted(found)


def _best_run(keys: Any, ends: Any) -> tuple[int, int, int] | None:
    """Finds the run that leaves the fewest operations.

    `ends` counts the operations before each step. Returns where it starts, the
    size of its blocks, and where it stops; None if nothing is repeated.
    """
    best, most = None, 0
    for size in range(1, len(keys) // 2 + 1):
        same = keys[size:] == keys[:-size]
        edges = np.flatnonzero(np.diff([False, *same, False]))
        for first, stop in edges.reshape(-1, 2).tolist():
            count = (stop - first) // size + 1
            left_out = (count - 1) * int(ends[first + size] - ends[first])
            if count > 1 and left_out > most:
                best, most = (first, size, stop + size), left_out
    return best


def _are_wired_alike(
    repeat: Repeat,
    operations: Sequence[Sequence[tf.Operation]],
    writer: BlockKeys,
) -> bool:
    """Returns whether blocks are equal as a whole, not only step by step."""
    blocks = [
        writer.key([op for own in operations[a:b] for op in own])
        for a, b in itertools.pairwise(repeat.bounds())
    ]
    return max(collections.Counter(blocks).values()) > 1


class BlockKeys:
    """Writes what some operations of a forward pass compute, without names."""

    def __init__(self, traced: TracedModel):
        definition = traced.graph.as_graph_def()
        self._nodes = {node.name: node for node in definition.node}
        functions = {f.signature.name: f for f in definition.library.function}
        self._functions = FunctionTexts(functions)
        self._given: dict[Hashable, tuple[Any, ...]] = {
            use.tensor.ref(): ("weight", use.is_trained) for use in traced.uses
        }
        self._given |= {t.ref(): ("state",) for _, t in traced.state}
        self._captured = {t.ref(): id(o) for o, t in traced.graph.captures}
        self._texts: dict[str, bytes] = {}

    def key(self, operations: Sequence[tf.Operation]) -> str:
        """Returns a text that equal operations, wired alike, share."""
        number = {op.name: i for i, op in enumerate(operations)}
        taken: dict[Hashable, int] = {}
        found = hashlib.sha256()

        def written(tensor: tf.Tensor) -> Any:
            if tensor.op.name in number:
                return number[tensor.op.name], tensor.value_index
            ref = tensor.ref()
            if ref in self._captured and ref not in self._given:
                return "outside", self._captured[ref]
            place = taken.setdefault(ref, len(taken))
            kind = self._given.get(ref, ("taken",))
            return *kind, place, str(tensor.shape), tensor.dtype.name

        for op in operations:
            controls = [number.get(o.name) for o in op.control_inputs]
            wiring = [written(t) for t in op.inputs], controls
            found.update(self._text(op) + repr(wiring).encode())
        return found.hexdigest()

    def _text(self, op: tf.Operation) -> bytes:
        if op.name not in self._texts:
            shapes = [str(t.shape) for t in op.outputs]
            text = operation_text(self._nodes[op.name], self._functions)
            self._texts[op.name] = text + repr(shapes).encode()
        return self._texts[op.name]
