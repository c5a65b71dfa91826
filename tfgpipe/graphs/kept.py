r"""Which tensors a cell keeps for its backward pass, where it may repeat some.

The backward pass takes some tensors of the forward pass. Each of them is kept,
or computed again from others, which are kept or computed again in turn; what a
cell takes, and its weights, are there in any case:

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

The price is the highest at which no more is kept than is allowed. Nothing in a
graph hangs on the order of its operations, so neither do the bits.

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
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.devices import tensor_bytes
from tfgpipe.graphs.cut import CHEAP, functions_of
from tfgpipe.graphs.flops import LIKELY_ROWS, operation_flops

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
        device_type: Such as "GPU": what is cheap hangs on it.

    Returns:
        The tensors to keep; more bytes than allowed where loops, conditions and
        operations with state, which are not run again, make them.
    """
    allowed = share * sum(map(tensor_bytes, needed))
    network = _Network(needed, free, device_type)
    kept = network.cut(0.0)
    if sum(map(tensor_bytes, kept)) > allowed:
        return kept
    low, high = 0.0, float(2**10)
    # Prices of a byte of work in bytes kept, from 2 ** -10 to 2 ** 10.
    for _ in range(_STEPS):
        price = math.sqrt(max(low, 2**-10) * high)
        found = network.cut(price)
        if sum(map(tensor_bytes, found)) > allowed:
            high = price
        else:
            low, kept = price, found
    return kept


def _can_be_repeated(op: tf.Operation) -> bool:
    """Returns whether an operation gives the same again, and by itself.

    Not what takes a list, as of a loop: nobody knows the bytes of one.
    """
    is_stateful = op.op_def is None or op.op_def.is_stateful
    return not (
        is_stateful
        or op.type.startswith("Placeholder")
        or functions_of(op.node_def)
        or any(
            t.dtype in (tf.variant, tf.resource)
            for t in [*op.inputs, *op.outputs]
        )
    )


def _work(op: tf.Operation, start: float, flops_a_byte: float) -> float:
    """What an operation takes, as the bytes that could be moved meanwhile."""
    if op.type in CHEAP:
        return 0.0
    moved = sum(map(tensor_bytes, {t.ref(): t for t in op.inputs}.values()))
    moved += sum(map(tensor_bytes, op.outputs))
    flops = operation_flops(op)
    if "Random" in op.type:
        flops *= _RANDOM_FLOPS
    return start + moved + flops / flops_a_byte


class _Network:
    """The network of the module, whose limits follow from a price."""

    def __init__(
        self,
        needed: Sequence[tf.Tensor],
        free: Collection[Any],
        device_type: str,
    ):
        self._tensors: list[tf.Tensor] = []
        self._work: list[float] = []
        #     nodes: 2 i and 2 i + 1 are t and t' of tensor i
        #            -1 - j is operation j
        self._edges: list[tuple[int, int]] = []
        self._stays: list[int] = []  # t' of what cannot be run again
        places: dict[Any, int] = {}
        ops: dict[str, int] = {}
        waiting: list[tf.Tensor] = []

        def place(tensor: tf.Tensor) -> int:
            ref = tensor.ref()
            if ref not in places:
                places[ref] = len(self._tensors)
                self._tensors.append(tensor)
                waiting.append(tensor)
            return places[ref]

        self._needed = [place(t) for t in needed if t.ref() not in free]
        is_known = all(t.shape.is_fully_defined() for t in needed)
        start = _START if is_known else _START / LIKELY_ROWS
        is_cpu = device_type == "CPU"
        flops_a_byte = _CPU_FLOPS_A_BYTE if is_cpu else _FLOPS_A_BYTE
        while waiting:
            tensor = waiting.pop()
            i, op = places[tensor.ref()], tensor.op
            if not _can_be_repeated(op):
                self._stays.append(2 * i + 1)
                continue
            if op.name not in ops:
                ops[op.name] = len(self._work)
                self._work.append(_work(op, start, flops_a_byte))
                self._edges += [
                    (-1 - ops[op.name], 2 * place(t))
                    for t in op.inputs
                    if t.ref() not in free
                ]
            self._edges.append((2 * i + 1, -1 - ops[op.name]))

    def cut(self, price: float) -> list[tf.Tensor]:
        """The tensors to keep at a price of work."""
        flow = _Flow()
        for i in self._needed:
            flow.add("source", 2 * i, _UNLIMITED)
        for i, tensor in enumerate(self._tensors):
            flow.add(2 * i, 2 * i + 1, max(1, tensor_bytes(tensor)))
        # Equal layers are not equally dear: so some of them can be run again.
        rise = price * _RISE / (len(self._work) or 1)
        for j, work in enumerate(self._work):
            flow.add(-1 - j, "sink", round((price + rise * j) * work))
        for a, b in self._edges:
            flow.add(a, b, _UNLIMITED)
        for node in self._stays:
            flow.add(node, "sink", _UNLIMITED)
        side = flow.side_of_source()
        return [
            tensor
            for i, tensor in enumerate(self._tensors)
            if 2 * i in side and 2 * i + 1 not in side
        ]


class _Flow:
    """A maximum flow, by shortest paths of one length at a time (Dinic)."""

    def __init__(self) -> None:
        self._left: dict[Any, dict[Any, int]] = collections.defaultdict(dict)

    def add(self, a: Any, b: Any, limit: int) -> None:
        """Adds an edge; several between two nodes are one."""
        if limit:
            self._left[a][b] = self._left[a].get(b, 0) + limit
            self._left[b].setdefault(a, 0)

    def side_of_source(self) -> set[Any]:
        """The nodes before the cut that is nearest to the source."""
        while True:
            depth = self._depths()
            if "sink" not in depth:
                return {*depth}
            self._fill(depth)

    def _depths(self) -> dict[Any, int]:
        depth = {"source": 0}
        waiting = collections.deque(["source"])
        while waiting:
            a = waiting.popleft()
            for b, left in self._left[a].items():
                if left and b not in depth:
                    depth[b] = depth[a] + 1
                    waiting.append(b)
        return depth

    def _fill(self, depth: dict[Any, int]) -> None:
        """Fills all paths along which the depth grows."""
        left = self._left
        ahead = {
            a: [b for b in edges if depth.get(b, -1) == depth[a] + 1]
            for a, edges in left.items()
            if a in depth
        }
        path = ["source"]
        while path:
            a = path[-1]
            if a == "sink":
                pairs = [*itertools.pairwise(path)]
                most = min(left[x][y] for x, y in pairs)
                for x, y in pairs:
                    left[x][y] -= most
                    left[y][x] += most
                full = next(
                    i for i, (x, y) in enumerate(pairs) if not left[x][y]
                )
                del path[full + 1 :]
                continue
            while ahead[a] and not left[a][ahead[a][-1]]:
                ahead[a].pop()
            if ahead[a]:
                path.append(ahead[a][-1])
            else:
                path.pop()
                if path:
                    ahead[path[-1]].pop()
