"""Which tensors the gradient of a layer takes, read from its graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells import CHEAP, Live, only_cast
from tfgpipe.planning.gradient_path import GradientPath, Out, Reads


class LayerGradient:
    """Follows tensors of a layer's graph back to its inputs.

    Args:
        given: The layer's inputs, in the current graph.
        weights: All its weights there.
    """

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

        A cell takes the same for at hand: see `cells/subgraph.py`.
        """
        ref = tensor.ref()
        if ref not in self._known:
            found = None
            if tensor.op.type in CHEAP:
                found = _joined(self.follows(t) for t in tensor.op.inputs)
            self._known[ref] = found
        return self._known[ref]

    def reads(self, taken: Iterable[Any]) -> Reads:
        """What tensors that a gradient takes are of."""
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

        Args:
            outputs: What the layer returned.
            gradients: Some of them, each with its gradients with respect to
                weights and to inputs, None where there is none.
            reads: What gradients take.
            weights_read: What those with respect to weights alone take.
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

    Args:
        targets: The outputs.
        sources: The trainable weights.
        given: The inputs.
        found: The gradients of all outputs, with respect to weights and
            continuous inputs.
    """

    def spread(dx: list[Any]) -> list[Any]:
        left = iter(dx)
        return [next(left) if t.dtype.is_floating else None for t in given]

    if len(targets) == 1:
        return [(targets[0], found[0], spread(found[1]))]
    floats = [t for t in [*sources, *given] if t.dtype.is_floating]
    count = len(sources)
    each = [(t, tf.gradients(t, floats)) for t in targets]
    return [(t, own[:count], spread(own[count:])) for t, own in each]


def among_live(
    path: GradientPath, step: Any, live: Sequence[Any]
) -> GradientPath:
    """What a layer's gradient takes, of all that is alive before it.

    Args:
        path: What it takes of the layer's inputs.
        step: The `cells.GraphStep` that calls it on some of what is alive;
            None for a layer that is called on all.
        live: What is alive.
    """
    if step is None:
        return path
    gives = [
        leaf.index if isinstance(leaf, Live) else -1 - leaf.index
        for leaf in tf.nest.flatten(step.gives)
    ]
    return path.among(len(live), sorted(step.uses), gives)
