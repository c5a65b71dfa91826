"""`plan`: which arguments make a `GPipe` that trains fastest, and fits."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.arguments import Arguments
from tfgpipe.checks import (
    as_count,
    checked_choice,
    checked_counts,
    checked_positive,
)
from tfgpipe.costs import LayerSize
from tfgpipe.devices import CellDevices, accelerators
from tfgpipe.plans.machine import Machine, machine_named, machine_of
from tfgpipe.plans.model_size import sized
from tfgpipe.plans.plan import Plan
from tfgpipe.plans.prediction import Setting, predict
from tfgpipe.plans.search import PlanProblem, fastest_settings, smallest
from tfgpipe.plans.workload import Workload
from tfgpipe.profiles import Profile
from tfgpipe.schedules import SCHEDULES, Remat, devices_for
from tfgpipe.sequence import source_of

NUM_CHOICES = 5

MOST_DEVICES = 2**16  # with more, there is no cluster but a mistake

_MIB = 2**20


def plan(
    layers: Any,
    batch_size: int,
    profile: Any = None,
    *,
    devices: int | Sequence[str | tf.config.LogicalDevice] | None = None,
    memory_limit: float | None = None,
    machine: str | Machine | None = None,
    optimizer: Any = "adam",
    num_replicas: int | None = 1,
    inputs: Any = None,
    setting: Mapping[str, Any] | None = None,
) -> Plan:
    """Chooses the arguments of `GPipe`: predicts them, and takes the fastest.

    Nothing is allocated, and nothing is run. Of equal layers of a list the
    first is built, without values, which it gets in a `GPipe`; plain Keras
    cannot train such layers.

    Args:
        layers: What `GPipe` takes: layers, or a model.
        batch_size: Rows of a mini-batch, of all replicas together.
        profile: Measured seconds, see `profile`. None: from FLOPs and the
            machine.
        devices: How many devices there are, or which. Defaults to all
            accelerators.
        memory_limit: Bytes that a device may hold. Defaults to the machine's
            memory; without a machine, or if `math.inf`, there is no limit.
        machine: What the devices are: one of `MACHINES`, or a `Machine`. It
            tells how fast they send and update and, without a profile, compute.
            Without a profile, defaults to the one that TensorFlow says this
            computer's GPUs are, if that is one of `MACHINES`.
        optimizer: As `compile` takes it; for its slots.
        num_replicas: R, see `PipelineStrategy`; None to have it chosen.
        inputs: Nest of `keras.Input`s: what a list of layers without one takes.
        setting: Arguments of `GPipe` that are to be predicted as they are, in
            place of a choice: some of `num_partitions`, `num_micro_batches`,
            `layers_per_cell`, `schedule` by its name, `remat`,
            `remat_groups` and `devices`. Others are completed as `GPipe` does,
            except that a cut which is not given is by seconds, as in any plan.
            It need not fit into the memory.

    Returns:
        The plan. Print it, and see `Plan.arguments`.

    Raises:
        ValueError: If an argument is wrong, or nothing fits into the memory.

    Example:

    >>> import keras
    >>> layers = [keras.Input((8,))] + [keras.layers.Dense(8)] * 4
    >>> found = plan(layers, 64, devices=["CPU:0"], machine="v100")
    >>> found.arguments["num_partitions"]
    1

    References:
        * [Huang et al., 2019](https://arxiv.org/abs/1811.06965), section 2
        * [Narayanan et al., 2021](https://arxiv.org/abs/2104.04473), section 3,
          on choosing among replicas, cells and micro-batches
    """
    source = source_of(layers)
    (rows,) = checked_counts(batch_size=batch_size)
    # With a profile, the machine tells only how fast it sends and updates.
    known = None if machine is None else machine_of(machine)
    if profile is not None and not isinstance(profile, Profile):
        raise ValueError(
            "`profile` must be what `tfgpipe.profile` returns. Received: "
            f"{profile!r}. Read a file by `tfgpipe.Profile.load(path)`; a "
            "machine is given as `machine=`."
        )
    if profile is None and known is None:
        known = _machine_here()
    if profile is None and known is None:
        raise ValueError(
            "`profile` or `machine` must be given: a plan needs seconds, and "
            "this computer has no GPU of a kind that `tfgpipe.MACHINES` knows. "
            "Received: neither. Measure, `profile=tfgpipe.profile(layers, x)`, "
            "or say what the devices are, such as machine='a100'; see "
            "`tfgpipe.MACHINES`."
        )
    if setting is not None:
        setting = checked_setting(setting)
        devices = setting.pop("devices") or devices
    names, are_given = _devices(devices)
    num_devices = len(names)
    limit = memory_limit
    if limit is None and known is not None:
        limit = known.memory
    if isinstance(limit, float) and limit == math.inf:
        limit = None
    if limit is not None:
        limit = checked_positive("memory_limit", limit, "in bytes")
    replicas = _replicas(num_replicas, num_devices)
    if rows < min(replicas):
        raise ValueError(
            "`batch_size` must be at least the number of replicas. Received: "
            f"batch_size={rows} and num_replicas={num_replicas}."
        )
    with internals.outside_functions(), internals.without_strategy():
        model = sized(source, inputs, optimizer)
    if profile is not None:
        profile.check([size.name for size in model.sizes], model.keys)

    def workload_of(rows: float) -> Workload:
        if profile is not None:
            return model.by_profile(profile, rows)
        return model.by_flops(machine_of(known), rows)

    # The search asks for the same workloads and cuts again and again.
    problem = PlanProblem(
        functools.cache(workload_of),
        functools.cache(source.cut),
        tuple(source.starts()),
        rows,
        num_devices,
        replicas,
        limit,
        known,
    )
    if setting is None:
        choices = fastest_settings(problem, NUM_CHOICES)
        if not choices:
            _raise_nothing_fits(problem, model.sizes)
    else:
        wanted = user_setting(problem, layers, names, setting)
        choices = [predict(problem.workload_for(wanted), wanted, known)]
    if profile is not None:
        _warn_of_guesses(profile, choices[0].setting, rows)
    basis = "seconds as measured"
    if profile is None and known is not None:
        basis = f"seconds from FLOPs on {known.name}"
    return Plan(tuple(choices), rows, names, are_given, limit, basis)


def _warn_of_guesses(profile: Profile, setting: Setting, rows: int) -> None:
    """Says where a profile does not tell what was asked."""
    profile.warn_if_spread()
    largest = -(-rows // (setting.num_replicas * setting.num_micro_batches))
    if largest > profile.rows[-1]:
        warnings.warn(
            f"The plan has micro-batches of {largest} rows, and the profile "
            f"was measured with up to {profile.rows[-1]}: what they take is a "
            "guess, on a line. Measure with as many: `tfgpipe.profile(layers, "
            f"x, micro_batch_sizes=[..., {largest}])`.",
            stacklevel=3,
        )


def _machine_here() -> Machine | None:
    """What the GPUs of this computer are, or None if they are no one kind."""
    details = tf.config.experimental.get_device_details
    names = {
        details(device).get("device_name", "")
        for device in tf.config.get_visible_devices("GPU")
    }
    return machine_named(names.pop()) if len(names) == 1 else None


def _devices(devices: Any) -> tuple[tuple[str, ...], bool]:
    """Names of all devices, and whether they were given."""
    if isinstance(devices, (list, tuple)) and devices:
        checked = CellDevices([*devices], None, 1, "gpipe")
        if checked.problems:
            raise ValueError("\n".join(checked.problems))
        return tuple(checked.names or ()), True
    found = accelerators()
    if devices is None:
        return tuple(found), False
    kind = tf.DeviceSpec.from_string(found[0]).device_type
    count = as_count(devices)
    if count is None or count > MOST_DEVICES:
        raise ValueError(
            f"`devices` must be how many there are, from 1 to {MOST_DEVICES}, "
            f"or a list of names. Received: devices={devices!r}."
        )
    return tuple(f"{kind}:{i}" for i in range(count)), False


def _replicas(num_replicas: Any, num_devices: int) -> tuple[int, ...]:
    if num_replicas is None:
        return tuple(
            r for r in range(1, num_devices + 1) if num_devices % r == 0
        )
    (count,) = checked_counts(num_replicas=num_replicas)
    if count > num_devices:
        raise ValueError(
            "`num_replicas` must be at most the number of devices, "
            f"{num_devices}. Received: num_replicas={num_replicas}."
        )
    return (count,)


def _raise_nothing_fits(
    problem: PlanProblem, sizes: Sequence[LayerSize]
) -> None:
    """Says what would fit, and which layer is largest."""
    limit = _mib(problem.limit)
    largest = max(sizes, key=_held_for_weights)
    nearest = smallest(problem)
    if nearest is None:
        text = "No cut has that many cells."
    else:
        setting = nearest.setting
        text = (
            f"The nearest needs {_mib(max(nearest.device_bytes))}: "
            f"num_partitions={setting.num_partitions}, num_micro_batches="
            f"{setting.num_micro_batches}, schedule={setting.schedule!r}, "
            f"remat={setting.remat[0]!r}, remat_groups={setting.remat_groups}."
        )
    raise ValueError(
        "`memory_limit` must be enough for some number of cells and "
        f"micro-batches. Received: {limit} for each of {problem.num_devices} "
        f"devices, and batch_size={problem.batch_size}. {text} The largest "
        f"layer is '{largest.name}', whose weights, slots and gradients take "
        f"{_mib(_held_for_weights(largest))}. Use more devices, a "
        "smaller mini-batch, or smaller layers."
    )


def _mib(count: float) -> str:
    """Bytes as a text in MiB."""
    mib = count / _MIB
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.3g} MiB"


def _held_for_weights(size: LayerSize) -> int:
    return size.weight_bytes + size.slot_bytes + size.gradient_bytes


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


def user_setting(
    problem: PlanProblem,
    layers: Any,
    names: Sequence[str],
    given: dict[str, Any],
) -> Setting:
    """What a `GPipe` of these arguments is told.

    `names` are of all devices; `given` is what `checked_setting` returned,
    without the devices.

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
    # Those of a replica, and of these no more than K cells can use.
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
