"""Which replica computes which micro-batches, and on which devices.

Of the micro-batches of a mini-batch, replica r has those from `count * r // R`
to `count * (r + 1) // R`: R M micro-batches are M each. A mini-batch of few
rows, which has fewer micro-batches, may leave some replicas idle.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence


class Replicas:
    """How the micro-batches of one mini-batch are shared among replicas.

    Args:
        grid: Names of devices, grid[r][k] that of cell k in replica r.
        num_micro_batches: Micro-batches of the mini-batch.

    Attributes:
        counts: How many micro-batches each replica has.
        busy: The replicas that have micro-batches.
    """

    def __init__(self, grid: Sequence[Sequence[str]], num_micro_batches: int):
        self._grid = grid
        count = len(grid)
        self._bounds = [
            num_micro_batches * r // count for r in range(count + 1)
        ]
        self.counts = [len(self.micro_batches(r)) for r in range(count)]
        self.busy = [r for r in range(count) if self.counts[r]]

    def of(self, m: int) -> int:
        """The replica that computes micro-batch m."""
        return bisect.bisect_right(self._bounds, m) - 1

    def device(self, k: int, m: int) -> str:
        """Where cell k computes micro-batch m."""
        return self.device_in(self.of(m), k)

    def device_in(self, r: int, k: int) -> str:
        """Where replica r has cell k."""
        return self._grid[r][k]

    def micro_batches(self, r: int) -> range:
        """The micro-batches of replica r."""
        return range(self._bounds[r], self._bounds[r + 1])

    def normalized_at_once(self, together: bool) -> list[list[int]]:
        """The micro-batches whose moments are taken at once.

        Args:
            together: Whether over replicas: the i-th of all of them. If not,
                each micro-batch has its own.
        """
        every = [self.micro_batches(r) for r in self.busy]
        if not together:
            return [[m] for own in every for m in own]
        partners = itertools.zip_longest(*every)
        return [[m for m in row if m is not None] for row in partners]
