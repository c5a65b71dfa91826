"""Groups of a cell's steps: each has functions of its own, and is a `Cell`.

A group is computed again at once. Where XLA compiles, it is a region, of which
equal ones are compiled once; a head in parts and each shard is one, too.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from tfgpipe.arguments import Arguments
from tfgpipe.cells import Cell
from tfgpipe.costs import row_bytes
from tfgpipe.devices import names
from tfgpipe.model.shards import apart, check_whole, shard_cells, sharded
from tfgpipe.partition import cut_graph, partition, steps_of_head
from tfgpipe.schedules import Remat

# Bytes that a cell makes of a row: below, no groups. How many there may be, and
# what of the bytes more of them may leave.
_LITTLE = 2**20
_NUM_GROUPS = (2, 4, 8)
_WORTH = 0.8


def shared_out(arguments: Arguments, costs: Sequence[float]) -> list[float]:
    """Returns what the steps cost the devices of their cells."""
    shards = sharded(arguments)
    return [
        cost / arguments.num_shards(shards.get(id(step.operation)))
        for cost, step in zip(costs, arguments.source.steps)
    ]


def grouped_cells(
    arguments: Arguments,
    counts: Sequence[int],
    costs: Sequence[float],
    specs: tuple[Any, Any],
    compiles: bool,
) -> tuple[tuple[Cell, ...], Remat]:
    """The groups of all cells, each as a cell, and their rules.

    `counts` are the steps of the user's cells; `specs` describe the model's
    inputs and outputs.
    """
    input_spec, output_spec = specs
    regions = None
    if compiles or names.only_compiles(arguments.devices):
        regions = arguments.region_bounds(input_spec)
    width = row_bytes(output_spec)
    cells = tuple(_cells(arguments, counts, costs, width, regions))
    groups = collections.Counter(cell.number for cell in cells)
    remat = arguments.remat_by_cell([*groups.values()])
    if regions is not None:
        remat = remat.compiled(arguments.num_micro_batches)
    return cells, remat


def _cells(
    arguments: Arguments,
    counts: Sequence[int],
    costs: Sequence[float],
    width: int,
    regions: Sequence[int] | None,
) -> Iterator[Cell]:
    """The cells; `width` is the bytes of outputs for a row.

    `regions` are where those begin, or end, that XLA compiles; None without it.
    """
    source, shards = arguments.source, sharded(arguments)
    costs = shared_out(arguments, costs)
    start = index = 0
    has_before = False
    columns = zip(*arguments.grid)
    # A row of the grid is a replica; column k has the devices of cell k.
    for k, (devices, count) in enumerate(zip(columns, counts)):
        stop = start + count
        groups = _groups(arguments, costs, start, stop, k, regions)
        sizes = [(size, 1) for size in groups]
        if arguments.head_parts > 1 and stop == len(costs):
            of_last, _ = sizes.pop()
            live = source.live_bytes[stop - of_last : stop]
            of_head = steps_of_head(live, width)
            sizes += [(of_last - of_head, 1), (of_head, arguments.head_parts)]
        stores = arguments.stores_of(devices)
        for size, head_parts in filter(operator.itemgetter(0), sizes):
            steps = source.steps[start : start + size]
            start += size
            is_end = start == len(costs)
            if head_parts > 1:
                check_whole(steps, shards, head_parts)
            for together, layer in apart(steps, shards, has_before, is_end):
                cells = [Cell(index, together, devices, k, stores, head_parts)]
                if layer is not None:
                    given = shards[id(layer)]
                    cells = shard_cells(arguments, given, cells[0])
                yield from cells
                index += len(cells)
                has_before = layer is None


def _groups(
    arguments: Arguments,
    costs: Sequence[float],
    start: int,
    stop: int,
    k: int,
    regions: Sequence[int] | None,
) -> list[int]:
    """How many steps each group of cell k has.

    A group has functions of its own, and is computed again at once. With more
    groups, the inputs of more are held of each micro-batch, and of one
    micro-batch less is there at a time. Where XLA compiles, groups are regions.
    """
    source, count = arguments.source, stop - start
    costs = costs[start:stop]
    made, live = source.made_bytes[start:stop], source.live_bytes[start:stop]
    asked = arguments.remat_groups
    if asked is not None:
        if regions is None:
            return partition(costs, asked)
        others = {*range(count)} - {i - start for i in regions}
        return cut_graph(costs, live, asked, others)
    if regions is not None and arguments.weights_on == "devices":
        inner = [i for i in regions if start < i < stop]
        return [b - a for a, b in itertools.pairwise([start, *inner, stop])]
    is_small = sum(made) < _LITTLE
    # Weights of elsewhere would be sent again for each group.
    is_sent = arguments.weights_on != "devices"
    if is_small or is_sent or not arguments.rules.recomputes(k):
        return [count]
    held = arguments.held[k]
    best, least = [count], float(sum(made))
    for num_groups in _NUM_GROUPS:
        if num_groups > count:
            break
        sizes = cut_graph(made, live, num_groups)
        ends = [*itertools.accumulate(sizes)]
        inputs = sum(live[end] for end in ends[:-1])
        largest = max(sum(made[a:b]) for a, b in zip([0, *ends], ends))
        if held * inputs + largest < _WORTH * least:
            best, least = sizes, held * inputs + largest
    return best
