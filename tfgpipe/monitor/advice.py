"""Advice to make a pipeline faster; which layers are where.

Pure Python: from the events of a step and the layout of the cells. A cell's
measured seconds are shared out over its layers by their costs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfgpipe import timeline
from tfgpipe.run import Event
from tfgpipe.schedules import SCHEDULES, Schedule

# A cell that takes more times the mean than this is worth a move, if the
# busiest device is this much quicker then; a larger ideal bubble than this is
# worth more micro-batches.
_UNEVEN, _GAIN, _LARGE = 1.1, 0.05, 0.1


def advise(
    events: Sequence[Event],
    layout: Layout,
    num_micro_batches: int,
    most_micro_batches: int,
    ideal: Callable[[int], float],
) -> str:
    """Says what would help, or that the cells are balanced.

    `most_micro_batches` are the rows of a replica; `ideal` is the ideal bubble
    by M.
    """
    # What costs most comes first: uneven cells, then devices that wait between
    # tasks which are too short, then too few micro-batches.
    seconds = timeline.cell_seconds(events, layout.numbers)
    mean = statistics.fmean(seconds)
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    ratio = seconds[slowest] / mean if mean else 1.0
    takes = f"cell {slowest} takes {ratio:.2f} times the mean"
    move = _best_move(slowest, seconds, layout) if ratio > _UNEVEN else None
    if move is not None:
        largest, said = move
        return (
            f"{takes}: {said}, and the slowest would take about "
            f"{largest / mean:.2f} times the mean"
        )
    bubble = timeline.bubble(events)
    alone = timeline.bubble(timeline.without_waiting(events))
    if bubble - alone > max(alone, _LARGE):
        tasks = timeline.scheduled(events)
        each = statistics.fmean(task.end - task.start for task in tasks)
        return (
            f"bubble {bubble:.0%}: devices wait between tasks, which take "
            f"{timeline.seconds(each)} on average; without that it would be "
            f"{alone:.0%}. Larger micro-batches would help: more rows in a "
            "mini-batch, or fewer micro-batches"
        )
    # Four a device, from where on the bubble is negligible in the paper.
    more = min(4 * (1 + max(layout.devices)), most_micro_batches)
    if more > num_micro_batches:
        now, after = ideal(num_micro_batches), ideal(more)
        if min(now, bubble) > _LARGE and after < now:
            return (
                f"bubble {bubble:.0%}, ideal at M = {num_micro_batches}: "
                f"{now:.0%}: more micro-batches would help, "
                f"num_micro_batches={more} has an ideal of {after:.0%}"
            )
    how = "balanced" if ratio <= _UNEVEN else "no move of layers would help"
    return f"{how}: {takes}, and is the slowest; bubble {bubble:.0%}"


def _best_move(
    cell: int, seconds: Sequence[float], layout: Layout
) -> tuple[float, str] | None:
    """Returns what makes the busiest device least busy, if that pays.

    The seconds of the slowest cell then, and the move of layers to a neighbour.
    """
    names, costs = layout.layers[cell], layout.costs[cell]
    total, groups = sum(costs), layout.numbers.count(0)
    shares = [c / total if total else 1 / len(costs) for c in costs]

    def busiest(of_cells: Sequence[float]) -> float:
        return max(np.bincount(layout.devices, of_cells))

    moves = []
    #     | a b | c d e | f |      back: c, or c d;  on: e, or d e
    targets = (k for k in (cell - 1, cell + 1) if 0 <= k < len(seconds))
    for target in targets:
        for count in range(1, len(names) - groups + 1):
            moving = slice(count) if target < cell else slice(-count, None)
            moved = seconds[cell] * sum(shares[moving])
            after, counts = [*seconds], [*map(len, layout.layers)]
            after[cell] -= moved
            after[target] += moved
            counts[cell] -= count
            counts[target] += count
            first, *_, last = names[moving] * 2
            named = f"layer '{first}'"
            if count > 1:
                named = f"layers '{first}' to '{last}'"
            said = f"move {named} to cell {target} (layers_per_cell={counts})"
            moves.append((busiest(after), max(after), said))
    least, largest, said = min(moves, default=(math.inf, 0.0, ""))
    return (largest, said) if least <= (1 - _GAIN) * busiest(seconds) else None


class Layout(NamedTuple):
    """Which layers each cell has, and where it is.

    Attributes:
        layers: Names of the layers of each cell.
        costs: What each of them costs, in any unit.
        devices: Index of each cell's device; in the first replica.
        numbers: Of each group that is computed again, and of a head, the cell
            that it is a part of.
    """

    layers: list[list[str]]
    costs: list[list[float]]
    devices: list[int]
    numbers: list[int]


def layout_of(model: Any) -> Layout:
    """Returns the layout of a `GPipe` that is built."""
    cells, devices = model.cells(), model.devices
    built = model.built_for("layout_of()")
    costs = iter(built.costs)
    return Layout(
        [list(cell.layers) for cell in cells],
        [[next(costs) for _ in cell.layers] for cell in cells],
        [devices.index(cell.device) for cell in cells],
        [cell.number for cell in built.cells],
    )


def ideal_bubble(model: Any, num_micro_batches: int | None = None) -> float:
    """Returns the share of a step in which devices idle if nothing is lost.

    That is so for cells of equal cost, whose backward tasks take twice as long
    as their forward ones, under the schedule of the model, which is built. M
    defaults to the model's, and is the schedule's if that is of one M.
    """
    schedule = model.schedule
    if not isinstance(schedule, Schedule):
        devices = len({cell.device for cell in model.cells()})
        chunks = model.num_partitions // devices
        count = num_micro_batches or model.num_micro_batches
        schedule = SCHEDULES[schedule](devices, count, chunks)
    return schedule.program().bubble()
