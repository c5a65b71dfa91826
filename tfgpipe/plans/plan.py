"""`plan`: which arguments make a `GPipe` that trains fastest, and fits."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import checks, internals
from tfgpipe import inputs as inputs_lib
from tfgpipe.arguments import DEFAULTS, Arguments, check_groups
from tfgpipe.costs import (
    LayerSize,
    Placed,
    layer_sizes,
    row_bytes,
    slot_bytes_of,
)
from tfgpipe.devices import PipelineStrategy, strategy
from tfgpipe.devices import names as device_names
from tfgpipe.internals import Nest
from tfgpipe.plans.prediction import Prediction, Setting, predict
from tfgpipe.plans.search import PlanProblem, fastest_settings
from tfgpipe.plans.workload import (
    Machine,
    Workload,
    machine_named,
    machine_of,
    seconds_by_flops,
)
from tfgpipe.profiles import Profile, aligned, size_text
from tfgpipe.schedules import CHUNKS, SCHEDULES, devices_for
from tfgpipe.sequence import (
    Source,
    region_bounds,
    source_of,
    too_many_cells,
)

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings that are predicted to train fastest, within a limit.

    `print` it for a table: a line for each of the best settings, and how much
    slower than the first it is.

    Attributes:
        choices: Predictions, the fastest first; that is the plan.
        batch_size: Rows of a mini-batch.
        device_names: Names of all devices.
        names_are_given: Whether the user named them.
        memory_limit: Bytes of a device; None for any.
        basis: Where seconds come from, and whether XLA compiles the cells.
        margin: Share of `memory_limit` that is left free.
    """

    choices: tuple[Prediction, ...]
    batch_size: int
    device_names: tuple[str, ...]
    names_are_given: bool
    memory_limit: float | None
    basis: str
    margin: float = 0.0

    @property
    def best(self) -> Prediction:
        """The first of the choices."""
        return self.choices[0]

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a training step."""
        return self.best.step_seconds

    @property
    def device_bytes(self) -> list[int]:
        """Predicted bytes at the peak, one a device of a replica."""
        return self.best.device_bytes

    @property
    def num_replicas(self) -> int:
        """R. Above 1, make the model in the scope of `strategy()`."""
        return self.best.setting.num_replicas

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `GPipe`, except the layers.

        Raises:
            ValueError: If the plan has replicas, and this is not called in the
                scope of a strategy that has them.
        """
        setting, current = self.best.setting, strategy.current()
        wanted = setting.num_replicas, setting.num_devices
        in_scope = current and (current.num_replicas, current.num_partitions)
        if in_scope != wanted and (current or setting.num_replicas > 1):
            raise ValueError(
                f"A plan with {wanted[0]} replicas of {wanted[1]} devices must "
                "be used in the scope of a strategy that has them. Received: "
                f"the scope of {current}. Make the model inside of "
                "`with plan.strategy().scope():`, or plan with num_replicas=1."
            )
        arguments = setting.arguments
        # By itself, `GPipe` takes the first K accelerators, or all.
        is_needed = self.names_are_given or CHUNKS[setting.schedule] is None
        if is_needed and setting.num_replicas == 1:
            arguments["devices"] = list(
                self.device_names[: setting.num_devices]
            )
        return arguments

    def compare(
        self, step_seconds: float | None, device_bytes: Sequence[float] = ()
    ) -> str:
        """Returns a sentence: how far the plan was from what was measured.

        Args:
            step_seconds: Seconds of a step; None if not measured.
            device_bytes: The most that each device has held; none if not
                measured.
        """
        told = "the bytes of these devices are not counted"
        if device_bytes:
            held, most = max(device_bytes), max(self.device_bytes)
            told = (
                f"the fullest device held {size_text(held)}, "
                f"{size_text(most)} planned "
                f"({held / most - 1:+.0%})"
            )
        if step_seconds is not None:
            planned = self.step_seconds
            told = (
                f"a step takes {step_seconds:.3g} s, {planned:.3g} s planned "
                f"({step_seconds / planned - 1:+.0%}); {told}"
            )
        return f"The plan, and what was measured: {told}."

    def strategy(self) -> PipelineStrategy:
        """Makes a strategy of the plan's replicas, on the plan's devices."""
        shape = self.best.setting.num_replicas, self.best.setting.num_devices
        return PipelineStrategy(*shape, self.device_names[: math.prod(shape)])

    def __str__(self) -> str:
        """Returns the table."""
        titles = "R K M schedule remat groups head s/step bubble MiB/device"
        lines = [[*titles.split(), "cells", "note"]]
        lines += [self._row(choice) for choice in self.choices]
        limit = "no memory limit"
        if self.memory_limit is not None:
            limit = (
                f"at most {self.memory_limit / _MIB:,.0f} MiB a device, "
                f"{self.margin:.0%} of them left free"
            )
        if self.best.setting.weights_on != "devices":
            limit += ", weights on the host"
        head = f"mini-batches of {self.batch_size}; {limit}; {self.basis}"
        return "\n".join([head, *aligned(lines, (3, 4, 10, 11))])

    def _row(self, choice: Prediction) -> list[str]:
        setting = choice.setting
        rules = list(dict.fromkeys(setting.remat))
        cells = " ".join(map(str, setting.layers_per_cell))
        if len(cells) > 24:
            cells = cells[:21] + "..."
        return [
            str(setting.num_replicas),
            str(setting.num_partitions),
            str(setting.num_micro_batches),
            setting.schedule,
            str(rules[0]) if len(rules) == 1 else "by cell",
            str(setting.remat_groups or "regions"),
            str(setting.head_parts),
            f"{choice.step_seconds:.3g}",
            f"{choice.bubble:.0%}",
            f"{max(choice.device_bytes) / _MIB:,.0f}",
            cells,
            self._note(choice),
        ]

    def _note(self, choice: Prediction) -> str:
        if choice is not self.best:
            return f"{choice.step_seconds / self.step_seconds - 1:+.1%}"
        most, limit = max(choice.device_bytes), self.memory_limit or math.inf
        return "the plan" if most <= limit else "does not fit"


