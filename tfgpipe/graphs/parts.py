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
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs.bundle import tensors
from tfgpipe.graphs.cut import WholeGraph, follows
from tfgpipe.graphs.gradient_sums import Gradient, Indices
from tfgpipe.graphs.traced_model import Differentiated, TracedModel

# Whether it is backward, and of which cell.
_Pass = tuple[bool, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The operations of one cell in a model's graph, and what crosses.

    Tensors are in the order in which the cell's operations come to them.

    Attributes:
        made: The whole graph, differentiated.
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

    made: Differentiated
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
    def traced(self) -> TracedModel:
        """The whole graph, without its backward pass."""
        return self.made.traced

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
    made: Differentiated, num_cells: int, indices: Sequence[Sequence[Indices]]
) -> list[Part]:
    """Cuts a model's graph into the parts of its cells.

    `indices` is for each of `TracedModel.uses`, see `Part`; empty where
    nothing is known.
    """
    return _Cutting(made, num_cells, indices).parts()


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


class _Cutting:
    """Finds for each cell what it has, takes and gives."""

    def __init__(
        self,
        made: Differentiated,
        num_cells: int,
        indices: Sequence[Sequence[Indices]],
    ):
        self._made = made
        self._traced = traced = made.traced
        self._num_cells = num_cells
        self._indices = indices
        self._whole = WholeGraph(traced.graph)
        # What nothing of the graph makes.
        given = [*traced.x, *traced.labels, *made.dy, *made.dlosses]
        given += [tensor for _, tensor in traced.state]
        self._given = {t.ref() for t in given if t is not None}
        self._weights = {use.tensor.ref(): use for use in traced.uses}
        self._free = set(self._whole.captures)
        self._known = {*self._given, *self._weights, *self._free}
        self._own: dict[_Pass, set[str]] = collections.defaultdict(set)
        self._takes: dict[_Pass, dict[Hashable, tf.Tensor]] = (
            collections.defaultdict(dict)
        )
        self._gives: dict[_Pass, dict[Hashable, tf.Tensor]] = (
            collections.defaultdict(dict)
        )
        self._uses: dict[int, dict[Hashable, Any]] = collections.defaultdict(
            dict
        )

    def parts(self) -> list[Part]:
        """The parts, one after the other."""
        traced, made = self._traced, self._made
        gradients = [tensors([d]) for d in made.dw]
        owners = [self._owner(own) for own in gradients]
        results = traced.results
        wanted = [*results, *(t for own in gradients for t in own)]
        needed = self._needed(wanted)
        for op in self._whole.operations:
            if op.name not in needed:
                continue
            own = self._pass_of(op)
            self._own[own].add(op.name)
            for tensor in op.inputs:
                self._take(tensor, own)
        for tensor in results:
            self._give(tensor)
        for use, found, owner in zip(traced.uses, gradients, owners):
            if owner is not None:
                self._uses[owner][use.tensor.ref()] = use
                for tensor in found:
                    self._take(tensor, (True, owner))
        return [self._part(k, owners) for k in range(self._num_cells)]

    def _part(self, k: int, owners: list[int | None]) -> Part:
        places = {
            use.tensor.ref(): i for i, use in enumerate(self._traced.uses)
        }
        indices = [places[ref] for ref in self._uses[k]]
        dw = [
            self._made.dw[i] if owners[i] == k else Gradient() for i in indices
        ]
        taken = self._takes[False, k]
        back = self._takes[True, k]
        return Part(
            self._made,
            self._whole,
            k,
            self._own[False, k],
            self._own[True, k],
            [*self._uses[k].values()],
            dw,
            [*taken.values()],
            [*self._gives[False, k].values()],
            [t for ref, t in back.items() if ref not in taken],
            [*self._gives[True, k].values()],
            [_as_many(self._indices[i], d) for i, d in zip(indices, dw)],
        )

    def _pass_of(self, op: tf.Operation) -> _Pass:
        made = self._made
        cell = self._traced.cell_of(made.places[op.name])
        return op.name in made.backward, cell

    def _owner(self, gradient: list[tf.Tensor]) -> int | None:
        """The cell whose backward pass makes a gradient, or None."""
        backward = self._made.backward
        if not gradient:
            return None
        cells = [
            self._pass_of(t.op)[1] for t in gradient if t.op.name in backward
        ]
        return min(cells, default=self._pass_of(gradient[0].op)[1])

    def _needed(self, wanted: Sequence[tf.Tensor]) -> set[str]:
        """Returns the names of the operations that results follow from."""
        names = {*internals.ancestors(wanted, effects=self._traced.effects)}
        outside = {ref.deref().op.name for ref in self._given}
        outside |= {ref.deref().op.name for ref in self._weights}
        return names - outside

    def _take(self, tensor: tf.Tensor, own: _Pass) -> None:
        """Notes what a pass of a cell takes."""
        ref = tensor.ref()
        if ref in self._weights:
            self._uses[own[1]][ref] = self._weights[ref]
        elif ref in self._given:
            self._takes[own][ref] = tensor
        elif not follows(tensor, self._free):
            maker = self._pass_of(tensor.op)
            is_kept = maker == (False, own[1])  # of its own forward pass
            if maker != own and not is_kept:
                self._takes[own][ref] = tensor
                self._gives[maker][ref] = tensor

    def _give(self, tensor: tf.Tensor) -> None:
        """Notes a result of the step."""
        if tensor.ref() not in self._known:
            self._gives[self._pass_of(tensor.op)][tensor.ref()] = tensor


def _as_many(known: Sequence[Indices], gradient: Gradient) -> list[Indices]:
    """Returns what is known of each lookup."""
    count = len(gradient.slices)
    if len(known) == count:
        return [*known]
    is_same = {*known} == {Indices.REPEATED}
    return [Indices.REPEATED if is_same else Indices.OF_ROWS] * count
