"""Activations: what backward passes take of the forward pass, step by step.

The graph of a model is differentiated, and the part of each step is asked what
its backward pass takes, as a cell's is, see `graphs/cell_functions.py`:

    steps             embed | dense | dense | head
    h, of embed               taken     taken           first by the next step
    g, of a dense             taken                     first by the same step

So it is known of any steps in a row what they keep as a cell: all that one of
them makes, and one of them is the first to take. What they take of steps before
them is not kept, but there, as their inputs.

What else is there while a step runs is found by letting tensors die after their
last reader, in the order of the graph.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.costs.sizes import Activation, StepMemory
from tfgpipe.devices import placement
from tfgpipe.graphs import (
    CHEAP,
    GraphCutter,
    Part,
    is_continuous,
    only_cast,
    tensors,
)

# Operations that hand on the memory of their first input.
_ALIASES = {"ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient"}

# Operations that write over an input that nothing else reads.
_IN_PLACE = set(
    "AddN AddV2 Cast Exp Mul Neg RealDiv Relu ReluGrad Rsqrt Softmax Sqrt "
    "Square Sub Tanh TanhGrad".split()
)


def memory_of_steps(parts: Sequence[Part]) -> list[StepMemory]:
    """Returns what each step keeps and needs, for the rows of the graph."""
    taken = [_taken(part) for part in parts]
    traced, count = parts[0].traced, len(parts)
    takers: dict[Any, list[int]] = collections.defaultdict(list)
    for k, (activations, _) in enumerate(taken):
        for ref in activations:
            takers[ref].append(k)
    makers = {t.ref(): -1 for t in [*traced.x, *traced.labels] if t is not None}

    def maker(tensor: tf.Tensor) -> int:
        """Returns the last step from which a tensor does not follow cheaply."""
        ref = tensor.ref()
        if ref not in makers:
            place = traced.cell_of(traced.places[tensor.op.name])
            if tensor.op.type in CHEAP:
                place = max(map(maker, tensor.op.inputs), default=-1)
            makers[ref] = place
        return makers[ref]

    inputs: list[list[Activation]] = [[] for _ in parts]
    made_by: list[list[Activation]] = [[] for _ in parts]
    # The loss is taken to keep the outputs, or as much that it makes of them.
    for tensor in filter(is_continuous, traced.handed_out):
        if maker(_owner(tensor)) == count - 1:
            takers[_owner(tensor).ref()].append(count)
        else:
            made_by[-1].append(Activation(1, tensor_bytes(tensor)))
    for ref, steps in takers.items():
        tensor = ref.deref()
        first, size = maker(tensor), tensor_bytes(tensor)
        if first >= 0:
            made_by[first].append(Activation(max(steps[0] - first, 0), size))
        for k in range(first + 1, min(steps[-1] + 1, count)):
            by = steps[bisect.bisect_left(steps, k)] - k
            inputs[k].append(Activation(by, size))
    makes_gradient = {
        t.ref(): part.index for part in parts for t in part.gradient_outputs
    }
    reaches = [0] * count
    for part in parts:
        for tensor in part.gradient_inputs:
            k = makes_gradient.get(tensor.ref(), part.index)
            reaches[k] = max(reaches[k], k - part.index)
    return [
        StepMemory(tuple(before), tuple(made), *sizes, reach)
        for before, made, (_, sizes), reach in zip(
            inputs, made_by, taken, reaches
        )
    ]


def kept_sizes(steps: Sequence[StepMemory]) -> list[list[Any]]:
    """Returns the sizes of what each step makes, and some step takes.

    What the model itself takes is in the first list, what the loss alone takes
    in none.
    """
    by_step = [step.made for step in steps]
    by_step[0] += steps[0].inputs
    count = len(steps)
    return [
        [tensor.size for tensor in of_step if k + tensor.by < count]
        for k, of_step in enumerate(by_step)
    ]


def _taken(part: Part) -> tuple[list[Any], tuple[int, int, int, int]]:
    """Returns the tensors that the backward pass of a step takes.

    References of tensors of the forward pass; then `crossing`, `sparse`,
    `forward` and `backward`, see `StepMemory`.
    """
    dx, dw = part.gradient_outputs, tensors(part.dw)
    cut = GraphCutter(
        part.whole, part.forward | part.backward, {}, "CPU", part.backward
    )
    weights = [use.tensor for use in part.uses]
    casts = [t for weight in weights for t in only_cast(weight) or ()]
    free = [*weights, *casts, *part.state]
    whole = cut.needed([*dx, *dw], part.backward)
    entering = [
        t
        for t in cut.entering(whole, [*dx, *dw], free)
        if part.whole.places[t.op.name] < len(part.traced.operations)
    ]
    activations = [*dict.fromkeys(_owner(t).ref() for t in entering)]
    uncounted = {t.ref() for t in free} | {*part.whole.captures}
    needed = _peak(
        part.operations, uncounted, part.forward_outputs, part.inputs
    )
    half = cut.needed(dx, part.backward)
    at_hand = [*free, *part.forward_inputs, *entering]
    late = cut.entering(whole - half, dw, at_hand)
    crossing = _bytes(_owners(late)) if dx else 0
    slices = [t for d in part.dw for t in tensors([*d.slices.values()])]
    places = sorted(part.whole.places[name] for name in part.backward)
    backward = [part.whole.operations[i] for i in places]
    uncounted |= {*activations} | _owners(dw)
    # TensorFlow computes the gradients of weights as soon as it can, or later.
    most = _peak(backward, uncounted, dx, part.gradient_inputs)
    most += round(crossing / 2)
    return activations, (crossing, _bytes(_owners(slices)), needed, most)


def _owner(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory a tensor has."""
    while tensor.op.type in _ALIASES:
        tensor = tensor.op.inputs[0]
    return tensor