# -------------------------------------------------------- how one is made
NUM_CHOICES = 5

MOST_DEVICES = 2**16  # with more, there is no cluster but a mistake


def plan(
    layers: Any,
    batch_size: int,
    profile: Profile | None = None,
    *,
    devices: int | Sequence[str | tf.config.LogicalDevice] | None = None,
    memory_limit: float | None = None,
    machine: str | Machine | None = None,
    optimizer: str | keras.Optimizer | None = "adam",
    num_replicas: int | None = 1,
    inputs: Nest = None,
    setting: Mapping[str, Any] | None = None,
    margin: float = 0.2,
    jit_compile: bool | str = "auto",
) -> Plan:
    """Chooses the arguments of `GPipe`: predicts them, and takes the fastest.

    Nothing is allocated, and nothing is run. Layers are built, without values,
    which they get in a `GPipe`; plain Keras cannot train such layers.

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
        inputs: Nest of `keras.Input`s: what a list of layers without one
            takes, or a model with a `call` of its own; or the inputs of a model
            which leave sizes open, such as a length, of the sizes that are
            usual.
        setting: Arguments of `GPipe` that are to be predicted as they are, in
            place of a choice: some of `num_partitions`, `num_micro_batches`,
            `layers_per_cell`, `schedule` by its name, `remat`, `remat_groups`,
            `head_parts`, `weights_on` and `devices`. Others are completed as
            `GPipe` does, except that there is one group, or one a region where
            XLA compiles, and that a cut which is not given is by seconds, as in
            any plan. It need not fit into the memory. `num_replicas=None` is 1
            with it.
        margin: Share of a device's memory that the plan leaves free, below 1:
            for what it does not know, such as workspaces and fragments.
        jit_compile: Whether XLA compiles the cells, as in `compile`: True,
            False, or "auto", on accelerators if all layers allow it. On a TPU,
            it always does. A profile says by itself whether it did.

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
    (rows,) = checks.checked_counts(batch_size=batch_size)
    # With a profile, the machine tells only how fast it sends and updates.
    known = None if machine is None else machine_of(machine)
    if profile is None:
        known = known or machine_here()
    if known is None and not isinstance(profile, Profile):
        raise ValueError(
            "`profile` or `machine` must be given: a plan needs seconds. "
            f"Received: profile={profile!r}, and no GPU here of a kind that "
            "`tfgpipe.MACHINES` knows. Measure, "
            "`profile=tfgpipe.profile(layers, x)`; read a file by "
            "`tfgpipe.Profile.load(path)`; or say what the devices are, such "
            "as machine='a100'."
        )
    if setting is not None:
        setting = _checked_setting(setting)
        devices = setting.pop("devices") or devices
    names, are_given = _devices(devices)
    num_devices = len(names)
    limit = memory_limit
    if limit is None and known is not None:
        limit = known.memory
    limit = None if limit == math.inf else limit
    if limit is not None:
        limit = checks.checked_positive("memory_limit", limit, "in bytes")
    if not checks.is_amount(margin) or margin >= 1:
        raise ValueError(
            "`margin` must be a share of a device's memory, from 0 to below 1. "
            f"Received: margin={margin!r}."
        )
    if jit_compile != "auto":
        checks.checked_bool("jit_compile", jit_compile)
    replicas = _replicas(num_replicas, num_devices, rows)
    with internals.outside_functions(), internals.without_strategy():
        # A machine that is not here is an accelerator, too.
        planned = names
        if known is not None and not are_given and profile is None:
            kind = known.device_type
            planned = tuple(f"{kind}:{i}" for i in range(num_devices))
        model = sized(source, inputs, optimizer, planned)
        if profile is not None:
            placed, spec = model.placed, source.input_spec
            if spec is not None and spec is not placed.spec:
                placed = Placed(source, spec)  # the keys are for these inputs
            profile.check([size.name for size in model.sizes], placed.keys)

    def workload_of(rows: float) -> Workload:
        if profile is not None:
            return model.by_profile(profile, rows)
        return model.by_flops(machine_of(known or ""), rows, jit_compile)

    # The search asks for the same workloads and cuts again and again.
    problem = PlanProblem(
        functools.cache(workload_of),
        functools.cache(source.cut),
        len(model.sizes),
        rows,
        num_devices,
        replicas,
        (1 - margin) * (limit or math.inf),
        known,
        not device_names.only_compiles(model.devices),  # which have no host
    )
    if setting is None:
        choices = fastest_settings(problem, NUM_CHOICES)
        if not choices:
            raise ValueError(_nothing_fits(problem.limit, model.sizes))
    else:
        wanted = _user_setting(problem, layers, names, setting, source)
        choices = [predict(problem.workload_for(wanted), wanted, known)]
    workload = problem.workload_for(choices[0].setting)
    if profile is not None:
        profile.warn_if_spread()
        largest = math.ceil(workload.rows)
        if largest > profile.rows[-1]:
            warnings.warn(
                f"The plan has micro-batches of {largest} rows, and the "
                f"profile was measured with up to {profile.rows[-1]}: what "
                "they take is a guess. Measure with as many: "
                "`tfgpipe.profile(..., micro_batch_sizes=[..., "
                f"{largest}])`.",
                stacklevel=2,
            )
    cells = f"cells {'' if workload.is_compiled else 'not '}compiled by XLA"
    basis = f"seconds as measured, {cells}"
    if known is not None and profile is None:
        basis = f"seconds from FLOPs on {known.name}, {cells}"
    return Plan(tuple(choices), rows, names, are_given, limit, basis, margin)


def machine_here() -> Machine | None:
    """Returns the kind of this computer's GPUs, or None if they are several."""
    details = tf.config.experimental.get_device_details
    names = {
        details(device).get("device_name", "")
        for device in tf.config.get_visible_devices("GPU")
    }
    return machine_named(names.pop()) if len(names) == 1 else None


