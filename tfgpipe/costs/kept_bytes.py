"""How many bytes a layer keeps of its forward pass for its backward pass.

Its part of the model's graph, see `placed.py`, is asked for gradients. What the
operations that this adds read of those that were there before has to be kept:

    x ----> forward operations ----> y
              |  kept: what these hand down
              v
    dx <--- backward operations <--- dy
              |  crossing: what the gradients of inputs hand to those of weights
              v
             dw

What else is there while they run is found by letting tensors die after their
last reader, in the order of the graph.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe.costs.gradient_path import GradientPath, Out, Reads
from tfgpipe.costs.placed import PlacedStep
from tfgpipe.devices import placement
from tfgpipe.graphs import CHEAP, Part, only_cast

# Operations that hand on the memory of their first input.
_ALIASES = {"ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient"}

# Operations that write over an input that nothing else reads.
_IN_PLACE = {
    "AddN",
    "AddV2",
    "Cast",
    "Exp",
    "Mul",
    "Neg",
    "RealDiv",
    "Relu",
    "ReluGrad",
    "Rsqrt",
    "Softmax",
    "Sqrt",
    "Square",
    "Sub",
    "Tanh",
    "TanhGrad",
}


class KeptBytes(NamedTuple):
    """Bytes that the tasks of a layer keep, and need while they run.

    Of inputs of known sizes they are numbers; of any number of rows, `Bytes`.
    Two layers in a row may both keep the tensor between them: it is one.
    Weights and constants do not count.

    Attributes:
        inputs: Kept of the layer's inputs, from its forward pass.
        outputs: Of its outputs.
        others: Of all else.
        crossing: Kept from the gradients of inputs to those of weights.
        sparse: Slices of gradients that are not added up, but kept.
        forward: Needed at most while the forward pass runs, with outputs.
        backward: Needed at most, beside what is kept, while the backward pass
            runs, with the gradients of outputs and inputs.
        path: Which of it is of which tensor.
    """

    inputs: Any
    outputs: Any
    others: Any
    crossing: Any
    sparse: Any
    forward: Any
    backward: Any
    path: GradientPath = GradientPath()


def kept_bytes(part: Part) -> KeptBytes:
    """What a part of a model's graph keeps, and needs; sizes are all known.

    All that it makes, where TensorFlow cannot differentiate it by itself.
    """
    sources = [use.tensor for use in part.uses]
    try:
        with part.traced.graph.as_default():
            return _kept(part, sources, [*sources, *part.state], part.inputs)
    except Exception:  # no training fails for what it costs
        made = [t for op in part.operations for t in op.outputs]
        size = sum(map(tensor_bytes, made))
        return KeptBytes(0, 0, size, 0, 0, size, size)


def _kept(
    part: Part, sources: list[Any], weights: list[Any], given: list[Any]
) -> KeptBytes:
    """As `kept_bytes`.

    `sources` are the trainable ones of the `weights`; `given` the inputs.
    """
    graph, outputs, forward = part.traced.graph, part.gives, part.operations
    memory = _Memory(forward)
    needed = memory.peak(forward, {w.ref() for w in weights}, outputs, given)
    targets = [t for t in outputs if t.dtype.is_floating]
    floats = [t for t in [*sources, *given] if t.dtype.is_floating]
    if not (targets and floats):
        path = LayerGradient(given, weights).path(outputs, [], Reads(), Reads())
        return KeptBytes(0, 0, 0, 0, 0, needed, 0, path)
    before = graph.num_operations()
    dy = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in targets]
    found = tf.gradients(targets, floats, dy, stop_gradients=floats)
    dw, dx = found[: len(sources)], found[len(sources) :]
    sparse = [g for g in dw if isinstance(g, tf.IndexedSlices)]
    by_weight, by_input = _flat(dw), _flat(dx)
    backward = graph.get_operations()[before:]
    own = set(backward)
    memory = _Memory([*forward, *backward])
    gradient = LayerGradient(given, weights)
    free = gradient.free
    read = _boundary([*by_weight, *by_input], own)
    kept = {
        ref
        for ref in memory.owners(read) - free
        if ref.deref().op.type != "Const"
    }
    # A byte counts once: as an input's, an output's, or neither's.
    first = memory.owners(given)
    last = memory.owners(outputs) - first
    # What the gradients of inputs make is there before those of weights are.
    made = _ancestors(by_input, own)
    late = [t for t in _boundary(by_weight, own - made) if t.op in own]
    crossing = memory.owners(late)
    dead = free | kept | memory.owners(by_weight)
    # TensorFlow computes the gradients of weights as soon as it can, or later.
    late_by = round(_bytes(crossing) / 2)
    path = gradient.path(
        outputs,
        one_by_one(targets, sources, given, (dw, dx)),
        gradient.reads(read),
        gradient.reads(_boundary(by_weight, own)),
    )
    return KeptBytes(
        _bytes(kept & first),
        _bytes(kept & last),
        _bytes(kept - first - last),
        _bytes(crossing) if by_input else 0,
        _bytes(memory.owners(_flat(sparse))),
        needed,
        memory.peak(backward, dead, by_input) + late_by,
        path,
    )


def _flat(gradients: list[Any]) -> list[tf.Tensor]:
    """The tensors of gradients; those of embeddings have several."""
    return tf.nest.flatten(
        [g for g in gradients if g is not None], expand_composites=True
    )


def _ancestors(tensors: list[Any], within: set[Any]) -> set[Any]:
    """The operations that some tensors need, among these."""
    found: set[Any] = set()
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        op = waiting.pop()
        if op in within and op not in found:
            found.add(op)
            waiting += [t.op for t in op.inputs]
    return found


def _boundary(tensors: list[Any], within: set[Any]) -> list[Any]:
    """What the operations that some tensors need, among these, read of others.

    Also the tensors themselves that others make.
    """
    ops = _ancestors(tensors, within)
    read = [t for op in ops for t in op.inputs]
    return [t for t in [*read, *tensors] if t.op not in ops]


class _Memory:
    """What memory tensors have, which some operations make."""

    def __init__(self, operations: Iterable[tf.Operation]):
        self._own = {*operations}

    def owners(self, tensors: Iterable[Any]) -> set[Any]:
        """References of the tensors whose memory some have."""
        return {self._owner(tensor).ref() for tensor in tensors}

    def _owner(self, tensor: Any) -> Any:
        while tensor.op.type in _ALIASES and tensor.op in self._own:
            tensor = tensor.op.inputs[0]
        return tensor

    def peak(
        self,
        ops: Sequence[Any],
        free: set[Any],
        results: Iterable[Any],
        given: Collection[Any] = (),
    ) -> int:
        """Bytes that are there at most, if operations run in this order.

        A tensor is there until its last reader has run; one that has the size
        of an input that dies takes its place. `free` are references of tensors
        that do not count; `results` stay; `given` are there before.
        """
        inside = {t.ref() for op in ops for t in op.outputs}
        inside |= {t.ref() for t in given}
        readers: collections.Counter[Any] = collections.Counter()
        for op in ops:
            readers.update(self.owners(op.inputs))
        readers.update(self.owners(results))
        now = most = sum(map(tensor_bytes, given))
        for op in ops:
            read = self.owners(op.inputs)
            readers.subtract(read)
            dead = [
                tensor_bytes(r.deref())
                for r in (read - free) & inside
                if not readers[r]
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


def tensor_bytes(tensor: Any) -> int:
    """Bytes; those of the largest input where the size is unknown."""
    if tensor.shape.is_fully_defined():
        return placement.num_bytes(tensor)
    known = [t for t in tensor.op.inputs if t.shape.is_fully_defined()]
    return max(map(placement.num_bytes, known), default=0)


def _bytes(references: Iterable[Any]) -> int:
    return sum(tensor_bytes(ref.deref()) for ref in references)


class LayerGradient:
    """Follows tensors of a layer's graph back to its inputs."""

    def __init__(self, given: Sequence[Any], weights: Sequence[Any]):
        graph = tf.compat.v1.get_default_graph()
        self._num_inputs = len(given)
        self.free = {inner.ref() for _, inner in graph.captures}
        for weight in weights:
            casts = only_cast(weight) or []
            self.free |= {t.ref() for t in [weight, *casts]}
        self._known: dict[Any, frozenset[int] | None] = {
            ref: frozenset() for ref in self.free
        }
        self._known |= {t.ref(): frozenset({i}) for i, t in enumerate(given)}

    def follows(self, tensor: Any) -> frozenset[int] | None:
        """The inputs from which a tensor follows at no cost, or None.

        A cell takes the same for at hand: see `graphs/cut.py`.
        """
        ref = tensor.ref()
        if ref not in self._known:
            found = None
            if tensor.op.type in CHEAP:
                found = _joined(self.follows(t) for t in tensor.op.inputs)
            self._known[ref] = found
        return self._known[ref]

    def reads(self, taken: Iterable[Any]) -> Reads:
        """From which inputs the tensors follow that a gradient takes."""
        found = [self.follows(t) for t in taken]
        known = [own for own in found if own is not None]
        return Reads(frozenset().union(*known), len(known) < len(found))

    def path(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[tuple[Any, Sequence[Any], Sequence[Any]]],
        reads: Reads,
        weights_read: Reads,
    ) -> GradientPath:
        """What all this comes to.

        `gradients` are some of the outputs, each with its gradients with
        respect to weights and to inputs, None where there is none.
        """
        of = {t.ref(): (dw, dx) for t, dw, dx in gradients}
        outs = []
        for tensor in outputs:
            dw, dx = of.get(tensor.ref(), ((), ()))
            passes = (i for i, d in enumerate(dx) if d is not None)
            trains = any(d is not None for d in dw)
            follows = self.follows(tensor)
            outs.append(Out(True, follows, frozenset(passes), trains))
        return GradientPath(self._num_inputs, tuple(outs), reads, weights_read)


