"""What crosses from function to function where a cell's graph is cut.

The backward pass takes some tensors of the forward pass: they are *kept*. What
they follow from cheaply is repeated instead; in a cell that may keep a share of
them, more is, see `kept.py`. Where the backward pass itself is cut into the
gradients of inputs and of weights, some more cross:

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
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.devices import tensor_bytes
from tfgpipe.graphs.bundle import Bundle, tensors
from tfgpipe.graphs.cut import (
    GraphCutter,
    StagedFunction,
    Subfunction,
    sums_over_replicas,
)
from tfgpipe.graphs.gradient_sums import Replacement
from tfgpipe.graphs.kept import fewer_kept
from tfgpipe.graphs.parts import Part
from tfgpipe.graphs.turns import out_of_turn
from tfgpipe.graphs.xla import NotCompilable


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
        totals: What of the forward pass is added up over replicas.
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
        self._functions: dict[Hashable, Any] = {}
        self.totals = sums_over_replicas(part.operations)
        weights = [use.tensor for use in part.uses]
        self.weights = self._bundle([only_cast(w) or [w] for w in weights])
        others = [*part.forward_inputs, *part.gradient_inputs]
        self._at_hand = [*others, self.weights]
        at_hand = [*others, *self.weights.aliases, *self.totals]
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
        if share < 1:
            free = {t.ref() for t in at_hand} | set(self._graph.captures)
            fewer = fewer_kept(kept, free, share, device_types[0])
        else:
            fewer = kept
        self.kept = Bundle(fewer, self._together and not is_sent)
        self.kept_share = sum(map(tensor_bytes, fewer)) / max(needed, 1)
        # What of the forward pass is not kept, each half computes again.
        self.crossing = self._bundle(
            self._graph.entering(whole - half, dw, [*at_hand, *kept])
        )
        dense = [d for d in part.dw if d.dense is not None]
        self.sums = self._bundle([d.dense for d in dense])
        self.sums.begins = options.begins_sums
        self.sums.maxima = {
            i for i, d in enumerate(dense) if isinstance(d, Replacement)
        }

    def _bundle(self, found: Sequence[Any]) -> Bundle:
        return Bundle(found, self._together)

    @property
    def recomputes_in_backward(self) -> bool:
        """Tells whether the backward pass computes again what it needs itself.

        XLA cannot hand the state of loops from function to function.
        """
        return self.options.jit_compile

    @property
    def can_be_split(self) -> bool:
        """Says whether the two halves of the backward pass may be functions."""
        between = [*self.kept.tensors, *self.crossing.tensors]
        has_lists = any(t.dtype == tf.variant for t in between)
        return not (self.recomputes_in_backward and has_lists)

    def function(
        self,
        key: Any,
        inputs: Sequence[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        sums: Bundle | None = None,
        with_effects: bool = False,
    ) -> Subfunction | StagedFunction:
        """A function of the arguments; in stages where it waits for replicas.

        Asked for again by the same `key`, it is the same one. `with_effects` if
        it has the layers' side effects; `sums` as for `GraphCutter.function`.
        """
        if key not in self._functions:
            make: Any = StagedFunction if self.totals else GraphCutter.function
            self._functions[key] = make(
                self._graph,
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
        made = [*others, *self.totals, *self.kept.tensors]
        # Sizes are kept by operations of the backward pass.
        sizes = [t.op for t in made if t.op.name not in forward]
        made += [t for op in sizes for t in op.inputs]
        done = self._graph.needed(made, forward)
        own = self._graph.needed(fetches, forward) - done
        at_hand = [*self.part.forward_inputs, *self.weights.aliases]
        return self._graph.entering(own, fetches, at_hand)

    def of_forward(self, fetches: Sequence[tf.Tensor]) -> Subfunction:
        """The function that computes tensors of the forward pass alone."""
        key = tuple(t.ref() for t in fetches)
        with out_of_turn():
            function = self.function(key, [], fetches)
            return (
                function.whole
                if isinstance(function, StagedFunction)
                else function
            )

    def check_kept(self) -> None:
        """Refuses to keep what XLA cannot hand from function to function.

        Raises:
            NotCompilable: With the layers that keep it.
        """
        if not self.options.jit_compile:
            return
        traced, places = self.part.traced, self.part.whole.places
        kept = [t for t in self.kept.tensors if _is_of_one_function(t)]
        found = {traced.section_of(places[t.op.name]).name: None for t in kept}
        if found:
            raise NotCompilable(
                f"layers {[*found]}",
                "they keep for their gradients (in a loop: a TensorList; in a "
                "condition: a tensor of one branch) what XLA cannot hand to "
                'another function. Pass remat="always" to `GPipe`',
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
    is_of_branch = tensor.op.type in {
        "Case",
        "If",
        "StatelessCase",
        "StatelessIf",
    }
    return tensor.dtype == tf.variant or (
        is_of_branch and bool(tensor.shape.rank) and 0 in tensor.shape
    )
