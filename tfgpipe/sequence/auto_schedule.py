"""`schedule="auto"`: an order of the tasks for what the cells were measured."""

from __future__ import annotations

from tfgpipe.schedules import Remat, Schedule, search
from tfgpipe.sequence.given_costs import GivenCosts

AUTO = "auto"
NEEDS_PROFILE = (
    f'`schedule="{AUTO}"` must know how long tasks take. Received: no profile. '
    "Pass costs=tfgpipe.profile(layers, x) to `GPipe`, or another schedule."
)


def found(
    costs: GivenCosts,
    layers_per_cell: list[int] | None,
    num_micro_batches: int,
    remat: Remat,
) -> tuple[Schedule, list[int]]:
    """The shortest schedule found that holds what "1f1b" would, or less.

    Args:
        costs: What the layers take: has a profile.
        layers_per_cell: The cut; None to cut by the costs.
        num_micro_batches: M.
        remat: What each cell computes again.

    Returns:
        The schedule, and the cut.
    """
    k = len(remat.rules)
    source, profile = costs.source, costs.profile
    cut = layers_per_cell or source.cut(source.costs, k)
    rows, start = profile.rows[-1], 0
    durations = []
    for cell, count in enumerate(cut):
        kinds = ("forward", "input_gradient", "weight_gradient", "backward")
        forward, half, rest, whole = (
            profile.task_seconds(start, start + count, kind, rows)
            for kind in kinds
        )
        again = profile.task_seconds(start, start + count, "recompute", rows)
        again *= remat.recomputes(cell)
        needs_dx = any(own.num_params for own in profile.layers[:start])
        own_layers = profile.layers[start : start + count]
        if not needs_dx:  # nothing takes the gradient of the inputs
            half, rest = 0.0, whole
        elif not all(own.has_halves for own in own_layers):
            half, rest = whole, 0.0
        durations.append((forward, half + again, rest))
        start += count
    return search(durations, num_micro_batches, memory=k), cut