def _joined(found: Iterable[frozenset[int] | None]) -> frozenset[int] | None:
    """All of them; None if one is."""
    known = []
    for own in found:
        if own is None:
            return None
        known.append(own)
    return frozenset().union(*known)


def one_by_one(
    targets: list[Any],
    sources: list[Any],
    given: list[Any],
    found: tuple[list[Any], list[Any]],
) -> list[tuple[Any, list[Any], list[Any]]]:
    """Each output with its gradients with respect to weights and inputs.

    `found` are those of all outputs together, with respect to weights and
    continuous inputs; `sources` are the trainable weights.
    """

    def spread(dx: list[Any]) -> list[Any]:
        left = iter(dx)
        return [next(left) if t.dtype.is_floating else None for t in given]

    if len(targets) == 1:
        return [(targets[0], found[0], spread(found[1]))]
    # Of which outputs a gradient is shows only if each is differentiated.
    floats = [t for t in [*sources, *given] if t.dtype.is_floating]
    count = len(sources)
    each = [
        (t, tf.gradients(t, floats, stop_gradients=floats)) for t in targets
    ]
    return [(t, own[:count], spread(own[count:])) for t, own in each]


def among_live(path: GradientPath, call: PlacedStep) -> GradientPath:
    """What a layer's gradient takes, of all that is alive before it."""
    place = {t.ref(): i for i, t in enumerate(call.live)}
    made = {t.ref(): -1 - i for i, t in enumerate(call.part.gives)}
    uses = [place[t.ref()] for t in call.part.inputs]
    gives = [(place | made)[t.ref()] for t in call.behind]
    return path.among(len(call.live), uses, gives)