def _devices(devices: object) -> tuple[tuple[str, ...], bool]:
    """Names of all devices, and whether they were given."""
    if isinstance(devices, (list, tuple)) and devices:
        device_names.resolved(devices)
        return tuple(map(device_names.name_of, devices)), True
    listed = device_names.accelerators()
    if devices is None:
        return tuple(listed), False
    kind = tf.DeviceSpec.from_string(listed[0]).device_type
    count = checks.as_count(devices)
    if count is None or count > MOST_DEVICES:
        raise ValueError(
            f"`devices` must be how many there are, from 1 to {MOST_DEVICES}, "
            f"or a list of names. Received: devices={devices!r}."
        )
    return tuple(f"{kind}:{i}" for i in range(count)), False


def _replicas(
    num_replicas: int | None, num_devices: int, rows: int
) -> tuple[int, ...]:
    most = min(num_devices, rows)
    if num_replicas is None:
        return tuple(r for r in range(1, most + 1) if num_devices % r == 0)
    (count,) = checks.checked_counts(num_replicas=num_replicas)
    if count > most:
        raise ValueError(
            "`num_replicas` must be at most the number of devices, "
            f"{num_devices}, and `batch_size`, {rows}. Received: "
            f"num_replicas={num_replicas}."
        )
    return (count,)


