"""Cuts costs, and graphs, into cells of nearly equal cost.

A pipeline is as fast as its slowest cell, so of all cuts of L layers into K
non-empty runs the one whose largest cell is smallest comes first; among those,
the one whose cells vary least, which is what the paper minimises. The result
is exact, not a heuristic.

Algorithm:

1. The smallest possible largest cell is found by bisection on its value: a
   bound can be met if filling cell after cell up to it takes at most K cells.
2. The smallest sum of squared cell costs (the mean is the same for every cut,
   so this is the smallest variance) is found cell by cell: the best cut of the
   first j layers into k cells ends with a cell that starts at some i, after
   the best cut of the first i layers into k - 1 cells. The squared cost of a
   run satisfies the quadrangle inequality, so the best start never moves back
   as j grows, and a start that has overtaken an earlier one stays ahead. A
   queue of the starts with the time each overtakes the one before it gives
   every best start at once.

Everything is computed in integers, as long as they need to be: a float is a
whole number of some power of two, so nothing is rounded, whatever the
magnitudes.

Cost: O(K L log L) integer operations and O(K L) memory; 1,663 layers into 128
cells take up to 0.4 s (0.01 s where the cells come out nearly equal). Costs
that lie hundreds of orders of magnitude apart make long integers, and seconds.

Limits: the cost of a cell is the sum of its layers' costs; `partition` does not
count what crosses, `cut_graph` does. With costs that are not whole numbers, two
largest cells that differ by less than one part in 2**40 count as equal, so that
the rounding of the costs (0.1 + 0.2 is not 0.3) does not outweigh the variance.

A graph is cut where few bytes cross. In a model with skip connections, what
crosses from cell to cell depends on where a cell ends: at the end of a block it
is one tensor, inside it is two. Of the cuts whose largest cell is at most 10%
larger than it has to be, the one is taken in which the fewest bytes cross;
among those, the one whose cells vary least. It is found in the same way: a byte
costs more than all squares together, and where no cell had better begin, as in
the middle of a block that is repeated, that counts as more than all bytes. All
of that depends on where a cell starts alone, so starts overtake each other as
before.

References:
    * [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 2.2: the
      objective.
    * [Galil and Park, 1992](https://doi.org/10.1016/0304-3975(92)90135-3):
      dynamic programming under the quadrangle inequality.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import numbers
from collections.abc import Collection, Sequence

from tfgpipe.checks import as_count, as_integer, is_amount

# Largest cells within one part in 2**40 of each other count as equal.
_SLACK_BITS = 40


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

    Raises:
        ValueError: If `costs` is empty or holds something else than finite
            non-negative numbers (all of them are listed), or if there would be
            an empty cell.

    Example:

    >>> partition([1, 1, 1, 3, 2, 2, 4], 3)
    [4, 2, 1]
    >>> partition([0, 0, 0, 0, 0], 2)
    [3, 2]
    """
    num_partitions = _check_num_partitions(num_partitions, len(costs))
    whole, is_rounded = _whole_numbers(_check_costs(costs))
    ends = list(itertools.accumulate(whole, initial=0))  # ends[i]: first i
    bound = _smallest_bound(ends, max(whole), num_partitions)
    if is_rounded:
        bound += bound >> _SLACK_BITS
    cuts = _least_squares(ends, bound, num_partitions, [0] * len(whole))
    return [end - start for start, end in itertools.pairwise(cuts)]


def _check_num_partitions(num_partitions: int, num_layers: int) -> int:
    if num_layers == 0:
        raise ValueError(
            "`costs` must hold the cost of at least one layer. "
            "Received: an empty list. Pass one cost per layer."
        )
    count = as_count(num_partitions)
    if count is None or count > num_layers:
        raise ValueError(
            "`num_partitions` must be a whole number of cells, none of them "
            f"empty. Expected 1 to {num_layers} (the number of layers). "
            f"Received: num_partitions={num_partitions!r}. "
            "Ask for fewer cells, or pass more and smaller layers."
        )
    return count


def _check_costs(costs: Sequence[float]) -> list[float]:
    bad = [
        f"layer {index}: {cost!r}"
        for index, cost in enumerate(costs)
        if not _is_cost(cost)
    ]
    if bad:
        raise ValueError(
            "`costs` must be finite numbers that are not negative. "
            f"Received: {'; '.join(bad)}. "
            "Give every layer a cost in the same unit; 0 if it is negligible."
        )
    return [
        int(cost) if isinstance(cost, numbers.Integral) else float(cost)
        for cost in costs
    ]


def _is_cost(cost: object) -> bool:
    whole = as_integer(cost)  # which may be larger than any float
    return is_amount(cost) or (whole is not None and whole >= 0)


