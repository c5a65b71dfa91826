"""Cuts of graphs: few bytes cross, and cells stay even."""

import itertools
import random

import pytest

from tfgpipe.partition import SLACK, cut_graph, partition


def cells(counts, costs):
    rest = iter(costs)
    return [sum(itertools.islice(rest, count)) for count in counts]


def crossing_bytes(counts, crossing):
    starts = itertools.accumulate(counts[:-1])
    return sum(crossing[i] for i in starts)


def all_cuts(num_steps, k):
    for inner in itertools.combinations(range(1, num_steps), k - 1):
        cuts = [0, *inner, num_steps]
        yield [b - a for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize("seed", range(30))
def test_cut_has_the_fewest_bytes_of_all_that_are_even_enough(seed):
    rng = random.Random(seed)
    costs = [rng.choice([0, 1, 2, 5, 0.5]) for _ in range(8)]
    crossing = [rng.choice([1, 4, 9]) for _ in costs]
    k = rng.choice([1, 2, 3, 4])
    allowed = [*all_cuts(8, k)]
    largest = min(max(cells(counts, costs)) for counts in allowed)
    even = [
        counts
        for counts in allowed
        if max(cells(counts, costs)) <= largest + largest / SLACK
    ]
    found = cut_graph(costs, crossing, k)
    assert found in even
    assert crossing_bytes(found, crossing) == min(
        crossing_bytes(counts, crossing) for counts in even
    )


def test_cells_are_as_even_as_may_be_where_all_crossings_are_equal():
    costs = [3, 1, 4, 1, 5, 9, 2, 7]
    found, best = cut_graph(costs, [1] * 8, 3), partition(costs, 3)
    assert sorted(cells(found, costs)) == sorted(cells(best, costs))
