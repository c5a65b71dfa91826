"""What the backward pass of consecutive layers takes of their forward pass.

Each layer says which tensors its gradient reads, and through which tensors
gradients go. Of layers in a row follows what a program has to know of a cell:

    x ---> Dense ---> h ---> Flatten ---> f ---> Dense ---> y
           reads x          reads nothing        reads f

    a cell of the last two    keeps nothing: f follows from h, which is there
    a cell of all three       keeps h: so there is something to recompute

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_NONE: frozenset[int] = frozenset()


class Out(NamedTuple):
    """How a tensor that is alive behind a layer came to be.

    Attributes:
        is_made: Whether the layer made it; else it goes by.
        follows: The inputs, by position, from which it follows at no cost, as
            the result of a reshape; None if there is something to compute.
        passes: The inputs that have a gradient if it has one.
        trains: Whether weights of the layer then have one.
    """

    is_made: bool = True
    follows: frozenset[int] | None = None
    passes: frozenset[int] = frozenset({0})
    trains: bool = True


class Reads(NamedTuple):
    """What a gradient reads of the forward pass, other than weights.

    Attributes:
        inputs: What follows from these inputs at no cost.
        others: Whether anything else.
    """

    inputs: frozenset[int] = _NONE
    others: bool = False


class GradientPath(NamedTuple):
    """What the gradient of a layer takes; by default one tensor, and all.

    Attributes:
        num_inputs: How many tensors are alive before the layer.
        outs: Those that are alive behind it.
        reads: What gradients with respect to inputs and weights read.
        weights_read: What those with respect to weights alone read.
    """

    num_inputs: int = 1
    outs: tuple[Out, ...] = (Out(),)
    reads: Reads = Reads(others=True)
    weights_read: Reads = Reads(others=True)

    def among(
        self, num_live: int, uses: Sequence[int], gives: Sequence[int]
    ) -> GradientPath:
        """The same for a layer that takes, by position, some of what is alive.

        `gives` is what is alive behind it: of what was before, the position; of
        what the layer makes, -1, -2 and so on.
        """

        def taken(inputs: frozenset[int]) -> frozenset[int]:
            return frozenset(uses[i] for i in inputs)

        def out(place: int) -> Out:
            if place >= 0:
                by = frozenset({place})
                return Out(False, by, by, False)
            found = self.outs[-place - 1]
            follows = None if found.follows is None else taken(found.follows)
            return found._replace(follows=follows, passes=taken(found.passes))

        return GradientPath(
            num_live,
            tuple(map(out, gives)),
            self.reads._replace(inputs=taken(self.reads.inputs)),
            self.weights_read._replace(inputs=taken(self.weights_read.inputs)),
        )


class GradientPaths:
    """The gradients of layers in a row."""

    def __init__(self, paths: Sequence[GradientPath]):
        self._paths = paths
        self._known: dict[tuple[int, int], bool] = {}
        # Which tensors have a gradient, before each layer and behind the last.
        has = frozenset(range(len(paths[-1].outs))) if paths else _NONE
        self._has = [has]
        for path in reversed(paths):
            has = _NONE.union(*(path.outs[o].passes for o in has))
            self._has.append(has)
        self._has.reverse()
        # Which follow from weights: a gradient by others is not computed.
        self._leads = [_NONE]
        for path in paths:
            before = self._leads[-1]
            self._leads.append(
                frozenset(
                    o
                    for o, out in enumerate(path.outs)
                    if (out.is_made and out.trains) or out.passes & before
                )
            )

    def has_dx(self, start: int, stop: int) -> bool:
        """Whether a cell of some layers has a gradient for what is before it.

        What only goes by has none there: gradients go straight to its maker.
        """
        before = self._leads[start]
        for path, has in zip(self._paths[start:stop], self._has[start + 1 :]):
            outs = [*enumerate(path.outs)]
            if any(
                o in has and out.passes & before
                for o, out in outs
                if out.is_made
            ):
                return True
            before = frozenset(
                o for o, out in outs if not out.is_made and out.passes & before
            )
        return False

    def keeps(self, start: int, stop: int) -> bool:
        """Whether a cell of some layers keeps what its backward pass reads.

        Its inputs, and what follows from them at no cost, do not count.
        """
        key = start, stop
        if key not in self._known:
            self._known[key] = self._keeps(*key)
        return self._known[key]

    def _keeps(self, start: int, stop: int) -> bool:
        # Of what is alive, layer after layer:
        #
        #     there           the cell's inputs, and what follows at no cost
        #     with_gradient   what the backward pass of the cell goes through
        there = with_gradient = frozenset(range(self._paths[start].num_inputs))
        for path, has in zip(self._paths[start:stop], self._has[start + 1 :]):
            made = [path.outs[o] for o in has if path.outs[o].is_made]
            reads = Reads()
            if any(out.passes & with_gradient for out in made):
                reads = path.reads
            elif any(out.trains for out in made):
                reads = path.weights_read
            if reads.others or not reads.inputs <= there:
                return True
            outs = [*enumerate(path.outs)]
            there = frozenset(
                o
                for o, out in outs
                if out.follows is not None and out.follows <= there
            )
            with_gradient = frozenset(
                o for o, out in outs if out.trains or out.passes & with_gradient
            )
        return False
