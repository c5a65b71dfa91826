"""What the tasks of consecutive layers take, of what those of each take.

`schedule="auto"`, `Profile.task_seconds` and the planner ask here, so that they
cannot differ.

Pure Python: nothing here knows TensorFlow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MEASURED = (
    "forward",
    "recompute",
    "recompute_last",
    "backward",
    "input_gradient",
    "weight_gradient",
    "backward_first",
)


class LayerSeconds(NamedTuple):
    """Seconds of a layer's tasks, for one micro-batch; those of `MEASURED`.

    Attributes:
        has_halves: Whether its tasks can be cut. Those of loops that XLA
            compiles cannot: they recompute what they need by themselves.
        forward: Its outputs.
        recompute: What its backward pass needs, again, and its outputs.
        recompute_last: The same without outputs, as the last layer of a cell;
            of the last layer of all, behind which the loss takes them, with.
        backward: The gradients of its inputs and weights.
        input_gradient: Those of its inputs alone.
        weight_gradient: Those of its weights, after that.
        backward_first: As `backward`, with no sums to add gradients to.
    """

    has_halves: bool
    forward: float
    recompute: float
    recompute_last: float
    backward: float
    input_gradient: float
    weight_gradient: float
    backward_first: float


class CellSeconds:
    """Seconds of the tasks of layers i to j, in constant time.

    Args:
        layers: Those of each layer.
        are_trained: Whether each has weights that are trained.
        task_seconds: What a task takes besides its layers.

    Attributes:
        first: Index of the first layer that is trained.
    """

    def __init__(
        self,
        layers: Sequence[LayerSeconds],
        are_trained: Iterable[bool],
        task_seconds: float,
    ):
        trained = (i for i, is_trained in enumerate(are_trained) if is_trained)
        self.first = next(trained, len(layers))
        self._task_seconds = task_seconds
        self._sums = {
            kind: _sums(self._asked(i, kind, s) for i, s in enumerate(layers))
            for kind in MEASURED
        }
        self._whole = _sums(not own.has_halves for own in layers)

    def of(self, start: int, stop: int) -> dict[str, float]:
        """Seconds of each task of layers `start` to before `stop`.

        0.0 for a task that has nothing to compute.
        """
        found = {
            kind: sums[stop] - sums[start] for kind, sums in self._sums.items()
        }
        before, last = self._sums["recompute"], self._sums["recompute_last"]
        found["recompute"] = (
            before[stop - 1] - before[start] + last[stop] - last[stop - 1]
        )
        return {
            kind: seconds + self._task_seconds if seconds else 0.0
            for kind, seconds in found.items()
        }

    def costs(self) -> list[float]:
        """Seconds of each layer's passes, for the cut."""
        passes = [self._sums[kind] for kind in ("forward", "backward")]
        return [
            sum(own[i + 1] - own[i] for own in passes)
            for i in range(len(passes[0]) - 1)
        ]

    def has_halves(self, start: int, stop: int) -> bool:
        """Whether the backward pass of these layers can be cut."""
        return self._whole[stop] == self._whole[start]

    def _asked(self, i: int, kind: str, seconds: LayerSeconds) -> float:
        """Seconds of layer i; without gradients that nothing asks for."""
        own = getattr(seconds, kind)
        if i > self.first or kind == "forward":
            return own
        if i < self.first or kind == "input_gradient":
            return 0.0
        if kind in ("backward", "backward_first"):  # no gradient of its inputs
            other = seconds.backward - seconds.weight_gradient
            return own - max(0.0, other)
        return own


def _sums(values: Iterable[float]) -> list[float]:
    return [*itertools.accumulate(values, initial=0)]
