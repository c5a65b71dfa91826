"""A model's graph, cut into the parts of its cells: what crosses between them.

Each operation is of one cell, and of the forward or the backward pass. Whatever
tensor an operation takes of another cell crosses, straight from the cell that
makes it to each one that takes it:

    cell 0  forward  --h--> cell 1  forward  --+--> cell 2  forward
                     ----------- skip ---------+
    cell 0  backward <-dh-- cell 1  backward <-+--- cell 2  backward

So it is with gradients, and with what a gradient takes of another cell's
forward pass. What follows from constants alone does not cross, but is computed
again.

XLA compiles a function when it is first called. In the middle of a step that is
too late: some devices have worked already. So parts are asked before. The
registry of kernels tells which operations XLA does not know: strings, lookups,
Python functions. The graph is also translated for XLA, which neither compiles
nor runs anything: so XLA tells which sizes follow from values. A size that the
trace does not know is taken for `_SIZE`; a graph that uses tables or other
resources is not translated.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs.cut import WholeGraph, follows
from tfgpipe.graphs.functions import tensors
from tfgpipe.graphs.gradient_sums import Gradient, Indices
from tfgpipe.graphs.traced_model import TracedModel

# Stands for a number of rows, or of positions, that is not known.
_SIZE = 4

# How XLA names the operation that it cannot compile.
_NODE = re.compile(r"node (?:`|\{\{node )([\w./>-]+)")

# Whether it is backward, and of which cell.
_Pass = tuple[bool, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The operations of one cell in a model's graph, and what crosses.

    Tensors are in the order in which the cell's operations come to them.

    Attributes:
        traced: The whole graph.
        whole: The same, with its backward pass, to be cut.
        index: The number of the cell.
        forward: The names of its operations.
        backward: The names of its backward pass's operations.
        uses: The weights that it reads.
        dw: The gradients that its backward pass makes of them.
        forward_inputs: Tensors that its forward pass takes, but weights.
        forward_outputs: Tensors of its forward pass that other cells take, or
            the step.
        gradient_inputs: Tensors that its backward pass takes of other cells'
            backward passes, and gradients of the loss.
        gradient_outputs: Gradients that earlier cells take.
        indices: For each of `dw`, and each lookup if it is sparse, how its
            indices differ between micro-batches.
    """

    traced: TracedModel
    whole: WholeGraph
    index: int
    forward: set[str]
    backward: set[str]
    uses: list[Any]
    dw: list[Gradient]
    forward_inputs: list[tf.Tensor]
    forward_outputs: list[tf.Tensor]
    gradient_inputs: list[tf.Tensor]
    gradient_outputs: list[tf.Tensor]
    indices: list[list[Indices]]

    @property
    def inputs(self) -> list[tf.Tensor]:
        """Returns what it takes of the forward pass that is no variable."""
        state = {t.ref() for _, t in self.traced.state}
        return [t for t in self.forward_inputs if t.ref() not in state]

    @property
    def state(self) -> list[tf.Tensor]:
        """Returns what it takes of the variables that are not trained."""
        inputs = {t.ref() for t in self.inputs}
        return [t for t in self.forward_inputs if t.ref() not in inputs]

    @property
    def effects(self) -> list[tf.Operation]:
        """The operations that run for their side effects."""
        return [op for op in self.traced.effects if op.name in self.forward]

    @property
    def operations(self) -> list[tf.Operation]:
        """Those of the forward pass, in order."""
        return [op for op in self.traced.operations if op.name in self.forward]


def parts_of(
    traced: TracedModel, num_cells: int, indices: Sequence[Sequence[Indices]]
) -> list[Part]:
    """Cuts a model's graph into the parts of its cells.

    `indices` is for each of `TracedModel.uses`, see `Part`; empty where
    nothing is known.
    """
    whole = WholeGraph(traced.graph)
    passes = [(back, k) for back in (False, True) for k in range(num_cells)]
    names: dict[_Pass, set[str]] = {one: set() for one in passes}
    takes: dict[_Pass, dict[Hashable, tf.Tensor]] = {one: {} for one in passes}
    gives: dict[_Pass, dict[Hashable, tf.Tensor]] = {one: {} for one in passes}
    reads: list[dict[int, None]] = [{} for _ in range(num_cells)]
    uses = {use.tensor.ref(): i for i, use in enumerate(traced.uses)}
    # What nothing of the graph makes.
    given = [*traced.x, *traced.labels, *traced.dy, *traced.dlosses]
    given += [tensor for _, tensor in traced.state]
    starts = {t.ref() for t in given if t is not None}
    free = set(whole.captures)
    known = {*starts, *uses, *free}

    def pass_of(op: tf.Operation) -> _Pass:
        return op.name in traced.backward, traced.cell_of(
            traced.places[op.name]
        )

    def take(tensor: tf.Tensor, taker: _Pass) -> None:
        ref = tensor.ref()
        if ref in uses:
            reads[taker[1]][uses[ref]] = None
        elif ref in starts:
            takes[taker][ref] = tensor
        elif not follows(tensor, free):
            maker = pass_of(tensor.op)
            # Its own forward pass is kept, or runs again.
            if maker not in (taker, (False, taker[1])):
                takes[taker][ref] = gives[maker][ref] = tensor

    gradients = [tensors(d) for d in traced.dw]
    wanted = [*traced.results, *(t for flat in gradients for t in flat)]
    needed = internals.ancestors(wanted, effects=traced.effects)
    outside = {ref.deref().op.name for ref in (*starts, *uses)}
    for op in whole.in_order(needed.keys() - outside):
        taker = pass_of(op)
        names[taker].add(op.name)
        for tensor in op.inputs:
            take(tensor, taker)
    for tensor in traced.results:
        if tensor.ref() not in known:
            gives[pass_of(tensor.op)][tensor.ref()] = tensor
    owners: list[int | None] = [None] * len(gradients)
    for i, flat in enumerate(gradients):
        if flat:
            # The cell whose backward pass makes a gradient.
            makers = [pass_of(t.op) for t in flat]
            backward = [k for is_backward, k in makers if is_backward]
            owners[i] = owner = min(backward, default=makers[0][1])
            reads[owner][i] = None
            for tensor in flat:
                take(tensor, (True, owner))
    parts = []
    for k, read in enumerate(reads):
        dw = [traced.dw[i] if owners[i] == k else Gradient() for i in read]
        taken = takes[False, k]
        parts.append(
            Part(
                traced,
                whole,
                k,
                names[False, k],
                names[True, k],
                [traced.uses[i] for i in read],
                dw,
                [*taken.values()],
                [*gives[False, k].values()],
                [t for ref, t in takes[True, k].items() if ref not in taken],
                [*gives[True, k].values()],
                [_as_many(indices[i], d) for i, d in zip(read, dw)],
            )
        )
    return parts


