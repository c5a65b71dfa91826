"""How a model's layers lie on its devices, in plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from tfgpipe.schedules import SCHEDULES, Schedule
from tfgpipe.timeline import devices_of


class Layout(NamedTuple):
    """Which layers each cell has, and where it is.

    Attributes:
        layers: Names of the layers of each cell.
        costs: What each of them costs, in any unit.
        devices: Index of each cell's device; in the first replica.
        groups: In how many groups each cell is computed again; the tasks of
            group g of cell k are those of cell k * groups + g.
        starts: Indices of the layers with which a cell may begin; None for all.
    """

    layers: list[list[str]]
    costs: list[list[float]]
    devices: list[int]
    groups: int = 1
    starts: Collection[int] | None = None


def layout_of(model: Any) -> Layout:
    """The layout of a `GPipe` that is built."""
    cells, devices = model.cells(), devices_of(model)
    costs = iter(model._plan.costs)
    return Layout(
        [list(cell.layers) for cell in cells],
        [[next(costs) for _ in cell.layers] for cell in cells],
        [devices.index(cell.device) for cell in cells],
        model._arguments.remat_groups,
        model._arguments.source.starts(),
    )


def ideal_bubbles(model: Any) -> Callable[[int], float] | None:
    """The ideal bubble by M; None where the schedule is of one M."""
    if isinstance(model._arguments.schedule, Schedule):
        return None
    return lambda count: ideal_bubble(model, count)


def ideal_bubble(model: Any, num_micro_batches: int | None = None) -> float:
    """The share of a step in which devices idle if nothing is lost.

    That is so for cells of equal cost, whose backward tasks take twice as long
    as their forward ones, under the model's schedule.

    Args:
        model: A `GPipe` that is built.
        num_micro_batches: M. Defaults to the model's.
    """
    schedule = model._arguments.schedule
    if not isinstance(schedule, Schedule):
        devices = len({cell.device for cell in model.cells()})
        chunks = model.num_partitions // devices
        count = num_micro_batches or model.num_micro_batches
        schedule = SCHEDULES[schedule](devices, count, chunks)
    return schedule.program().bubble()
