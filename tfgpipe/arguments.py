"""Checks the arguments of `GPipe` before anything is built.

`costs` and `schedule="auto"`, which ask more than a check, are here too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from keras import tree

from tfgpipe import checks
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


# Those of `GPipe` that a file has, with their defaults.
DEFAULTS: dict[str, Any] = {
    "num_partitions": None,
    "num_micro_batches": None,
    "devices": None,
    "layers_per_cell": None,
    "schedule": "gpipe",
    "remat": "except_last",
    "remat_groups": None,
    "head_parts": 1,
    "gradient_dtype": None,
    "skip_nonfinite": False,
    "skip_outliers": None,
    "trial": "warn",
    "weights_on": "devices",
    "shards": None,
}


def _count(name: str, value: object) -> int:
    return checks.checked_counts(**{name: value})[0]


def _as_list(name: str, value: object) -> list[Any]:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [*value]
    raise ValueError(
        f"`{name}` must be a list, one item a cell. Received: {name}={value!r}."
    )


class Arguments:
    """The arguments of a `GPipe`, checked and completed.

    Args:
        layers: As in `GPipe`.
        replicas: Each replica's devices, if a strategy names them, or None.
        costs: As in `GPipe`.
        given: The others, of which `DEFAULTS` has all.

    Attributes:
        source: The layers, and how they are called.
        costs: What they cost.
        grid: Full names of devices, grid[r][k] for cell k in replica r.
        devices: Full names of devices, as a `Program` numbers them.
        num_replicas: R.
        has_only_device: Whether one device is all there is, and nobody asked
            for just one.

    Raises:
        ValueError: If one is wrong.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        replicas: Sequence[Sequence[str]] | None = None,
        costs: Any = "flops",
        **given: Any,
    ):
        given = {**DEFAULTS, **given}

        def checked(name: str, check: Callable[..., Any], *more: Any) -> Any:
            value = given[name]
            is_left_out = value is None and DEFAULTS[name] is None
            return None if is_left_out else check(name, value, *more)

        self.source = source_of(layers)
        if self.source.problems:
            raise ValueError("\n".join(self.source.problems))
        self.costs = GivenCosts(costs, self.source)
        m = checked("num_micro_batches", _count)
        k = checked("num_partitions", _count)
        self.num_micro_batches: int = m or 1
        self.layers_per_cell = checked("layers_per_cell", _as_list)
        schedule = given["schedule"]
        is_text = isinstance(schedule, str) and any(map(str.isspace, schedule))
        if is_text or isinstance(schedule, (list, tuple)):
            schedule = Schedule(schedule)
        if not isinstance(schedule, Schedule):
            schedule = checks.checked_choice(
                "schedule", schedule, [*SCHEDULES, AUTO]
            )
        if schedule == AUTO and self.costs.profile is None:
            raise ValueError(NEEDS_PROFILE)
        self.schedule: Any = schedule
        self.remat_groups = checked("remat_groups", _count)
        self.head_parts: int = checked("head_parts", _count)
        self.gradient_dtype = checked(
            "gradient_dtype", checks.checked_choice, FLOAT_DTYPES
        )
        self.trial = checked("trial", checks.checked_choice, TRIALS)
        self.skip_nonfinite = checked("skip_nonfinite", checks.checked_bool)
        self.skip_outliers = checked(
            "skip_outliers",
            checks.checked_positive,
            "how many times the usual spread outliers are away, or None",
        )
        if self.skip_outliers is not None and not self.skip_nonfinite:
            raise ValueError(
                "`skip_outliers` needs skip_nonfinite=True. Received: "
                f"skip_outliers={self.skip_outliers!r} without it."
            )
        device_list = CellDevices(
            checked("devices", _as_list),
            k,
            self.num_micro_batches,
            self.schedule,
            None if replicas is None else replicas[0],
        )
        self._named_devices = device_list.names
        self.has_only_device = device_list.is_only
        self.num_partitions = device_list.num_partitions
        self.remat = self._checked_remat(given["remat"])
        self.weights_on = names.name_of(given["weights_on"])
        self._store = names.resolve_device(self.weights_on)
        is_name = str(self.weights_on) in ("devices", "host")
        if self._store is None and not is_name:
            raise ValueError(
                "`weights_on` must be 'devices', 'host', or a device that "
                f"TensorFlow lists: {names.all_devices()}. Received: "
                f"weights_on={self.weights_on!r}."
            )
        self._check_cut(k is None)
        if self.schedule == AUTO and self.costs.profile is not None:
            self._find_schedule(self.costs.profile)
        rows = replicas or [device_list.devices]
        places: Sequence[int]
        if isinstance(self.schedule, Schedule):
            cells = range(self.num_partitions)
            places = [*map(self.schedule.device_of, cells)]
        else:
            chunks = self.num_partitions // len(rows[0])
            places = devices_of_cells(self.schedule, len(rows[0]), chunks)
        self.grid = [tuple(row[d] for d in places) for row in rows]
        self.num_replicas = len(self.grid)
        self.shards = self._checked_shards(given["shards"])
        # Behind them the devices that have nothing but shards.
        self.devices: list[str] = []
        for r, row in enumerate(rows):
            of_shards = {
                shard[r]
                for shards_of_layer in self.shards.values()
                for shard in self.shard_devices(shards_of_layer, 0)
            }
            of_cells = [row[d] for d in sorted({*places})]
            others = of_shards - {*of_cells}
            self.devices += of_cells
            self.devices += sorted(others, key=names.all_devices().index)
        offloads = any(map(self.rules.offloads, range(self.num_partitions)))
        is_away = self.shards or offloads or self.weights_on != "devices"
        if is_away and names.only_compiles(self.devices):
            raise ValueError(
                "`shards`, `weights_on` and remat='offload' cannot be where "
                "XLA compiles all that a device runs, as on the devices "
                f"{self.devices}. Received: shards={self.shards}, "
                f"weights_on={self.weights_on!r}, remat={self.remat!r}."
            )
        if self.head_parts > 1 and self.num_micro_batches == 1:
            raise ValueError(
                "`head_parts` must be 1 where a mini-batch is one micro-batch. "
                f"Received: head_parts={self.head_parts}."
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
        if isinstance(shards_of_layer, int):
            return shards_of_layer
        return len(shards_of_layer or ()) // self.num_replicas or 1

    def shard_devices(
        self, shards_of_layer: Any, k: int
    ) -> list[tuple[str, ...]]:
        """Returns the devices of each shard in cell k, one a replica."""
        count = self.num_shards(shards_of_layer)
        by_replica: list[list[str]] = []
        for r, row in enumerate(self.grid):
            if isinstance(shards_of_layer, int):
                of_replica = [*dict.fromkeys(row)]
                first = of_replica.index(row[k])
                turned = [*of_replica[first:], *of_replica[:first]]
                by_replica.append(turned[:count])
            else:
                listed = shards_of_layer[r * count : (r + 1) * count]
                by_replica.append(
                    [names.resolve_device(d) or "" for d in listed]
                )
        return [*zip(*by_replica, strict=True)]

    def check_training(self) -> None:
        """Refuses a schedule that has forward tasks only."""
        schedule = self.schedule
        if isinstance(schedule, Schedule) and not schedule.is_training:
            raise ValueError(
                "`schedule` must have backward tasks to train with. Received: "
                f"{schedule!r}, whose tasks are all 'forward'."
            )

    def config(self) -> dict[str, Any]:
        """Returns the arguments other than the layers, as plain values."""
        config = {name: getattr(self, name) for name in DEFAULTS}
        config["devices"] = self._named_devices
        config["shards"] = self.shards or None
        if isinstance(self.schedule, Schedule):
            config["schedule"] = self.schedule.plain()
        if isinstance(self.remat, Mapping):
            config["remat"] = {str(k): rule for k, rule in self.remat.items()}
        return config

    def remat_by_cell(self, num_groups: Sequence[int]) -> Remat:
        """Returns the rules of groups; the last one may be the head.

        `num_groups` has one number for each cell.
        """
        has_head = self.head_parts > 1
        written = self.rules.written
        return Remat.by_group(self.remat, num_groups, written, has_head)

    @property
    def rules(self) -> Remat:
        """The rule of each cell, whatever its groups."""
        is_own = isinstance(self.schedule, Schedule)
        written = self.schedule.recomputing() if is_own else set()
        return Remat.by_group(self.remat, [1] * self.num_partitions, written)

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

    def _checked_remat(self, remat: Any) -> Any:
        """Checks the rule or rules, and their cells."""
        if not isinstance(remat, Mapping):
            return checked_rule(remat)
        rules: dict[int, Rule] = {}
        for key, rule in remat.items():
            k = int(key) if str(key).isdigit() else -1
            rules[k] = checked_rule(rule)
            if not 0 <= k < self.num_partitions:
                raise ValueError(
                    "`remat` must map indices of cells, from 0 to "
                    f"{self.num_partitions - 1}, to rules. Received: {key!r}: "
                    f"{rule!r}."
                )
        return rules

    def _find_schedule(self, profile: Profile) -> None:
        """Finds the shortest schedule that holds what "1f1b" would, or less."""
        k, m, remat = self.num_partitions, self.num_micro_batches, self.rules
        num_layers = len(profile.layers)
        if k > num_layers:
            raise ValueError(too_many_cells(k, num_layers))
        cut = self.layers_per_cell or partition(profile.costs(), k)
        if sum(cut) != num_layers:
            raise ValueError(
                "`layers_per_cell` must count what was measured if the "
                f'schedule is "{AUTO}". Expected a sum of {num_layers}, the '
                f"lines of the profile. Received: layers_per_cell={cut}."
            )
        seconds, durations = profile.cell_seconds(profile.rows[-1]), []
        bounds = itertools.pairwise(itertools.accumulate(cut, initial=0))
        for cell, (start, stop) in enumerate(bounds):
            by_kind = seconds.of_cell(start, stop)
            half, rest = by_kind["input_gradient"], by_kind["weight_gradient"]
            if start <= seconds.first:  # nothing takes the inputs' gradient
                half, rest = 0.0, by_kind["backward"]
            elif not seconds.has_halves(start, stop):
                half, rest = by_kind["backward"], 0.0
            again = by_kind["recompute"] * remat.recomputes(cell)
            durations.append((by_kind["forward"], half + again, rest))
        self.schedule = search(durations, m, memory=k)
        self.layers_per_cell = cut

    def _checked_shards(self, shards: Any) -> dict[str, Any]:
        """Returns the shards asked for, by the names of layers."""
        if shards is not None and not isinstance(shards, Mapping):
            shards = {"shards": shards}  # which is refused
        checked: dict[str, Any] = {}
        most = len({*self.grid[0]})
        for name, asked in (shards or {}).items():
            count = checks.as_count(asked)
            is_list = isinstance(asked, (list, tuple))
            devices = [*map(names.name_of, asked)] if is_list else []
            if count is not None and 1 < count <= most:
                checked[name] = count
            elif self._are_shards(devices):
                checked[name] = devices
            else:
                raise ValueError(
                    "`shards` must map the name of a layer to how many devices "
                    f"compute it, from 2 to the {most} of a replica; or to at "
                    "least 2 devices, each once and none of another replica's, "
                    f"for each of {self.num_replicas} replicas. Received: "
                    f"{name!r}: {asked!r}. TensorFlow lists "
                    f"{names.all_devices()}."
                )
        return checked

    def _are_shards(self, devices: Sequence[Any]) -> bool:
        """Returns whether each replica has several devices, and no other's."""
        known = [*map(names.resolve_device, devices)]
        count, rest = divmod(len(known), self.num_replicas)
        if count < 2 or rest or None in known or len({*known}) < len(known):
            return False
        return not any(
            device in row
            for i, device in enumerate(known)
            for r, row in enumerate(self.grid)
            if r != i // count
        )

    def _check_cut(self, is_default: bool) -> None:
        """Checks the cut into K cells, of which the number may be a default."""
        # Of others the model's first run tells how many there are.
        num_layers = len(self.source.calls) if self.source.are_steps() else 0
        k, cut = self.num_partitions, self.layers_per_cell
        if k > num_layers > 0:
            default = " (by the number of devices)" if is_default else ""
            raise ValueError(too_many_cells(k, num_layers, default))
        if cut is None:
            return
        counts = [n for n in map(checks.as_count, cut) if n is not None]
        is_whole = len(counts) == len(cut) == k
        if not is_whole or sum(counts) != (num_layers or sum(counts)):
            raise ValueError(
                "`layers_per_cell` must hold a number of layers, at least 1, "
                f"for each of {k} cells, {num_layers or 'all layers'} in all. "
                f"Received: layers_per_cell={cut}, {sum(counts)} in all."
            )
        self.layers_per_cell = counts


def check_groups(remat_groups: int, counts: Sequence[int]) -> None:
    """Refuses more groups than a cell has layers; `counts` are of the cells."""
    if remat_groups > min(counts):
        raise ValueError(
            "`remat_groups` must be at most the number of layers of every "
            f"cell. Received: {remat_groups}, and {list(counts)} layers."
        )


AUTO = "auto"

NEEDS_PROFILE = (
    f'`schedule="{AUTO}"` must know how long tasks take. Received: no profile. '
    "Pass costs=tfgpipe.profile(layers, x) to `GPipe`, or another schedule."
)


class GivenCosts:
    """The argument `costs`, checked, and what follows from it.

    Costs of calls become the source's; a run may have to show how many steps
    there are.

    Attributes:
        unit: Of the costs; empty for one that the user knows.
        profile: What was measured, or None.
    """

    def __init__(self, costs: Any, source: Source):
        self._source, self._given = source, costs
        self.profile = costs if isinstance(costs, Profile) else None
        self._name = costs if isinstance(costs, str) else ""
        self._waits = False
        self.unit = "s" if self.profile else self._name
        in_pairs = sum(c is not None for c in source.costs)
        if self._name == "flops":
            self.unit = "" if in_pairs else "FLOPs"
        elif in_pairs:
            raise ValueError(
                "`costs` must say what all layers cost, or nothing. Received: "
                f"`costs` beside {in_pairs} pairs (layer, cost)."
            )
        elif self._name != "bytes":
            count = len(source.calls)
            has_all = isinstance(costs, Sized) and len(costs) == count > 0
            self._waits = not source.are_steps() and not has_all
            if not self._waits:
                source.costs = self._numbers(count)

    def _numbers(self, count: int) -> list[float]:
        """Returns a cost for each of so many layers."""
        costs = self.profile.costs() if self.profile else self._given
        listed = []
        if isinstance(costs, Iterable) and not isinstance(costs, str):
            listed = [*costs]
        if len(listed) == count and all(map(checks.is_amount, listed)):
            return [*map(float, listed)]
        received = "a profile" if self.profile else f"costs={costs!r}"
        raise ValueError(
            "`costs` must be one of ['flops', 'bytes'], what `tfgpipe.profile` "
            "returned for these layers, or a list of finite numbers from 0, "
            f"{count} in all. Received: {received}, of {len(listed)} numbers."
        )

    def resolved(self, costs: list[float], spec: Nest) -> list[float]:
        """Returns the costs of the layers, which are built.

        Raises:
            ValueError: If a profile is one of other layers.
        """
        source = self._source
        if self._waits:
            costs = self._numbers(len(source.steps))
        if self.profile is not None:
            placed = Placed(source, spec)
            layers = [layer.name for layer in placed.layers]
            self.profile.check(layers, placed.keys)
        if self._name != "bytes":
            return costs
        for tensor in tree.flatten(spec):
            if tensor is not None and None in tensor.shape[1:]:
                raise ValueError(
                    'costs="bytes" needs inputs of known sizes. Received: shape'
                    f" {tuple(tensor.shape)}. Or measure: "
                    "`tfgpipe.profile(layers, x).bytes()`."
                )
        sizes = layer_sizes(Placed(source, spec), slot_bytes_of("adam"))
        kept = kept_sizes([size.memory for size in sizes])
        return [
            size.weight_bytes
            + size.slot_bytes
            + size.gradient_bytes
            + sum(tensor.at(1) for tensor in of_step)
            for size, of_step in zip(sizes, kept)
        ]
