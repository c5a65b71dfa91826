"""Checks the arguments of `GPipe` before anything is built.

`costs` and `schedule="auto"`, which ask more than a check, are here too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from keras import tree

from tfgpipe.checks import (
    as_count,
    checked_bool,
    checked_choice,
    checked_positive,
    count_problem,
    is_amount,
)
from tfgpipe.costs import Placed, kept_sizes, layer_sizes, slot_bytes_of
from tfgpipe.devices import CellDevices, names
from tfgpipe.internals import Nest
from tfgpipe.partition import partition
from tfgpipe.profiles import Profile
from tfgpipe.schedules import (
    SCHEDULES,
    Remat,
    Rule,
    Schedule,
    checked_rule,
    devices_of_cells,
    search,
)
from tfgpipe.sequence import (
    Source,
    check_supported,
    region_bounds,
    source_of,
    too_many_cells,
)
from tfgpipe.trial import TRIALS

FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")


class Arguments:
    """The arguments of a `GPipe`, checked and completed.

    They are the arguments of `GPipe`, and `replicas`: each replica's devices,
    if a strategy names them, or None.

    Attributes:
        source: The layers, and how they are called.
        costs: What they cost.
        grid: Full names of devices, grid[r][k] for cell k in replica r.
        devices: Full names of devices, as a `Program` numbers them.
        num_replicas: R.
        has_only_device: Whether one device is all there is, and nobody asked
            for just one.

    Raises:
        ValueError: With all that is wrong.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_partitions: int | None,
        num_micro_batches: int,
        devices: Sequence[Any] | None,
        layers_per_cell: Sequence[int] | None,
        schedule: str | Schedule,
        remat: Rule | Mapping[Any, Rule],
        remat_groups: int | None,
        gradient_dtype: str | None,
        skip_nonfinite: bool = False,
        skip_outliers: float | None = None,
        costs: Any = "flops",
        replicas: Sequence[Sequence[str]] | None = None,
        trial: str = "warn",
        weights_on: Any = "devices",
        head_parts: int = 1,
        shards: Mapping[str, Any] | None = None,
    ):
        self.source = source_of(layers)
        self._problems = [*self.source.problems]  # the source may be used again
        self.costs = GivenCosts(costs, self.source)
        self._problems += self.costs.problems
        named_devices = self._list_or_none("devices", devices)
        self.layers_per_cell = self._list_or_none(
            "layers_per_cell", layers_per_cell
        )
        self.schedule = self._check_schedule(schedule)
        m = self._count("num_micro_batches", num_micro_batches)
        k = num_partitions
        if k is not None:
            k = self._count("num_partitions", k)
        device_list = CellDevices(
            named_devices,
            k,
            m,
            self.schedule,
            None if replicas is None else replicas[0],
        )
        self._named_devices = device_list.names
        self._problems += device_list.problems
        self.has_only_device = device_list.is_only
        self.num_micro_batches = 1 if m is None else m
        self.num_partitions = device_list.num_partitions
        is_known = k is not None or num_partitions is None
        self.remat = self._check_remat(remat, is_known)
        self.remat_groups = None
        if remat_groups is not None:
            self.remat_groups = self._count("remat_groups", remat_groups)
        self.head_parts = self._count("head_parts", head_parts) or 1
        self.gradient_dtype = None
        if gradient_dtype is not None:
            self.gradient_dtype = self._choice(
                "gradient_dtype", gradient_dtype, FLOAT_DTYPES
            )
        self.skip_nonfinite = bool(
            self._noted(checked_bool, "skip_nonfinite", skip_nonfinite)
        )
        self.skip_outliers = None
        if skip_outliers is not None:
            self.skip_outliers = self._noted(
                checked_positive,
                "skip_outliers",
                skip_outliers,
                "as how often a distance outliers are away, or None",
            )
            if not self.skip_nonfinite:
                self._problems.append(
                    "`skip_outliers` must be None unless `skip_nonfinite` is "
                    f"True. Received: skip_outliers={skip_outliers!r} and "
                    f"skip_nonfinite={skip_nonfinite!r}. Pass "
                    "skip_nonfinite=True, too."
                )
        self.trial = self._choice("trial", trial, TRIALS) or "warn"
        self.weights_on = names.name_of(weights_on)
        is_text = isinstance(self.weights_on, str)
        is_place = is_text and self.weights_on in ("devices", "host")
        self._store = None
        if is_text:
            self._store = names.resolve_device(self.weights_on)
        if not is_place and self._store is None:
            self._problems.append(
                "`weights_on` must be 'devices', 'host', or a device that "
                f"TensorFlow lists: {names.all_devices()}. Received: "
                f"weights_on={weights_on!r}."
            )
        self._check_cut(is_known, is_default=num_partitions is None)
        if self._problems:
            raise ValueError("\n".join(self._problems))
        if self.schedule == AUTO and self.costs.profile is not None:
            self.schedule, self.layers_per_cell = auto_schedule(
                self.costs.profile,
                self.layers_per_cell,
                self.num_micro_batches,
                self.rules,
            )
        rows = replicas or [device_list.devices]
        places = [
            self._device_of(k, len(rows[0])) for k in range(self.num_partitions)
        ]
        self.grid = [tuple(row[d] for d in places) for row in rows]
        by_replica = [[row[d] for d in sorted({*places})] for row in rows]
        self.num_replicas = len(self.grid)
        self.shards = self._check_shards(shards)
        if self._problems:
            raise ValueError("\n".join(self._problems))
        listed = names.all_devices()
        # Behind them the devices that have nothing but shards.
        for r, row in enumerate(by_replica):
            of_shards = {
                shard[r]
                for shards_of_layer in self.shards.values()
                for shard in self.shard_devices(shards_of_layer, 0)
            }
            row += sorted(of_shards - {*row}, key=listed.index)
        self.devices = [device for row in by_replica for device in row]
        offloads = any(map(self.rules.offloads, range(self.num_partitions)))
        for name, value, is_refused in (
            ("shards", shards, bool(self.shards)),
            ("remat", remat, offloads),
            ("weights_on", weights_on, self.weights_on != "devices"),
        ):
            if is_refused and names.only_compiles(self.devices):
                raise ValueError(
                    f"`{name}` must be the default where XLA compiles all that "
                    f"a device runs. Received: {name}={value!r} and the "
                    f"devices {self.devices}. Leave it out; to hold less, see "
                    "docs/memory.md."
                )
        if self.head_parts > 1 and self.num_micro_batches == 1:
            raise ValueError(
                "`head_parts` must be 1 where a mini-batch is one micro-batch. "
                f"Received: head_parts={head_parts} and num_micro_batches=1. "
                "Pass more micro-batches: that holds less of all layers."
            )
        self.check_supported()

    def check_supported(self) -> None:
        """Refuses layers that a pipeline would change the meaning of."""
        check_supported(
            self.source.layers, self.num_micro_batches, self.num_replicas
        )

    def stores_of(
        self, devices: Sequence[str], of_shards: bool = False
    ) -> tuple[str, ...]:
        """Returns where the weights of a cell are; none for on its devices.

        The weights of layers with shards are on the host.
        """
        if self.weights_on == "devices" and not of_shards:
            return ()
        return tuple(self._store or names.host_of(d) for d in devices)

    def num_shards(self, shards_of_layer: Any) -> int:
        """Counts them, by what `shards` says of a layer, or None."""
        if shards_of_layer is None:
            return 1
        is_count = isinstance(shards_of_layer, int)
        return (
            shards_of_layer
            if is_count
            else len(shards_of_layer) // self.num_replicas
        )

    def shard_devices(
        self, shards_of_layer: Any, k: int
    ) -> list[tuple[str, ...]]:
        """Returns the devices of each shard in cell k, one a replica."""
        if isinstance(shards_of_layer, int):
            by_replica = []
            for row in self.grid:
                of_replica = [*dict.fromkeys(row)]
                first = of_replica.index(row[k])
                by_replica.append(
                    [*of_replica[first:], *of_replica[:first]][:shards_of_layer]
                )
        else:
            known = [
                names.resolve_device(device) or "" for device in shards_of_layer
            ]
            count = self.num_shards(shards_of_layer)
            by_replica = [
                known[r * count : (r + 1) * count]
                for r in range(self.num_replicas)
            ]
        return [*zip(*by_replica, strict=True)]

    def check_training(self) -> None:
        """Refuses a schedule that has forward tasks only."""
        schedule = self.schedule
        if isinstance(schedule, Schedule) and not schedule.is_training:
            raise ValueError(
                "`schedule` must have backward tasks to train with. Received: "
                f"{schedule!r}, whose tasks are all 'forward', which is enough "
                "for `evaluate` and `predict`. Make a `Schedule` with a "
                "'backward' for every 'forward', or pass the name of one."
            )

    def config(self) -> dict[str, Any]:
        """Returns the arguments other than the layers, as plain values."""
        return {
            "num_partitions": self.num_partitions,
            "num_micro_batches": self.num_micro_batches,
            "devices": self._named_devices,
            "layers_per_cell": self.layers_per_cell,
            "schedule": self.schedule.plain()
            if isinstance(self.schedule, Schedule)
            else self.schedule,
            "remat": {str(k): rule for k, rule in self.remat.items()}
            if isinstance(self.remat, Mapping)
            else self.remat,
            "remat_groups": self.remat_groups,
            "head_parts": self.head_parts,
            "gradient_dtype": self.gradient_dtype,
            "skip_nonfinite": self.skip_nonfinite,
            "skip_outliers": self.skip_outliers,
            "trial": self.trial,
            "weights_on": self.weights_on,
            "shards": self.shards or None,
        }

    def remat_by_cell(self, num_groups: Sequence[int]) -> Remat:
        """Returns the rules of groups; the last one may be the head.

        `num_groups` has one number for each cell.
        """
        has_head = self.head_parts > 1
        return Remat.by_group(self.remat, num_groups, self._written, has_head)

    @property
    def rules(self) -> Remat:
        """The rule of each cell, whatever its groups."""
        return Remat.by_group(
            self.remat, [1] * self.num_partitions, self._written
        )

    def region_bounds(self, input_spec: Nest) -> list[int]:
        """Returns the steps at which regions begin or end, in order.

        `input_spec` is a nest of `keras.KerasTensor`s that the model takes.
        """
        rules = self.rules.compiled(self.num_micro_batches)
        recomputes = any(map(rules.recomputes, range(self.num_partitions)))
        return region_bounds(
            self.source,
            input_spec,
            self.num_micro_batches,
            recomputes,
            self.devices,
        )

    @property
    def _written(self) -> set[int]:
        """The cells of which the schedule recomputes some micro-batches."""
        is_own = isinstance(self.schedule, Schedule)
        return self.schedule.recomputing() if is_own else set()

    def schedule_of(self, num_micro_batches: int) -> Schedule:
        """Returns the schedule for at least so many micro-batches, up to M."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        num_devices = len(set(self.grid[0]))
        chunks = self.num_partitions // num_devices
        return SCHEDULES[self.schedule](num_devices, num_micro_batches, chunks)

    @functools.cached_property
    def held(self) -> list[int]:
        """Of how many micro-batches each cell holds something at a time."""
        schedule = self.schedule_of(self.num_micro_batches)
        devices = [schedule.device_of(k) for k in range(self.num_partitions)]
        held = schedule.held()
        return [-(-held[d] // devices.count(d)) for d in devices]

    def _device_of(self, k: int, num_devices: int) -> int:
        """Returns which of the devices runs cell k."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.device_of(k)
        chunks = self.num_partitions // num_devices
        return devices_of_cells(self.schedule, num_devices, chunks)[k]

    def _check_schedule(self, schedule: Any) -> Any:
        """Returns the schedule, or a stand-in if it is wrong."""
        if isinstance(schedule, Schedule):
            return schedule
        is_text = isinstance(schedule, str) and any(map(str.isspace, schedule))
        if is_text or isinstance(schedule, (list, tuple)):
            try:
                return Schedule(schedule)
            except ValueError as error:
                self._problems.append(
                    "`schedule` must be a name, a `Schedule`, or the tasks of "
                    f"one. Received: schedule={schedule!r}. {error}"
                )
                return "gpipe"
        names = [*SCHEDULES, AUTO]
        name = self._choice("schedule", schedule, names) or "gpipe"
        if name == AUTO and self.costs.profile is None:
            self._problems.append(NEEDS_PROFILE)
        return name

    def _check_remat(self, remat: Any, is_known: bool) -> Any:
        """Checks the rule or rules, and their cells where K is known."""
        if not isinstance(remat, Mapping):
            return self._noted(checked_rule, remat) or "always"
        rules: dict[int, Rule] = {}
        for key, rule in remat.items():
            rule = self._noted(checked_rule, rule) or "always"
            k = int(key) if str(key).isdigit() else -1
            if is_known and not 0 <= k < self.num_partitions:
                self._problems.append(
                    "`remat` must map indices of cells, from 0 to "
                    f"{self.num_partitions - 1}, to rules. Received: "
                    f"{key!r}: {rule!r}. Leave it out, or see "
                    "`model.cells()`."
                )
            rules[k] = rule
        return rules

    def _is_by_replica(self, devices: Sequence[Any], count: int) -> bool:
        """Returns whether no replica's shards are on devices of another one."""
        return not any(
            {*devices[r * count : (r + 1) * count]} & {*row}
            for r in range(self.num_replicas)
            for other, row in enumerate(self.grid)
            if other != r
        )

    def _check_shards(self, shards: Any) -> dict[str, Any]:
        """Returns the shards asked for, by the names of layers."""
        if shards is None:
            return {}
        if not isinstance(shards, Mapping) or not all(
            isinstance(name, str) for name in shards
        ):
            self._problems.append(
                "`shards` must map names of layers to numbers of shards, or to "
                f"their devices. Received: shards={shards!r}. Pass "
                '{"logits": 2}, say.'
            )
            return {}
        checked: dict[str, Any] = {}
        most = len({*self.grid[0]})
        for name, asked in shards.items():
            count = as_count(asked)
            if count is not None and 1 < count <= most:
                checked[name] = count
                continue
            is_list = isinstance(asked, (list, tuple))
            devices = [*map(names.name_of, asked)] if is_list else []
            known = [*map(names.resolve_device, devices)]
            per_replica = len(devices) // self.num_replicas
            if (
                per_replica > 1
                and None not in known
                and len(devices) == per_replica * self.num_replicas
                and len({*known}) == len(known)
                and self._is_by_replica(known, per_replica)
            ):
                checked[name] = devices
                continue
            self._problems.append(
                "`shards` must say of a layer how many devices compute it, "
                f"from 2 to the {most} of a replica; or name at least 2 "
                "devices, each once and none of another replica's, for each of "
                f"{self.num_replicas} replicas. Received: {name!r}: {asked!r}. "
                f"TensorFlow lists {names.all_devices()}. Pass others, or {{}} "
                "to `load_model`, too."
            )
        return checked

    def _choice(
        self, name: str, value: object, choices: Iterable[str]
    ) -> str | None:
        """Returns the value, or None where it is wrong."""
        return self._noted(checked_choice, name, value, choices)

    def _noted(self, check: Callable[..., Any], *arguments: Any) -> Any:
        """Returns what a check returns; None if it finds a problem."""
        try:
            return check(*arguments)
        except ValueError as error:
            self._problems.append(str(error))
            return None

    def _list_or_none(self, name: str, value: object) -> list[Any] | None:
        if value is None:
            return None
        if isinstance(value, Iterable) and not isinstance(value, str):
            return list(value)
        self._problems.append(
            f"`{name}` must be a list, one item a cell. "
            f"Received: {name}={value!r}."
        )
        return None

    def _count(self, name: str, value: object) -> int | None:
        """Returns the value, or None where it is wrong."""
        count = as_count(value)
        if count is None:
            self._problems.append(count_problem(name, value))
        return count

    def _check_cut(self, is_known: bool, is_default: bool) -> None:
        # Of others the model's first run tells how many there are.
        num_layers = len(self.source.calls) if self.source.are_steps() else 0
        k = self.num_partitions
        if is_known and k > num_layers > 0:
            default = " (by the number of devices)" if is_default else ""
            self._problems.append(too_many_cells(k, num_layers, default))
        cut = self.layers_per_cell
        if cut is None:
            return
        counts = [n for n in map(as_count, cut) if n is not None]
        if len(counts) < len(cut):
            self._problems.append(
                "`layers_per_cell` must hold integers of at least 1. "
                f"Received: layers_per_cell={cut}. Every cell needs a layer."
            )
        elif num_layers and sum(counts) != num_layers:
            self._problems.append(
                "`layers_per_cell` must place every layer exactly once. "
                f"Expected a sum of {num_layers} (the number of layers). "
                f"Received: layers_per_cell={cut} (sum {sum(counts)}). "
                "Omit it to let `GPipe` balance the cells by cost."
            )
        elif is_known and len(cut) != k:
            self._problems.append(
                "`layers_per_cell` must have one number for each of the "
                f"{k} cells. Received: layers_per_cell={cut}. Pass "
                f"num_partitions={len(cut)} with it."
            )
        self.layers_per_cell = counts


