r"""What crosses from function to function where a cell's graph is cut.

The backward pass takes some tensors of the forward pass: they are *kept*. What
they follow from cheaply is repeated instead. Where the backward pass itself is
cut into the gradients of inputs and of weights, some more cross:

    x, weights, state ---> forward ------------------------> y
                              |
                              | kept: activations, (rows, ...) each
                              v
    dy ----------------> input gradient --------------------> dx
                              |
                              | crossing: gradients inside the cell
                              v
    sums so far -------> weight gradient -------------------> sums

Hundreds of tensors cross; they travel in a `Bundle`.

A cell that may keep a share of the bytes keeps some tensors and computes others
again from those, and from what it takes and its weights:

    x --> norm --> matmul --> h --> gelu --> g --> matmul --> y
                               \              \
      backward takes:           h              g

    keep h and g     as many bytes as there are
    keep h           half of them; gelu is run again
    keep nothing     norm, matmul and gelu are run again

A choice costs what is run again. Of all choices, the one with the smallest sum
of bytes kept and `price` times the bytes of work is a minimum cut of a network:

    source --> t       a tensor that is needed
    t --> t'           as much as its bytes: keep it
    t' --> op          without limit: or run what makes it
    op --> sink        as much as its work costs
    op --> t           without limit: and so need what that takes
    t' --> sink        without limit: what cannot be run again

The price is the highest at which no more is kept than is allowed. The order of
a graph's operations does not count, so bits do not depend on it.

References:
    * [Herrmann et al., 2019](https://arxiv.org/abs/1911.13214), on choosing
      what to compute again
    * PyTorch's `functorch.min_cut_rematerialization_partition`, which cuts for
      the fewest bytes, without a price
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Hashable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import tensor_bytes
from tfgpipe.graphs.cut import CHEAP, GraphCutter, functions_of
from tfgpipe.graphs.flops import LIKELY_ROWS, operation_flops
from tfgpipe.graphs.functions import Bundle, Subfunction, in_turn, tensors
from tfgpipe.graphs.gradient_sums import Replacement
from tfgpipe.graphs.parts import NotCompilable, Part

# Operations in the time in which a device reads or writes a byte: a CPU's core,
# and an accelerator, 17 of a V100 in float32, 78 of an A100 in TF32.
_CPU_FLOPS_A_BYTE = 4
_FLOPS_A_BYTE = 20
# What an operation costs besides, such as to start it; where the number of rows
# is unknown, and so counts as 1, that is a row's.
_START = 4096
# Random numbers take many operations each.
_RANDOM_FLOPS = 50
# By how much the price is higher for the first operations than for the last.
_RISE = 0.1
_STEPS = 12
_UNLIMITED = 1 << 60
_SOURCE, _SINK = range(2)


class CellFunctions:
    """The part of a model's graph that is a cell's, cut into functions.

    `device_types` are the cell's devices' types, such as "GPU"; `share` is
    that of the bytes that the backward pass needs which may be kept; `is_sent`
    says whether what is kept goes to the host.

    Attributes:
        part: The part.
        weights: The weights, or the casts of those that are only cast.
        kept: What the backward pass needs of the forward pass.
        kept_share: Of the bytes that it needs, how much that is.
        crossing: What the second half of the backward pass needs of the first.
        sums: The gradients of weights that are dense.
    """

    def __init__(
        self,
        part: Part,
        device_types: Sequence[str],
        share: float = 1.0,
        is_sent: bool = False,
    ):
        self.part = part
        self.options = options = part.traced.options
        # XLA cannot take Optionals, nor can they go between kinds of devices.
        self._together = len(device_types) == 1 and not options.jit_compile
        self._graph = GraphCutter(
            part.whole,
            part.forward | part.backward,
            options.of_function,
            device_types[0],
            part.backward,
        )
        self._functions: dict[Hashable, Subfunction] = {}
        weights = [use.tensor for use in part.uses]
        self.weights = Bundle(
            [only_cast(w) or [w] for w in weights], self._together
        )
        others = [*part.forward_inputs, *part.gradient_inputs]
        self._at_hand = [*others, self.weights]
        at_hand = [*others, *self.weights.aliases]
        #     forward    x, w -> y       kept: what the rest takes of these
        #     ---------------------
        #     half       dy -> dx
        #     ---------------------      crossing: what is taken of this half
        #     whole      -> dw
        dx, dw = part.gradient_outputs, tensors(part.dw)
        whole = self._graph.needed([*dx, *dw], part.backward)
        half = self._graph.needed(dx, part.backward)
        kept = self._graph.entering(whole, [*dx, *dw], at_hand)
        needed = sum(map(tensor_bytes, kept))
        fewer = kept
        if share < 1:
            free = {t.ref() for t in at_hand} | set(self._graph.captures)
            fewer = fewer_kept(kept, free, share, device_types[0])
        self.kept = Bundle(fewer, self._together and not is_sent)
        self.kept_share = sum(map(tensor_bytes, fewer)) / max(needed, 1)
        # What of the forward pass is not kept, each half computes again.
        late = self._graph.entering(whole - half, dw, [*at_hand, *kept])
        self.crossing = Bundle(late, self._together)
        dense = [d for d in part.dw if d.dense is not None]
        self.sums = Bundle([d.dense for d in dense], self._together)
        self.sums.maxima = {
            i for i, d in enumerate(dense) if isinstance(d, Replacement)
        }

    @property
    def can_be_split(self) -> bool:
        """Says whether the two halves of the backward pass may be functions."""
        # XLA cannot hand the state of loops from function to function.
        between = [*self.kept.tensors, *self.crossing.tensors]
        has_lists = any(t.dtype == tf.variant for t in between)
        return not (self.options.jit_compile and has_lists)

    def function(
        self,
        key: Any,
        inputs: Sequence[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        sums: Bundle | None = None,
        with_effects: bool = False,
    ) -> Subfunction:
        """A function of the arguments.

        Asked for again by the same `key`, it is the same one. `with_effects` if
        it has the layers' side effects; `sums` as for `GraphCutter.function`.
        """
        if key not in self._functions:
            self._functions[key] = self._graph.function(
                [*self._at_hand, *inputs],
                fetches,
                self.part.effects if with_effects else (),
                sums,
            )
        return self._functions[key]

    def taken_by(
        self, fetches: Sequence[tf.Tensor], others: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """What tensors of the forward pass take of what makes others of it.

        What the backward pass needs is among the others.
        """
        forward = self.part.forward
        made = [*others, *self.kept.tensors]
        # Sizes are kept by operations of the backward pass.
        sizes = [t.op for t in made if t.op.name not in forward]
        made += [t for op in sizes for t in op.inputs]
        done = self._graph.needed(made, forward)
        names = self._graph.needed(fetches, forward) - done
        at_hand = [*self.part.forward_inputs, *self.weights.aliases]
        return self._graph.entering(names, fetches, at_hand)

    def of_forward(self, fetches: Sequence[tf.Tensor]) -> Subfunction:
        """The function that computes tensors of the forward pass alone."""
        key = tuple(t.ref() for t in fetches)
        with in_turn(False):  # no task, which devices run in turn
            return self.function(key, [], fetches)

    def check_kept(self) -> None:
        """Refuses to keep what XLA cannot hand from function to function.

        Raises:
            NotCompilable: With the layers that keep it.
        """
        if not self.options.jit_compile:
            return
        traced, places = self.part.traced, self.part.whole.places
        kept = [t for t in self.kept.tensors if _is_of_one_function(t)]
        layers = [traced.section_of(places[t.op.name]).name for t in kept]
        if layers:
            raise NotCompilable(
                f"layers {[*dict.fromkeys(layers)]}",
                "loops or conditions keep for their gradients what XLA cannot "
                'hand to another function. Pass remat="always" to `GPipe`',
            )


def only_cast(weight: tf.Tensor) -> list[tf.Tensor] | None:
    """A weight's casts, if all that happens to it is casts to one dtype.

    To a smaller one: what is read as a smaller one is rounded already.
    """
    consumers = weight.consumers()
    casts = [op.outputs[0] for op in consumers if op.type == "Cast"]
    same = len({t.dtype for t in casts}) == 1
    is_all = same and len(casts) == len(consumers)
    is_smaller = is_all and casts[0].dtype.size < weight.dtype.size
    return casts if is_smaller else None


def _is_of_one_function(tensor: tf.Tensor) -> bool:
    """Says whether XLA knows what it is in the function alone that computed it.

    What a branch keeps for its gradient has no rows if the other one is taken;
    TensorFlow gives it a shape without rows where their number is not known.
    """
    is_of_branch = tensor.op.type.endswith(("Case", "If"))
    return tensor.dtype == tf.variant or (
        is_of_branch and bool(tensor.shape.rank) and 0 in tensor.shape
    )


# ------------------------------------------------------- a share of the bytes
def fewer_kept(
    needed: Sequence[tf.Tensor],
    free: Collection[Any],
    share: float,
    device_type: str = "CPU",
) -> list[tf.Tensor]:
    """Returns what to keep, so that all that is needed can be had from it.

    Args:
        needed: Tensors that the backward pass takes of the forward pass.
        free: References of tensors that are there in any case.
        share: Of the bytes of `needed`, how many may be kept. From 0 to 1.
        device_type: Such as "GPU": it says what is cheap.

    Returns:
        The tensors to keep; more bytes than allowed where loops, conditions and
        operations with state, which are not run again, make them.
    """
    allowed = share * sum(map(tensor_bytes, needed))
    wanted = [t for t in needed if t.ref() not in free]
    operations = internals.ancestors(
        wanted, lambda t: t.ref() in free or not _can_be_repeated(t.op)
    )
    taken = (t for op in operations.values() for t in op.inputs)
    tensors = {t.name: t for t in [*wanted, *taken] if t.ref() not in free}
    is_known = all(t.shape.is_fully_defined() for t in needed)
    start = _START if is_known else _START / LIKELY_ROWS
    work = [_work(op, start, device_type) for op in operations.values()]

    def cut(price: float) -> list[tf.Tensor]:
        """The tensors to keep at a price of work."""
        left: _Left = collections.defaultdict(dict)

        def add(a: Any, b: Any, limit: int) -> None:
            left[a][b] = limit
            left[b].setdefault(a, 0)

        # t' of the network is a tensor's name, t its reference.
        for t in wanted:
            add(_SOURCE, t.ref(), _UNLIMITED)
        for name, t in tensors.items():
            add(t.ref(), name, max(1, tensor_bytes(t)))
            maker = t.op.name if t.op.name in operations else _SINK
            add(name, maker, _UNLIMITED)
        # Equal layers are not equally dear: so some of them can be run again.
        rise = price * _RISE / (len(work) or 1)
        for j, op in enumerate(operations.values()):
            add(op.name, _SINK, round((price + rise * j) * work[j]))
            for t in op.inputs:
                if t.name in tensors:
                    add(op.name, t.ref(), _UNLIMITED)
        side = _side_of_source(left)
        return [
            t
            for name, t in tensors.items()
            if t.ref() in side and name not in side
        ]

    kept = cut(0.0)
    if sum(map(tensor_bytes, kept)) > allowed:
        return kept
    low, high = 0.0, float(2**10)
    # Prices of a byte of work in bytes kept, from 2 ** -10 to 2 ** 10.
    for _ in range(_STEPS):
        price = math.sqrt(max(low, 2**-10) * high)
        fewer = cut(price)
        if sum(map(tensor_bytes, fewer)) > allowed:
            high = price
        else:
            low, kept = price, fewer
    return kept


def _can_be_repeated(op: tf.Operation) -> bool:
    """Returns whether an operation gives the same again, and by itself.

    Not what takes a list, as of a loop: nobody knows the bytes of one.
    """
    kinds = {t.dtype for t in [*op.inputs, *op.outputs]}
    return not (
        op.op_def is None
        or op.op_def.is_stateful
        or op.type.startswith("Placeholder")
        or functions_of(op.node_def)
        or kinds & {tf.variant, tf.resource}
    )


def _work(op: tf.Operation, start: float, device_type: str) -> float:
    """What an operation takes, as the bytes that could be moved meanwhile."""
    if op.type in CHEAP:
        return 0.0
    moved = sum(map(tensor_bytes, {t.ref(): t for t in op.inputs}.values()))
    moved += sum(map(tensor_bytes, op.outputs))
    flops = operation_flops(op)
    if "Random" in op.type:
        flops *= _RANDOM_FLOPS
    rate = _CPU_FLOPS_A_BYTE if device_type == "CPU" else _FLOPS_A_BYTE
    return start + moved + flops / rate


# By the ends of an edge, how much may flow there besides.
_Left: TypeAlias = "collections.defaultdict[Any, dict[Any, int]]"


def _side_of_source(left: _Left) -> set[Any]:
    """The nodes before the minimum cut that is nearest to the source."""
    while True:
        before: dict[Any, Any] = {_SOURCE: None}
        waiting: list[Any] = [_SOURCE]
        for a in waiting:  # the shortest ways first
            new = [b for b, n in left[a].items() if n and b not in before]
            before.update(dict.fromkeys(new, a))
            waiting += new
        if _SINK not in before:
            return {*before}
        # Fills a way through each node before the sink.
        for last in [a for a in before if left[a].get(_SINK)]:
            way = [_SINK, last]
            while (node := before[way[-1]]) is not None:
                way.append(node)
            edges = [(a, b) for b, a in itertools.pairwise(way)]
            most = min(left[a][b] for a, b in edges)
            for a, b in edges:
                left[a][b] -= most
                left[b][a] += most