def _nothing_fits(limit: float, sizes: Sequence[LayerSize]) -> str:
    """Returns an error, which names the largest layer."""
    held = {
        size.weight_bytes + size.slot_bytes + size.gradient_bytes: size.name
        for size in sizes
    }
    return (
        "`memory_limit` must be enough for some number of cells and "
        f"micro-batches. Received: {size_text(limit)} of each device, beside "
        f"its margin, and weights, slots and gradients of which the largest "
        f"layer, '{held[max(held)]}', has {size_text(max(held))}. Use more "
        "devices, smaller mini-batches, or smaller layers; or pass `shards` of "
        "that layer to `GPipe`, without a plan."
    )


def _checked_setting(setting: object) -> dict[str, Any]:
    """Returns the arguments that the user gives, or else defaults."""
    known = DEFAULTS.keys() - {"shards"}  # which are not predicted
    if isinstance(setting, Mapping) and {*setting} <= known:
        return {**DEFAULTS, **setting}
    raise ValueError(
        f"`setting` must be a dict with some of {sorted(known)}. Received: "
        f"setting={setting!r}."
    )


def _user_setting(
    problem: PlanProblem,
    layers: Any,
    names: Sequence[str],
    arguments: Mapping[str, Any],
    source: Source,
) -> Setting:
    """Returns the setting of a `GPipe` of these arguments.

    `names` are of all devices.

    Raises:
        ValueError: If `GPipe` would refuse it.
    """
    replicas = problem.num_replicas[0]
    schedule = checks.checked_choice(
        "schedule", arguments["schedule"], SCHEDULES
    )
    # The devices of a replica, no more than K cells can use.
    devices = names[: len(names) // replicas]
    wanted = checks.as_count(arguments["num_partitions"])
    if wanted is not None:
        most = devices_for(schedule, wanted, len(devices))
        devices = devices[: max(1, most)]
    checked = Arguments(layers, [devices], **{**arguments, "devices": None})
    k = checked.num_partitions
    if k > problem.num_layers:
        raise ValueError(too_many_cells(k, problem.num_layers))
    cut = checked.layers_per_cell and source.steps_per_cell(
        checked.layers_per_cell
    )
    made = Setting(
        replicas,
        len(devices),
        tuple(cut or [1] * k),
        checked.num_micro_batches,
        schedule,
        tuple(checked.rules.rules),
        checked.remat_groups,
        checked.head_parts,
        checked.weights_on,
    )
    even = problem.evenly_cut(made)
    if cut:
        even = even._replace(layers_per_cell=tuple(cut))
    check_groups(even.remat_groups or 1, even.layers_per_cell)
    return even


# ------------------------------------------------- what is known of the layers
class SizedModel(NamedTuple):
    """The layers of a model, how they are called, and what each needs.

    Attributes:
        placed: The steps.
        sizes: What each needs.
        output_bytes: Of a row of the last layer's outputs.
        devices: Names of the devices that compute.
    """

    placed: Placed
    sizes: list[LayerSize]
    output_bytes: int
    devices: tuple[str, ...] = ()

    def by_flops(
        self, machine: Machine, rows: float, jit_compile: bool | str = "auto"
    ) -> Workload:
        """For micro-batches of so many rows, with seconds from FLOPs."""
        seconds = [seconds_by_flops(size, rows, machine) for size in self.sizes]
        last = seconds[-1]  # the loss behind it is taken to keep its outputs
        last["recompute_last"] = last["recompute"]
        if jit_compile == "auto":
            jit_compile = device_names.has_accelerator(self.devices) and all(
                inner.supports_jit
                for layer in self.placed.source.layers
                for inner in internals.flat_layers(layer)
            )
        compiles = jit_compile or device_names.only_compiles(self.devices)
        return self.workload(seconds, machine.task_seconds, rows, compiles)

    def by_profile(self, profile: Profile, rows: float) -> Workload:
        """For micro-batches of so many rows, with seconds as measured."""
        seconds = profile.layer_seconds(rows), profile.call_seconds
        return self.workload(*seconds, rows, profile.jit_compile)

    def workload(
        self,
        seconds: Sequence[Mapping[str, float]],
        task_seconds: float,
        rows: float,
        is_compiled: object = False,
    ) -> Workload:
        """Returns the layers with their seconds, for so many rows."""
        placed = self.placed
        regions = functools.partial(
            region_bounds, placed.source, placed.spec, devices=self.devices
        )
        return Workload(
            self.sizes,
            self.output_bytes,
            seconds,
            task_seconds,
            rows,
            functools.cache(regions) if is_compiled else None,
        )


def sized(
    source: Source,
    inputs: Nest,
    optimizer: str | keras.Optimizer | None,
    devices: Sequence[str] = (),
) -> SizedModel:
    """Returns what each layer needs, without allocating any of it.

    Raises:
        ValueError: If the layers or their inputs cannot be planned for.
    """
    if source.problems:
        raise ValueError("\n".join(source.problems))
    placed = Placed(source, _checked_inputs(source, inputs))
    return SizedModel(
        placed,
        layer_sizes(placed, slot_bytes_of(optimizer)),
        row_bytes(placed.output),
        tuple(devices),
    )


def _checked_inputs(source: Source, inputs: Nest) -> Any:
    """Returns the inputs of the first layer, of known sizes but for rows."""
    declared = source.input_spec
    spec = declared if inputs is None else inputs
    leaves = [leaf for leaf in tree.flatten(spec) if leaf is not None]
    if not leaves or not all(
        isinstance(leaf, keras.KerasTensor) and None not in leaf.shape[1:]
        for leaf in leaves
    ):
        names = tree.map_structure(
            lambda leaf: getattr(leaf, "name", leaf), declared
        )
        raise ValueError(
            "`inputs` must hold `keras.Input`s of known sizes, on which "
            f"depends what layers take. Received: {spec!r}. Pass the sizes "
            "that are usual, such as `keras.Input((512,))`"
            f"{'' if names is None else f', in the structure {names}'}."
        )
    if inputs is None or declared is None:
        return spec
    spec = source.arranged(inputs)
    if inputs_lib.unlike(spec, declared):
        raise ValueError(
            "`inputs` must be the inputs of the model, with sizes where it "
            f"has None. Expected: {declared}. Received: {inputs!r}."
        )
    return spec
