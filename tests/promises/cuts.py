"""How a case is cut into cells."""

from __future__ import annotations

import random

from case import Case

NUM_DEVICES = 8


def cut(case: Case, num_partitions: int, count: int) -> list[int] | None:
    """`layers_per_cell` for a number of layers, or None."""
    if case.cells and len(case.cells) == num_partitions:
        rest = count - sum(case.cells)
        if rest >= 0:
            return [*case.cells[:-1], case.cells[-1] + rest]
    if not case.cut_seed:
        return None
    spare = count - num_partitions * case.remat_groups
    if spare < 0:
        return None
    rng = random.Random(case.cut_seed + num_partitions)
    sizes = [case.remat_groups] * num_partitions
    for _ in range(spare):
        sizes[rng.randrange(num_partitions)] += 1
    return sizes


def partitions(case: Case, wanted: int) -> int:
    """K: no more than there are layers and devices."""
    most = min(
        len(case.layers) // case.remat_groups,
        NUM_DEVICES // case.num_replicas,
    )
    return max(1, min(wanted, most))