def _whole_numbers(costs: Sequence[float]) -> tuple[list[int], bool]:
    """Scales costs to integers, exactly. Also: were there fractions."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    # Denominators of floats are powers of two: the largest is a multiple.
    scale = max(denominator for _, denominator in ratios)
    return [top * (scale // bottom) for top, bottom in ratios], scale > 1


def _reach(ends: Sequence[int], start: int, bound: int) -> int:
    """Returns where a cell from `start` ends if it costs at most `bound`."""
    return bisect.bisect_right(ends, ends[start] + bound) - 1


def _smallest_bound(
    ends: Sequence[int], largest_layer: int, num_partitions: int
) -> int:
    """Returns the cost of the largest cell where that is smallest."""
    num_layers = len(ends) - 1

    def can_meet(bound: int) -> bool:
        start = 0
        for _ in range(num_partitions):
            start = _reach(ends, start, bound)
        # Fewer cells will do: splitting one of them makes none larger.
        return start == num_layers

    low = max(largest_layer, -(-ends[-1] // num_partitions))
    high = ends[-1]
    while low < high:
        middle = (low + high) // 2
        if can_meet(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _feasible_ends(
    ends: Sequence[int], bound: int, num_partitions: int
) -> list[range]:
    """Returns where the first k cells may end, for k from 0."""
    num_layers = len(ends) - 1
    last = [0]
    for cell in range(1, num_partitions + 1):
        room = num_layers - (num_partitions - cell)
        last.append(min(_reach(ends, last[-1], bound), room))
    first = [num_layers]
    for cell in range(num_partitions - 1, -1, -1):
        # The first start from which one cell still reaches first[-1].
        start = bisect.bisect_left(ends, ends[first[-1]] - bound)
        first.append(max(start, cell))
    first.reverse()
    first[0] = 0
    return [range(low, high + 1) for low, high in zip(first, last)]


def _least_squares(
    ends: Sequence[int],
    bound: int,
    num_partitions: int,
    crosses: Sequence[int],
) -> list[int]:
    """Cuts into cells of at most `bound`, with least sum of squared costs.

    Of all cuts those in which the fewest bytes cross: `crosses` has them for
    each position at which a cell may start.

    Returns:
        Where the cells start, and the end: `num_partitions` + 1 positions.
    """
    num_layers = len(ends) - 1
    # Every layer costs one more, and all else so much that this only decides
    # between equal sums. It also makes all costs positive.
    factor = 2 * (ends[-1] + 1) * (num_layers + 1)
    sums = [factor * end + index for index, end in enumerate(ends)]
    expiry = [_reach(ends, start, bound) + 1 for start in range(num_layers + 1)]
    feasible = _feasible_ends(ends, bound, num_partitions)
    byte = sums[-1] ** 2 + 1  # more than any sum of squares
    crossing = [byte * count for count in crosses] + [0]

    squares = {0: 0}  # of the best cut that ends there, and what crosses there
    starts = []
    for cell in range(1, num_partitions + 1):
        best = _best_starts(sums, expiry, squares, feasible[cell])
        squares = {
            end: squares[start] + (sums[end] - sums[start]) ** 2 + crossing[end]
            for end, start in best.items()
        }
        starts.append(best)

    cuts = [num_layers]
    for best in reversed(starts):
        cuts.append(best[cuts[-1]])
    return cuts[::-1]


def _best_starts(
    sums: Sequence[int],
    expiry: Sequence[int],
    squares: dict[int, int],
    cell_ends: range,
) -> dict[int, int]:
    """Finds, for every end of the next cell, its best start.

    Args:
        sums: Cost of the layers before each position, strictly increasing.
        expiry: The first end for which a cell from a start is too large.
        squares: Sum of squared cell costs up to each possible start, and what
            crosses at the starts of cells.
        cell_ends: The ends to find the best start for.

    Returns:
        The best start (the latest of equal ones) of each end.
    """
    lift = {start: squares[start] + sums[start] ** 2 for start in squares}

    def overtakes(later: int, earlier: int) -> int:
        # later wins at end e if 2 sums[e] (sums[later] - sums[earlier])
        # is at least lift[later] - lift[earlier], or earlier has expired.
        gap = 2 * (sums[later] - sums[earlier])
        least = -((lift[earlier] - lift[later]) // gap)
        return min(bisect.bisect_left(sums, least), expiry[earlier])

    queue: collections.deque[tuple[int, int]] = collections.deque()
    best = {}
    waiting = iter(squares)  # ascending
    start = next(waiting, None)
    for end in cell_ends:
        while start is not None and start < end:
            since = 0
            while queue and (
                (since := overtakes(start, queue[-1][1])) <= queue[-1][0]
            ):
                queue.pop()
            queue.append((since, start))
            start = next(waiting, None)
        while len(queue) > 1 and queue[1][0] <= end:
            queue.popleft()
        best[end] = queue[0][1]
    return best


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
    whole, _ = _whole_numbers(_check_costs(costs))
    ends = list(itertools.accumulate(whole, initial=0))
    bound = _smallest_bound(ends, max(whole), num_partitions)
    bound += bound // SLACK
    more = sum(live_bytes) + 1
    crosses = [
        live + more * (i in avoided) for i, live in enumerate(live_bytes)
    ]
    cuts = _least_squares(ends, bound, num_partitions, crosses)
    return [b - a for a, b in itertools.pairwise(cuts)]


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
    for count, own in enumerate(reversed(live_bytes), 1):
        if 2 * own <= widest:
            return count
        widest = max(widest, own)
    return 1
