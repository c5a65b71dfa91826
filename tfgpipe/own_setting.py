"""A setting that the user gives a plan, in place of one that it chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfgpipe.checks import as_count, checked_choice
from tfgpipe.planning import Problem, Setting
from tfgpipe.schedules import SCHEDULES, Remat, devices_for
from tfgpipe.sequence import Arguments

# What it may have, and what `GPipe` takes for what it has not.
_DEFAULTS = {
    "num_partitions": None,
    "num_micro_batches": 1,
    "layers_per_cell": None,
    "schedule": "gpipe",
    "remat": "except_last",
    "remat_groups": 1,
    "devices": None,
}


def checked_setting(setting: Any) -> dict[str, Any]:
    """The arguments that the user gives, and defaults for the others.

    Raises:
        ValueError: If they are not such arguments of `GPipe`.
    """
    if isinstance(setting, Mapping) and {*setting} <= {*_DEFAULTS}:
        return {**_DEFAULTS, **setting}
    raise ValueError(
        f"`setting` must be a dict with some of {[*_DEFAULTS]}. Received: "
        f"setting={setting!r}. The other arguments of `GPipe` do not change "
        "what is predicted."
    )


def own_setting(
    problem: Problem, layers: Any, names: Sequence[str], given: dict[str, Any]
) -> Setting:
    """What a `GPipe` of these arguments is told.

    Args:
        problem: What is planned.
        layers: As of `plan`.
        names: Of all devices.
        given: What `checked_setting` returned, without the devices.

    Raises:
        ValueError: If `GPipe` would refuse it.
    """
    if len(problem.num_replicas) > 1:
        raise ValueError(
            "`num_replicas` must be a number beside a `setting`, with which "
            "nothing is chosen. Received: num_replicas=None."
        )
    (replicas,) = problem.num_replicas
    schedule = checked_choice("schedule", given["schedule"], SCHEDULES)
    own = names[: len(names) // replicas]
    k = as_count(given["num_partitions"])
    if k is not None:
        own = own[: max(1, devices_for(schedule, k, len(own)))]
    checked = Arguments(
        layers, devices=None, gradient_dtype=None, replicas=[own], **given
    )
    k, m = checked.num_partitions, checked.num_micro_batches
    rows = problem.batch_size // replicas
    if m > rows:
        raise ValueError(
            "`num_micro_batches` must be at most the rows of a mini-batch in "
            f"each replica, {rows}. Received: num_micro_batches={m}."
        )
    costs = problem.workload(replicas, m).costs
    return Setting(
        replicas,
        len(own),
        tuple(checked.layers_per_cell or problem.cut(tuple(costs), k)),
        m,
        schedule,
        tuple(Remat.of(checked.remat, k, 1).rules),
        checked.remat_groups,
    )
