"""What is recomputed: which micro-batches a backward pass computes again.

A forward task either keeps the activations that its backward pass needs, or
drops them, and a "recompute" task comes before the backward pass.

    "always"       every micro-batch is computed again
    "except_last"  all but the one that goes back through the cell first, whose
                   activations are still there: its forward pass is the last
    "never"        every micro-batch's activations are kept

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 2.3,
where re-materialisation of all but the last micro-batch is the default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

REMAT = ("except_last", "always", "never")


class Remat:
    """The rule of each cell.

    Args:
        rules: One of `REMAT` for each cell, or group of one.
        groups: Of each cell of the schedule, how many groups it has, each of
            which is recomputed at once. None: one.
        written: Cells, or groups, of which the schedule itself recomputes some
            micro-batches.

    Attributes:
        rules: One of `REMAT` for each cell, or group of one.
        groups: How many groups each cell has; None: one.
    """

    def __init__(
        self,
        rules: Sequence[str],
        groups: Sequence[int] | None = None,
        written: Collection[int] = (),
    ):
        self.rules = rules
        self.groups = groups
        self._written = written

    @classmethod
    def of(
        cls,
        remat: str | Mapping[int, str],
        num_partitions: int,
        num_groups: int,
        written: Collection[int] = (),
    ) -> Remat:
        """The rules of the groups of all cells.

        Args:
            remat: A rule, or rules by cells; the first of `REMAT` for others.
            num_partitions: K.
            num_groups: In how many groups each cell is computed again.
            written: Cells of which the schedule itself recomputes some
                micro-batches.
        """
        rules = [
            remat if isinstance(remat, str) else remat.get(k, REMAT[0])
            for k in range(num_partitions)
        ]
        if num_groups == 1:
            return cls(rules, None, written)
        groups = [k for k in range(num_partitions) for _ in range(num_groups)]
        return cls(
            [rules[k] for k in groups],
            [num_groups] * num_partitions,
            [i for i, k in enumerate(groups) if k in written],
        )

    def recomputes(self, k: int) -> bool:
        """Whether cell k computes any micro-batch again."""
        return self.rules[k] != "never" or k in self._written

    def parted(self, cells: Sequence[int], groups: Sequence[int]) -> Remat:
        """The same rules for smaller groups.

        Args:
            cells: For each, which cell or group it is a part of.
            groups: How many each cell of the schedule has.
        """
        written = [i for i, k in enumerate(cells) if k in self._written]
        return Remat([self.rules[k] for k in cells], groups, written)

    def keeps(self, k: int, goes_back_first: bool) -> bool:
        """Whether cell k keeps the activations of a micro-batch.

        Args:
            k: The cell.
            goes_back_first: Whether the micro-batch is the first to go back
                through it.
        """
        if self.rules[k] == "except_last":
            return goes_back_first
        return self.rules[k] == "never"
