"""Cuts costs, and graphs, into cells of nearly equal cost.

A pipeline is as fast as its slowest cell, so of all cuts of L layers into K
non-empty runs the one whose largest cell is smallest comes first; among those,
the one whose cells vary least, which is what the paper minimises. The result
is exact: all is computed in integers, as long as they need to be.

1. The smallest possible largest cell is found by bisection on its value: a
   bound can be met if filling cell after cell up to it takes at most K cells.
2. The smallest sum of squared cell costs is found cell by cell: the best cut of
   the first j layers into k cells ends with a cell that starts at some i, after
   the best cut of the first i layers into k - 1 cells.

With costs that are not whole numbers, two largest cells that differ by less
than one part in 2**40 count as equal: 0.1 + 0.2 is not 0.3.

A graph is cut where few bytes cross: of the cuts whose largest cell is at most
10% larger than it has to be, the one is taken in which the fewest do; among
those, the one whose cells vary least. A byte costs more than all squares
together, and where no cell had better begin, as in the middle of a block that
is repeated, that counts as more than all bytes.

Reference: [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 2.2,
has the objective.
"""

from __future__ import annotations

import bisect
import fractions
import itertools
import math
import numbers
from collections.abc import Collection, Sequence


def partition(costs: Sequence[float], num_partitions: int) -> list[int]:
    """Cuts layers into consecutive cells of nearly equal cost.

    Of all cuts into non-empty cells: the smallest largest cell, then the
    smallest variance of the cells' costs. What is still equal is decided as if
    every layer cost the same vanishing amount more (so cells of equal cost get
    equally many layers), and at last in favour of short last cells.

    Args:
        costs: Cost of each layer, in any one unit. Finite, not negative.
        num_partitions: Cells to make, from 1 to the number of layers.

    Returns:
        The number of layers of each cell, `num_partitions` of them, each
        positive, with sum `len(costs)`.

    Example:

    >>> partition([1, 1, 1, 3, 2, 2, 4], 3)
    [4, 2, 1]
    >>> partition([0, 0, 0, 0, 0], 2)
    [3, 2]
    """
    return _cut(costs, num_partitions)


SLACK = 10  # a largest cell may be larger by one part in as many


def cut_graph(
    costs: Sequence[float],
    live_bytes: Sequence[int],
    num_partitions: int,
    avoided: Collection[int] = (),
) -> list[int]:
    """Cuts the steps of a graph into consecutive cells.

    Args:
        costs: Cost of each step, in any one unit.
        live_bytes: For each step, what crosses if a cell begins with it.
        num_partitions: Cells to make, from 1 to the number of steps.
        avoided: Steps with which cells begin only where they must: one of them
            counts as more than all bytes.

    Returns:
        The number of steps of each cell, each positive.

    Example:

    >>> cut_graph([1, 1, 1, 1, 1], [8, 8, 8, 4, 8], 2)
    [3, 2]
    >>> cut_graph([1, 1, 1, 1], [8, 8, 8, 4], 2)
    [2, 2]
    >>> cut_graph([1] * 20, [8] * 20, 2, avoided={10})
    [11, 9]
    """
    more = sum(live_bytes) + 1
    crossing = [
        live + more * (i in avoided) for i, live in enumerate(live_bytes)
    ]
    return _cut(costs, num_partitions, crossing)


def _cut(
    costs: Sequence[float],
    num_partitions: int,
    crossing: Sequence[int] | None = None,
) -> list[int]:
    """Returns the layers of each cell; `crossing` as for `cut_graph`."""
    ratios = [
        fractions.Fraction(
            int(cost) if isinstance(cost, numbers.Integral) else float(cost)
        )
        for cost in costs
    ]
    scale = math.lcm(*(ratio.denominator for ratio in ratios))
    whole = [int(ratio * scale) for ratio in ratios]
    ends = [*itertools.accumulate(whole, initial=0)]  # ends[i]: the first i
    # The cost of the largest cell where that is smallest.
    bound, high = max(*whole, -(-ends[-1] // num_partitions)), ends[-1]
    while bound < high:
        middle, reached = (bound + high) // 2, 0
        # Fewer cells will do: splitting one of them makes none larger.
        for _ in range(num_partitions):
            reached = bisect.bisect_right(ends, ends[reached] + middle) - 1
        if reached == len(ends) - 1:
            high = middle
        else:
            bound = middle + 1
    if crossing is not None:
        bound += bound // SLACK
    elif scale > 1:  # they are rounded
        bound += bound >> 40
    crossing = [*(crossing or [0] * len(whole)), 0]
    cuts = _least_squares(ends, bound, num_partitions, crossing)
    return [b - a for a, b in itertools.pairwise(cuts)]


def _least_squares(
    ends: Sequence[int],
    bound: int,
    num_partitions: int,
    crossing: Sequence[int],
) -> list[int]:
    """Cuts into cells of at most `bound`, with least sum of squared costs.

    Of all cuts those in which the fewest bytes cross.

    Returns:
        Where the cells start, and the end: `num_partitions` + 1 positions.
    """
    # Every layer costs one more, and all else so much that this only decides
    # between equal sums. It also makes all costs positive.
    factor = 2 * (ends[-1] + 1) * len(ends)
    sums = [factor * end + index for index, end in enumerate(ends)]
    byte = sums[-1] ** 2 + 1  # more than any sum of squares
    prices = {0: 0}  # by end, of the best cut of what is before
    starts: list[dict[int, int]] = []  # of the last cell of that cut
    for left in reversed(range(num_partitions)):
        before, prices = prices, {}
        starts.append({})
        # The cells that are left can take what is behind these ends.
        first = bisect.bisect_left(ends, ends[-1] - left * bound)
        for end in range(first, len(ends) - left):
            earliest = bisect.bisect_left(ends, ends[end] - bound)
            ways = [
                (before[start] + (sums[end] - sums[start]) ** 2, -start)
                for start in range(earliest, end)
                if start in before
            ]
            if ways:
                price, start = min(ways)
                prices[end] = price + byte * crossing[end]
                starts[-1][end] = -start
    cuts = [len(ends) - 1]
    for of_cells in reversed(starts):
        cuts.append(of_cells[cuts[-1]])
    return cuts[::-1]


def steps_of_head(live_bytes: Sequence[float], output_bytes: float) -> int:
    """How many of the last steps are the head: what makes outputs wide.

    It begins where what crosses is last half of what crosses behind it, or
    less; if it is nowhere, it is the last step.

    Args:
        live_bytes: For each step, what crosses before it.
        output_bytes: What crosses behind the last one.

    Returns:
        At least 1.

    Example:

    >>> steps_of_head([4, 4, 4], 32_000)  # a dense layer with many outputs
    1
    >>> steps_of_head([4, 4, 32_000], 32_000)  # and a softmax
    2
    """
    widest = output_bytes
    for count, live in enumerate(reversed(live_bytes), 1):
        if 2 * live <= widest:
            return count
        widest = max(widest, live)
    return 1