def check_groups(remat_groups: int, counts: Sequence[int]) -> None:
    """Refuses more groups than a cell has layers; `counts` are of the cells."""
    if remat_groups > min(counts):
        raise ValueError(
            "`remat_groups` must be at most the number of layers of every "
            f"cell. Received: remat_groups={remat_groups} and cells of "
            f"{list(counts)} layers. Ask for fewer groups."
        )


AUTO = "auto"

NEEDS_PROFILE = (
    f'`schedule="{AUTO}"` must know how long tasks take. Received: no profile. '
    "Pass costs=tfgpipe.profile(layers, x) to `GPipe`, or another schedule."
)


def auto_schedule(
    profile: Profile,
    layers_per_cell: list[int] | None,
    num_micro_batches: int,
    remat: Remat,
) -> tuple[Schedule, list[int]]:
    """Finds the shortest schedule that holds what "1f1b" would, or less.

    Returns it and the cut, which is made by the costs if it is None.
    """
    k = len(remat.rules)
    num_layers = len(profile.layers)
    if k > num_layers:
        raise ValueError(too_many_cells(k, num_layers))
    cut = layers_per_cell or partition(profile.costs(), k)
    if sum(cut) != num_layers:
        raise ValueError(
            "`layers_per_cell` must count what was measured if "
            f'schedule="{AUTO}". Expected a sum of {num_layers}, the lines of '
            f"the profile. Received: layers_per_cell={cut} (sum {sum(cut)}). "
            "Omit it, or pass what `tfgpipe.plan` returns."
        )
    seconds, start = profile.cell_seconds(profile.rows[-1]), 0
    durations = []
    for cell, count in enumerate(cut):
        stop = start + count
        by_kind = seconds.of_cell(start, stop)
        half, rest = by_kind["input_gradient"], by_kind["weight_gradient"]
        if start <= seconds.first:  # nothing takes the gradient of the inputs
            half, rest = 0.0, by_kind["backward"]
        elif not seconds.has_halves(start, stop):
            half, rest = by_kind["backward"], 0.0
        again = by_kind["recompute"] * remat.recomputes(cell)
        durations.append((by_kind["forward"], half + again, rest))
        start = stop
    return search(durations, num_micro_batches, memory=k), cut


