"""Cuts a graph into cells of even cost, where few bytes cross.

In a model with skip connections, what crosses from cell to cell depends on
where a cell ends: at the end of a block it is one tensor, inside it is two. Of
the cuts whose largest cell is at most 10% larger than it has to be, the one is
taken in which the fewest bytes cross; among those, the one whose cells vary
least.

The best cut of the first j steps into k cells ends with a cell that starts at
some i, after the best cut of the first i steps into k - 1 cells. A cell must
not exceed the bound, so few i are looked at: O(K L C) operations, where C is
how many steps the largest cell has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from tfgpipe.planning.partition import partition

SLACK = 0.1


def cut_graph(
    costs: Sequence[float],
    live_bytes: Sequence[int],
    together: Collection[int],
    num_partitions: int,
) -> list[int]:
    """Cuts the steps of a graph into consecutive cells.

    Args:
        costs: Cost of each step, in any one unit.
        live_bytes: For each step, what crosses if a cell begins with it.
        together: Indices of steps with which no cell may begin.
        num_partitions: Cells to make.

    Returns:
        The number of steps of each cell, each positive.

    Raises:
        ValueError: If there are fewer places to cut than cells need.

    Example:

    >>> cut_graph([1, 1, 1, 1, 1], [8, 8, 8, 4, 8], (), 2)
    [3, 2]
    >>> cut_graph([1, 1, 1, 1], [8, 8, 8, 4], (), 2)
    [2, 2]
    """
    starts = [i for i in range(len(costs)) if i == 0 or i not in together]
    if num_partitions > len(starts):
        raise ValueError(
            "`num_partitions` must be at most the number of places where a "
            f"cell can begin. Received: num_partitions={num_partitions} and "
            f"{len(costs)} calls of layers, which can be cut into at most "
            f"{len(starts)} cells: a layer that is called several times and "
            "updates its own state must be in one. Ask for fewer cells."
        )
    sums = list(itertools.accumulate(costs, initial=0))
    ends = [sums[i] for i in starts] + [sums[-1]]
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    bound = (1 + SLACK) * _largest(sizes, partition(sizes, num_partitions))
    crosses = [0, *(live_bytes[i] for i in starts[1:])]
    cuts = _fewest_bytes(ends, crosses, bound, num_partitions)
    places = [*starts, len(costs)]
    return [places[b] - places[a] for a, b in itertools.pairwise(cuts)]


def _largest(sizes: Sequence[float], counts: Sequence[int]) -> float:
    """The cost of the largest cell of a cut."""
    rest = iter(sizes)
    return max(sum(itertools.islice(rest, count)) for count in counts)


def _fewest_bytes(
    ends: Sequence[float],
    crosses: Sequence[int],
    bound: float,
    num_partitions: int,
) -> list[int]:
    """Where cells begin, and the end.

    Args:
        ends: Cost before each place, and of all.
        crosses: Bytes that cross at each place.
        bound: The largest cost of a cell.
        num_partitions: Cells to make.
    """
    num_places = len(crosses)
    none = (math.inf, math.inf)
    best = [none] * (num_places + 1)  # of the first places, into k cells
    best[0] = (0, 0)
    froms = []
    for k in range(1, num_partitions + 1):
        found, origin = [none] * (num_places + 1), [0] * (num_places + 1)
        for end in range(k, num_places + 1):
            for start in range(end - 1, k - 2, -1):
                size = ends[end] - ends[start]
                if size > bound:
                    break
                total, squares = best[start]
                value = total + crosses[start], squares + size**2
                if value < found[end]:
                    found[end], origin[end] = value, start
        best = found
        froms.append(origin)
    cuts = [num_places]
    for origin in reversed(froms):
        cuts.append(origin[cuts[-1]])
    return cuts[::-1]