def _owners(some: Iterable[tf.Tensor]) -> set[Any]:
    """Returns references of the tensors whose memory some have."""
    return {_owner(tensor).ref() for tensor in some}


def _peak(
    operations: Sequence[tf.Operation],
    free: Collection[Any],
    results: Iterable[tf.Tensor],
    inputs: Sequence[tf.Tensor],
) -> int:
    """Returns the bytes there are at most, if operations run in this order.

    A tensor is there until its last reader has run; one that has the size of an
    input that dies takes its place. `free` are references of tensors that do
    not count; `results` stay; `inputs` are there before.
    """
    inside = {t.ref() for op in operations for t in op.outputs}
    inside |= _owners(inputs)
    readers: collections.Counter[Any] = collections.Counter()
    for op in operations:
        readers.update(_owners(op.inputs))
    readers.update(_owners(results))
    now = most = sum(map(tensor_bytes, inputs))
    for op in operations:
        read = _owners(op.inputs)
        readers.subtract(read)
        dead = [
            tensor_bytes(ref.deref())
            for ref in (read - {*free}) & inside
            if not readers[ref]
        ]
        is_new = op.type not in _ALIASES and op.type != "Const"
        new = [t for t in op.outputs if is_new and t.ref() not in free]
        sizes = [tensor_bytes(t) for t in new]
        if op.type in _IN_PLACE and sizes[:1] and sizes[0] in dead:
            dead.remove(sizes[0])
            now -= sizes[0]
        now += sum(sizes)
        most = max(most, now)
        now -= sum(dead)
        now -= sum(n for t, n in zip(new, sizes) if not readers[t.ref()])
    return most


def tensor_bytes(tensor: tf.Tensor) -> int:
    """Returns its bytes; if they are unknown, its largest input's."""
    if tensor.shape.is_fully_defined():
        return placement.tensor_bytes(tensor)
    known = [t for t in tensor.op.inputs if t.shape.is_fully_defined()]
    return max(map(placement.tensor_bytes, known), default=0)


def _bytes(references: Iterable[Any]) -> int:
    return sum(tensor_bytes(ref.deref()) for ref in references)
