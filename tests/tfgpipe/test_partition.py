import fractions
import itertools
import random

import numpy as np
import pytest

from tfgpipe.partition import partition

SLACK = fractions.Fraction(1, 2**40)


def cell_costs(costs, layers_per_cell):
    """Returns the exact cost of each cell."""
    costs = iter(map(fractions.Fraction, costs))
    return [sum(itertools.islice(costs, n)) for n in layers_per_cell]


def all_cuts(num_layers, num_partitions):
    """Yields every way to cut layers into non-empty cells."""
    for cuts in itertools.combinations(
        range(1, num_layers), num_partitions - 1
    ):
        edges = [0, *cuts, num_layers]
        yield [end - start for start, end in itertools.pairwise(edges)]


def brute_force(costs, num_partitions):
    """Returns the best cut by the rules of `partition`, spelled out."""
    cuts = list(all_cuts(len(costs), num_partitions))
    largest = {tuple(cut): max(cell_costs(costs, cut)) for cut in cuts}
    bound = min(largest.values())
    if any(fractions.Fraction(cost).denominator > 1 for cost in costs):
        bound *= 1 + SLACK

    def rank(cut):
        cells = cell_costs(costs, cut)
        return (
            sum(cell**2 for cell in cells),
            sum(cell * n for cell, n in zip(cells, cut, strict=True)),
            sum(n**2 for n in cut),
            cut[::-1],
        )

    return min((cut for cut in cuts if largest[tuple(cut)] <= bound), key=rank)


GENERATORS = {
    "small integers": lambda rng: rng.randrange(5),
    "integers": lambda rng: rng.randrange(1, 100),
    "beyond float64": lambda rng: 2**60 + rng.randrange(4),
    "zeros": lambda rng: 0,
    "mostly zeros": lambda rng: rng.choice([0, 0, 0, 1, 7]),
    "floats": lambda rng: rng.random(),
    "tenths": lambda rng: rng.choice([0.1, 0.2, 0.3, 0.4]),
    "equal floats": lambda rng: 0.1,
    "magnitudes": lambda rng: 10.0 ** rng.randrange(-300, 300),
    "one dominates": lambda rng: rng.choice([1.0, 1.0, 1.5, 1e17]),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_partition_random_costs_equals_brute_force(kind):
    rng = random.Random(kind)
    for _ in range(60):
        num_layers = rng.randrange(1, 10)
        costs = [GENERATORS[kind](rng) for _ in range(num_layers)]
        num_partitions = rng.randrange(1, num_layers + 1)
        assert partition(costs, num_partitions) == brute_force(
            costs, num_partitions
        ), costs


def test_partition_rounded_costs_prefers_smaller_variance():
    # Of the doubles, 0.3 + 0.3 is below and 0.5 + 0.1 above 0.6. By the last
    # bit of the largest cell, [2, 1, 1] would win, with a larger variance.
    assert partition([0.3, 0.3, 0.5, 0.1], 3) == [1, 1, 2]


def test_partition_large_sum_hides_no_small_cost():
    # The sums of 1e17 and 1.0 are equal in float64.
    assert partition([1e17, 1.0, 1.0, 1.0, 1.0], 3) == [1, 2, 2]


@pytest.mark.parametrize(
    ("num_layers", "num_partitions", "expected"),
    [
        (10, 3, [4, 3, 3]),
        (5, 5, [1, 1, 1, 1, 1]),
        (5, 1, [5]),
        (1, 1, [1]),
    ],
)
@pytest.mark.parametrize("cost", [0, 0.0, 1, 0.1, 1e-320])
def test_partition_equal_costs_gives_equal_counts(
    cost, num_layers, num_partitions, expected
):
    assert partition([cost] * num_layers, num_partitions) == expected


def test_partition_numpy_costs_gives_plain_integers():
    for dtype in (np.float32, np.float64, np.int64):
        cut = partition(np.array([1, 2, 3, 4], dtype), np.int64(2))
        assert cut == [3, 1]
        assert {type(n) for n in cut} == {int}


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_partition_1663_layers_into_128_cells_is_balanced(spread):
    rng = np.random.default_rng(1)
    costs = (1 + spread * rng.uniform(-1, 1, 1663)).tolist()
    costs[700] *= 5
    cut = partition(costs, 128)
    cells = [float(cost) for cost in cell_costs(costs, cut)]
    assert len(cut) == 128
    assert sum(cut) == 1663
    assert min(cut) >= 1
    # A greedy cut up to the average plus the largest layer always fits.
    assert max(cells) <= sum(costs) / 128 + max(costs)
    # No layer moved to the neighbour makes it better.
    edges = [0, *itertools.accumulate(cut)]
    for cell in range(127):
        left, right = cells[cell], cells[cell + 1]
        for moved, sign in ((edges[cell + 1] - 1, -1), (edges[cell + 1], 1)):
            pair = left + sign * costs[moved], right - sign * costs[moved]
            if min(cut[cell : cell + 2]) > 1 and max(pair) <= max(cells):
                squares = pair[0] ** 2 + pair[1] ** 2
                assert squares >= left**2 + right**2 - 1e-9
