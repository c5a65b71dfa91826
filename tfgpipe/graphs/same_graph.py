"""Tells which parts of graphs compute the same: cells, and repeated blocks.

A deep model repeats a few blocks. Cells whose parts of the model's graph are
equal, backward pass included, share the functions of their tasks, which are cut
out of one of them. A graph is a function of its arguments, and
variables are among them, so whatever else a layer's code may see, of itself or
of anything, shows in the graph. A key is all that a graph says, except names.

Of what Python knows besides, static shapes are part of the key: functions that
are cut out say them.

A kernel that draws, counts or prints has a state, which cells that share a
function would share where they are on one device: such cells are unlike others.

Runs of equal blocks are found among the steps of a forward pass likewise:

    steps    embed | norm attend add norm dense add | norm ... | norm head
    keys       e   |  a     b     c   a     d    c  |  a   ... |  a    h
    repeat           start 1, size 6, count 12

What comes from elsewhere counts by the order in which it is taken. Of all runs
the one comes first that leaves the fewest operations if one block is enough for
all; then what is before and behind it is searched likewise, such as the decoder
behind an encoder.

Cost: L^2 comparisons for L steps, in NumPy.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs.cut import WholeGraph
from tfgpipe.graphs.functions import tensors
from tfgpipe.graphs.parts import Part
from tfgpipe.graphs.traced_model import TracedModel, stateful_kinds

# What is said for people, and no part of what is computed.
_WORDS = (
    "_user_specified_name",
    "backward_function_name",
    "forward_function_name",
    # Of a gradient that a layer defines: it has been called.
    "_gradient_op_type",
)


@dataclasses.dataclass
class Writer:
    """Writes what operations of a graph compute, without names.

    Args:
        whole: The graph.
        operations: Those that are written, in order.
        given: What is written of tensors that others make, by references.
        merged: Names of operations that are left out, and those of equal ones
            that are taken for them.
    """

    whole: WholeGraph
    operations: Sequence[tf.Operation]
    given: Mapping[Hashable, Any]
    merged: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number = {op.name: f"{i}" for i, op in enumerate(self.operations)}

    def tensor(self, tensor: tf.Tensor) -> Any:
        """Returns what is written of a tensor."""
        if tensor.op.name in self.merged:
            first = self.whole.operation(self.merged[tensor.op.name])
            tensor = first.outputs[tensor.value_index]
        if tensor.ref() in self.given:
            return self.given[tensor.ref()]
        return self.number[tensor.op.name], tensor.value_index

    def digest(self, *facts: object) -> str:
        """Returns a text that equal operations share, with equal facts."""
        digest = hashlib.sha256()
        for op in self.operations:
            names = [o.name for o in op.control_inputs]
            controls = [self.number.get(self.merged.get(n, n)) for n in names]
            wiring = (
                [self.tensor(t) for t in op.inputs],
                [c for c in controls if c],
                [str(t.shape) for t in op.outputs],
            )
            text = operation_text(self.whole, op.name)
            digest.update(text + repr(wiring).encode())
        for fact in facts:
            digest.update(repr(fact).encode())
        return digest.hexdigest()


def part_key(part: Part, facts: Any, in_process: bool = True) -> str:
    """Tells what a part of a graph computes, as a text that equal parts share.

    What it captures counts by identity, and must be kept alive as long as the
    text is; and a part with a state of its own is like no other. Unless the
    text is for other processes, too (`in_process`). `facts` are what else is
    known of it.
    """
    whole = part.whole
    weights = [use.tensor for use in part.uses]
    taken = [*part.forward_inputs, *part.gradient_inputs, *weights]
    given: dict[Hashable, Any] = {
        ref: ("outside", id(outer) if in_process else str(ref.deref().shape))
        for ref, outer in whole.captures.items()
    }
    inputs = {t.ref(): f"in{i}" for i, t in reversed([*enumerate(taken)])}
    given.update(inputs)
    ends = part.forward_outputs, part.gradient_outputs, part.dw
    names = internals.ancestors(
        tensors(ends), lambda t: t.ref() in given, effects=part.effects
    )
    operations = whole.in_order(names)
    # Operations are written by number: names differ from cell to cell.
    writer = Writer(whole, operations, given)
    # Then like no other.
    is_alone = in_process and stateful_kinds(operations, whole.functions)
    flat = tf.nest.flatten(ends, expand_composites=True)
    return writer.digest(
        [
            (id(whole), part.index) if is_alone else None,
            tf.nest.map_structure(lambda _: 0, ends),
            [None if t is None else writer.tensor(t) for t in flat],
            [(str(t.shape), t.dtype.name) for t in taken],
            (
                len(part.forward_inputs),
                len(part.gradient_inputs),
                len(part.forward_outputs),
            ),
            [i for i, op in enumerate(operations) if op.name in part.backward],
            [writer.number[op.name] for op in part.effects],
            tf.nest.flatten(facts),
        ]
    )


# ------------------------------------------------------------- repeated blocks
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
    whole = WholeGraph(traced.graph, takes_reads=False)
    kinds: dict[Hashable, Any] = {
        ref: ("outside", id(outer)) for ref, outer in whole.captures.items()
    }
    kinds |= {use.tensor.ref(): use.is_trained for use in traced.uses}
    kinds |= {t.ref(): "state" for _, t in traced.state}

    def key_of(block: Sequence[tf.Operation]) -> str:
        """Returns a text that equal operations, wired alike, share."""
        names = {op.name for op in block}
        inputs = {t.ref(): t for op in block for t in op.inputs}
        taken = [t for t in inputs.values() if t.op.name not in names]
        given = {
            t.ref(): (kinds.get(t.ref()), i, str(t.shape), t.dtype.name)
            for i, t in enumerate(taken)
        }
        return Writer(whole, block, given).digest()

    numbers: dict[str, int] = {}
    texts = [*map(key_of, operations)]
    keys = np.array([numbers.setdefault(t, len(numbers)) for t in texts], int)
    ends = np.cumsum([0, *map(len, operations)])
    repeats: list[Repeat] = []
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
        first = min(
            range(first, last - size * count + 1),
            key=lambda i: sum(live_bytes[i : i + size * count : size]),
        )
        each = int(ends[first + size] - ends[first])
        repeat = Repeat(first, size, count, each)
        # Blocks are equal as a whole, not only step by step.
        blocks = collections.Counter(
            key_of([op for step in operations[a:b] for op in step])
            for a, b in itertools.pairwise(repeat.bounds())
        )
        if max(blocks.values()) > 1:
            repeats.append(repeat)
    return sorted(repeats)


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


# ---------------------------------------------------------- without any names
def operation_text(whole: WholeGraph, name: str) -> bytes:
    """Returns what an operation computes, without names and inputs."""
    if name not in whole.texts:
        node = tf.compat.v1.NodeDef()
        node.CopyFrom(whole.nodes[name])
        node.name = ""
        del node.input[:]
        node.ClearField("experimental_debug_info")
        for word in ("_class", *_WORDS):  # the first is colocation
            node.attr.pop(word, None)
        for value in node.attr.values():
            for called in (value.func, *value.list.func):
                if called.name:
                    op = whole.operation(name)
                    called.name = _function_text(whole, op, called.name)
        whole.texts[name] = node.SerializeToString(deterministic=True)
    return whole.texts[name]


def _function_text(whole: WholeGraph, op: tf.Operation, name: str) -> str:
    """Returns the text of a function that an operation calls by this name."""
    known = whole.function_texts
    if name not in known:
        known[name] = name  # also inside of itself
        if name in whole.functions:
            said = {
                word: value.SerializeToString(deterministic=True)
                for word, value in whole.functions[name].attr.items()
                if word not in _WORDS
            }
            graph = internals.function_graph(op, name)
            inner = WholeGraph(graph, takes_reads=False)
            inner.function_texts = known
            given = {t.ref(): f"in{i}" for i, t in enumerate(graph.inputs)}
            writer = Writer(inner, inner.operations, given)
            outputs = [writer.tensor(t) for t in graph.outputs]
            known[name] = writer.digest(outputs, sorted(said.items()))
    return known[name]