_NAMES = ("flops", "bytes")


class GivenCosts:
    """The argument `costs`, checked, and what follows from it.

    Costs that are known become the source's.

    Attributes:
        unit: Of the costs; empty for one that the user knows.
        profile: What was measured, or None.
        source: The layers.
        problems: What is wrong.
    """

    def __init__(self, costs: Any, source: Source):
        self.source, self._given = source, costs
        self.problems: list[str] = []
        self.profile = costs if isinstance(costs, Profile) else None
        self._is_bytes = isinstance(costs, str) and costs == "bytes"
        self._waits = False
        in_pairs = sum(c is not None for c in source.costs)
        if isinstance(costs, str) and costs == "flops":
            self.unit = "" if in_pairs else "FLOPs"
            return
        self.unit = "bytes" if self._is_bytes else "s" if self.profile else ""
        if in_pairs:
            self.problems.append(
                "`costs` must say what all layers cost, or nothing. Received: "
                f"`costs` beside {in_pairs} pairs (layer, cost). Pass the "
                "layers by themselves, or leave `costs` out."
            )
        # A run has to show how many steps there are.
        is_one_each = source.are_steps() or (
            self.profile is None
            and isinstance(costs, Sized)
            and len(costs) == len(source.calls)
        )
        self._waits = not is_one_each
        numbers = self._numbers(costs) if is_one_each else []
        if numbers and not self.problems:
            source.costs = numbers

    def _numbers(self, costs: Any) -> list[float]:
        """Returns a cost for each step; none if not known, or wrong."""
        if self._is_bytes:
            return []
        if self.profile is not None:
            costs = self.profile.costs()
        is_list = isinstance(costs, Iterable) and not isinstance(costs, str)
        listed = [*costs] if is_list else []
        num_layers = len(self.source.steps or self.source.calls)
        if len(listed) == num_layers and all(map(is_amount, listed)):
            return [float(value) for value in listed]
        received = f"costs={costs!r}"
        if self.profile is not None:
            received = f"a profile of {len(listed)} layers"
        elif is_list:
            received += f" ({len(listed)} numbers)"
        self.problems.append(
            f"`costs` must be one of {[*_NAMES]}, what `tfgpipe.profile` "
            "returned for these layers, or a list of finite numbers from 0. "
            f"Expected {num_layers} of them (the number of layers). "
            f"Received: {received}. Leave it out to cut by FLOPs."
        )
        return []

    def resolved(self, costs: list[float], spec: Nest) -> list[float]:
        """Returns the costs of the layers, which are built.

        Raises:
            ValueError: If a profile is one of other layers.
        """
        if self._waits:
            costs = self._numbers(self._given)
            if self.problems:
                raise ValueError("\n".join(self.problems))
        if self.profile is None and not self._is_bytes:
            return costs
        placed = Placed(self.source, spec)
        if self.profile is not None:
            names = [layer.name for layer in placed.layers]
            self.profile.check(names, placed.keys)
            return costs
        _check_sizes(placed)
        sizes = layer_sizes(placed, slot_bytes_of("adam"))
        kept = kept_sizes([size.memory for size in sizes])
        return [
            size.weight_bytes
            + size.slot_bytes
            + size.gradient_bytes
            + sum(tensor.at(1) for tensor in of_step)
            for size, of_step in zip(sizes, kept)
        ]


def _check_sizes(placed: Placed) -> None:
    """Refuses a model whose bytes cannot be told."""
    for tensor in tree.flatten(placed.spec):
        if tensor is not None and None in tensor.shape[1:]:
            raise ValueError(
                'costs="bytes" needs layers whose inputs have known sizes. '
                f"Received: layer '{placed.layers[0].name}' with an input of "
                f"shape {tuple(tensor.shape)}. Make the `keras.Input` with "
                "all sizes but the batch's, or measure: "
                "`tfgpipe.profile(layers, x).bytes()`."
            )