def alive(parts: Sequence[Part]) -> list[list[tf.Tensor]]:
    """What is alive before each of a model's parts, and behind the last."""
    traced = parts[0].traced
    last: dict[Hashable, int] = {}  # by tensor, the last part that takes it
    for k, part in enumerate(parts):
        last.update((t.ref(), k) for t in part.inputs)
    end = len(parts)
    last.update((t.ref(), end) for t in traced.handed_out if t is not None)
    found = [[t for t in traced.x if t is not None]]
    for k, part in enumerate(parts):
        before = [*found[-1], *part.forward_outputs]
        found.append([t for t in before if last.get(t.ref(), -1) > k])
    return found


def _as_many(known: Sequence[Indices], gradient: Gradient) -> list[Indices]:
    """Returns what is known of each lookup."""
    count = len(gradient.slices)
    if len(known) == count:
        return [*known]
    is_same = {*known} == {Indices.REPEATED}
    return [Indices.REPEATED if is_same else Indices.OF_ROWS] * count


# ------------------------------------------------------ what XLA cannot compile
class NotCompilable(ValueError):
    """Says that XLA cannot compile a model, and names the cause."""

    def __init__(self, layer: str, cause: str):
        super().__init__(
            "`jit_compile` must be False for a model that XLA cannot compile. "
            f"Received: {layer}: {cause}. Leave `jit_compile` out, or pass "
            "False to `compile`."
        )
        self.layer, self.cause = layer, cause


def check_compilable(parts: Sequence[Part], keys: Sequence[Hashable]) -> None:
    """Refuses a model that XLA cannot compile.

    Of parts that have equal `keys`, the first tells of all.

    Raises:
        NotCompilable: With the layer, the operation, and the cause.
    """
    firsts: dict[Hashable, Part] = {}
    for part, key in zip(parts, keys):
        firsts.setdefault(key, part)
    unlike = [*firsts.values()]
    for part in unlike:
        for op in part.whole.in_order(part.forward | part.backward):
            if op.type != "Placeholder" and not internals.has_xla_kernel(
                op.type
            ):
                cause = f"it runs {op.type}, for which XLA has no kernel"
                raise NotCompilable(_layer(part, op.name), cause)
    # A size that is not known may have to fit another one.
    taken = [
        t
        for part in unlike
        for t in (*part.forward_inputs, *part.gradient_inputs)
    ]
    knows_sizes = all(t.shape.is_fully_defined() for t in taken)
    refusal = _refusal(unlike if knows_sizes else parts)
    if refusal is not None:
        name = next(iter(_NODE.findall(refusal)), "")
        # The first sentence of XLA's words.
        text = refusal.split("\n")[0]
        text = text.removeprefix("Failed getting HLO text: '")
        text = re.sub(r"\{\{node ([^}]*)\}\}", r"\1", text)
        raise NotCompilable(_layer(parts[0], name), text.rstrip("'. "))


def _refusal(parts: Sequence[Part]) -> str | None:
    """Returns XLA's words if it cannot translate some parts of a graph."""
    whole = parts[0].whole
    names = set[str]().union(*(p.forward | p.backward for p in parts))
    operations = [
        op for op in whole.in_order(names) if op.type != "Placeholder"
    ]
    names = {op.name for op in operations}
    inputs = {
        t.name: t
        for op in operations
        for t in op.inputs
        if t.op.name not in names
    }
    if any(
        t.shape.rank is None or t.dtype == tf.resource for t in inputs.values()
    ):
        return None  # XLA translates functions of tensors of a known rank
    definition = whole.definition_of(names)
    results = {
        t.name: None
        for part in parts
        for t in (
            *part.forward_outputs,
            *part.gradient_outputs,
            *tensors(part.dw),
        )
        if t.op.name in names
    }

    def function(*values: tf.Tensor) -> list[tf.Tensor]:
        known = dict(zip(inputs, values))
        return internals.import_definition(definition, known, [*results])

    specs = [
        tf.TensorSpec([n or _SIZE for n in t.shape.as_list()], t.dtype)
        for t in inputs.values()
    ]
    with internals.outside_functions():
        return internals.xla_refusal(function, specs)


def _layer(part: Part, name: str) -> str:
    """Names the layer that runs an operation, or whose gradient does."""
    place = part.traced.places.get(name)
    if place is None:
        return "the model"
    return str(part.traced.section_of(place).words)
