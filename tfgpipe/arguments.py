"""Checks the arguments of `GPipe` before anything is built."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import cost as cost_lib
from tfgpipe import placement
from tfgpipe.named_schedules import SCHEDULES
from tfgpipe.pipeline import REMAT
from tfgpipe.restrictions import check_supported
from tfgpipe.schedule import Schedule


class Arguments:
    """The arguments of a `GPipe`, checked and completed.

    Args:
        layers: See `GPipe`, as all others.
        num_partitions: K or None.
        num_micro_batches: M.
        devices: Names, or None.
        layers_per_cell: The cut, or None.
        schedule: Name of the schedule, or the schedule itself.
        remat: Name of the rule, or rules by cells.
        remat_groups: Groups a cell.

    Attributes:
        layers: The Keras layers.
        costs: For each what the user said of its cost, or None.
        input_spec: `keras.KerasTensor` of a leading `keras.Input`, or None.

    Raises:
        ValueError: With all that is wrong.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        num_partitions: int | None,
        num_micro_batches: int,
        devices: Sequence[str] | None,
        layers_per_cell: Sequence[int] | None,
        schedule: str | Schedule,
        remat: str | Mapping[Any, str],
        remat_groups: int,
    ):
        self._problems: list[str] = []
        self.layers: list[keras.layers.Layer] = []
        self.costs: list[Any] = []
        self.input_spec: Any = None
        self.devices: list[str] = []
        self.num_partitions = 1
        self._check_layers(layers)
        self._named_devices = self._list_or_none("devices", devices)
        self.layers_per_cell = self._list_or_none(
            "layers_per_cell", layers_per_cell
        )
        self.schedule = self._check_schedule(schedule)
        self.num_micro_batches = self._count(
            "num_micro_batches", num_micro_batches
        )
        self._resolve_devices(num_partitions)
        self.remat = self._check_remat(remat)
        self.remat_groups = self._count("remat_groups", remat_groups)
        self._check_cut(is_default=num_partitions is None)
        if tf.distribute.has_strategy():
            self._problems.append(
                "A `GPipe` must be made outside of a `tf.distribute` strategy. "
                f"Received: the scope of {tf.distribute.get_strategy()}. Leave "
                "the scope: replicas are not supported."
            )
        if self._problems:
            raise ValueError("\n".join(self._problems))
        self.devices = [
            self.devices[self._device_of(k)] for k in range(self.num_partitions)
        ]
        check_supported(self.layers, self.num_micro_batches)

    def config(self) -> dict[str, Any]:
        """The arguments other than the layers, as plain values."""
        return {
            "num_partitions": self.num_partitions,
            "num_micro_batches": self.num_micro_batches,
            "devices": self._named_devices,
            "layers_per_cell": self.layers_per_cell,
            "schedule": _as_lists(self.schedule),
            "remat": self.remat
            if isinstance(self.remat, str)
            else {str(k): rule for k, rule in self.remat.items()},
            "remat_groups": self.remat_groups,
        }

    def remat_by_cell(self) -> list[str]:
        """The rule of each group of each cell."""
        rules = [
            self.remat
            if isinstance(self.remat, str)
            else self.remat.get(k, REMAT[0])
            for k in range(self.num_partitions)
        ]
        return [rule for rule in rules for _ in range(self.remat_groups)]

    def schedule_of(self, num_micro_batches: int) -> Schedule:
        """The schedule for a mini-batch, of the groups of all cells.

        Args:
            num_micro_batches: How many micro-batches it has, M or fewer.
        """
        if isinstance(self.schedule, Schedule):
            schedule = self.schedule.limited_to(num_micro_batches)
        else:
            num_devices = len(set(self.devices))
            schedule = SCHEDULES[self.schedule](
                num_devices,
                num_micro_batches,
                self.num_partitions // num_devices,
            )
        if self.remat_groups == 1:
            return schedule
        return schedule.split([self.remat_groups] * self.num_partitions)

    def _device_of(self, k: int) -> int:
        """Which of the devices runs cell k."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.device_of(k)
        return k % len(self.devices)

    def _check_schedule(self, schedule: Any) -> Any:
        """The schedule; one from a file as a `Schedule`."""
        if isinstance(schedule, Schedule):
            return schedule
        if isinstance(schedule, (list, tuple)):
            try:
                return Schedule(schedule)
            except ValueError as error:
                self._problems.append(str(error))
                return schedule
        self._check_choice("schedule", schedule, SCHEDULES)
        return schedule

    def _check_remat(self, remat: Any) -> Any:
        if not isinstance(remat, Mapping):
            self._check_choice("remat", remat, REMAT)
            return remat
        rules: dict[int, str] = {}
        for key, rule in remat.items():
            self._check_choice("remat", rule, REMAT)
            k = int(key) if str(key).isdigit() else -1
            if not 0 <= k < self.num_partitions:
                self._problems.append(
                    "`remat` must map indices of cells, from 0 to "
                    f"{self.num_partitions - 1}, to rules. Received: "
                    f"{key!r}: {rule!r}. Leave it out, or see "
                    "`model.cells()`."
                )
            rules[k] = rule
        return rules

    def _check_layers(self, layers: Any) -> None:
        items = list(layers) if isinstance(layers, (list, tuple)) else []
        if items and _input_spec(items[0]) is not None:
            self.input_spec = _input_spec(items.pop(0))
        if not items:
            self._problems.append(
                "`layers` must be a list of at least one Keras layer. "
                f"Received: layers={layers!r}. Pass what you would pass to "
                "`keras.Sequential`."
            )
        for index, item in enumerate(items):
            layer, cost = item if _is_pair(item) else (item, None)
            if not isinstance(layer, keras.layers.Layer) or _is_input(layer):
                self._problems.append(
                    "`layers` must hold Keras layers or pairs (layer, cost). "
                    f"Received: {item!r} (of type {type(item).__name__}) at "
                    f"index {index}. Wrap a function in "
                    "`keras.layers.Lambda`; a `keras.Input` comes first."
                )
                continue
            self._check_cost(layer, cost)
            self.layers.append(layer)
            self.costs.append(cost)
        self._check_names()

    def _check_cost(self, layer: keras.layers.Layer, cost: Any) -> None:
        if cost is None or callable(cost):
            return  # what functions return is checked when they are called
        try:
            cost_lib.resolve_cost(layer, cost, None)
        except ValueError as error:
            self._problems.append(str(error))

    def _check_names(self) -> None:
        by_name = {layer.name: layer for layer in self.layers}
        doubles = sorted(
            {la.name for la in self.layers if by_name[la.name] is not la}
        )
        if doubles:
            self._problems.append(
                "`layers` must have different names. Received: several layers "
                f"named {doubles}. Pass `name=` to them."
            )

    def _check_choice(self, name: str, value: Any, choices: Any) -> None:
        if value not in list(choices):
            self._problems.append(
                f"`{name}` must be one of {list(choices)}. "
                f"Received: {name}={value!r}."
            )

    def _list_or_none(self, name: str, value: Any) -> list[Any] | None:
        if value is None:
            return None
        if isinstance(value, Iterable) and not isinstance(value, str):
            return [_as_plain(v) for v in value]
        self._problems.append(
            f"`{name}` must be a list, one item a cell. "
            f"Received: {name}={value!r}."
        )
        return None

    def _count(self, name: str, value: Any) -> int:
        """The value, or 1 where it is wrong."""
        value = _as_plain(value)
        if _is_count(value):
            return value
        self._problems.append(
            f"`{name}` must be an integer of at least 1. "
            f"Received: {name}={value!r}."
        )
        return 1

    def _resolve_devices(self, num_partitions: Any) -> None:
        """Finds K and the full names of the devices."""
        is_named = self._named_devices is not None
        if is_named:
            self.devices = self._resolve_named()
        else:
            self.devices = placement.accelerators()
        found = len(self._named_devices or self.devices)
        if isinstance(self.schedule, Schedule):
            self._check_written(num_partitions, is_named, found)
            return
        if num_partitions is None:
            self.num_partitions = found
            return
        self.num_partitions = k = self._count("num_partitions", num_partitions)
        if self.schedule == "interleaved":
            if k % found:
                self._problems.append(
                    "`num_partitions` must be a multiple of the number of "
                    'devices under schedule="interleaved". Received: '
                    f"num_partitions={k} and {found} devices. Change it, or "
                    "name other `devices`."
                )
        elif k > found and not is_named:
            self._problems.append(
                "`num_partitions` must be at most the number of devices. "
                f"Received: num_partitions={k} and the devices "
                f"{self.devices}. Ask for fewer cells, or for "
                'schedule="interleaved" with a multiple of the devices; to '
                "try a pipeline without accelerators, split the CPU with "
                "`tf.config.set_logical_device_configuration` first."
            )
        elif is_named and k != found:
            self._problems.append(
                "`devices` must name one device a cell. Received: "
                f"devices={self._named_devices} and num_partitions={k}. Name "
                "as many as there are cells."
            )
        elif not is_named:
            self.devices = self.devices[:k]

    def _check_written(
        self, num_partitions: Any, is_named: bool, found: int
    ) -> None:
        """Compares a schedule that the user wrote with the other arguments."""
        schedule = self.schedule
        self.num_partitions = schedule.num_cells
        for name, expected, received in (
            ("num_partitions", schedule.num_cells, num_partitions),
            (
                "num_micro_batches",
                schedule.num_micro_batches,
                self.num_micro_batches,
            ),
        ):
            if received not in (None, expected):
                self._problems.append(
                    f"`{name}` must be that of `schedule`, {expected}. "
                    f"Received: {name}={received!r}. Write the schedule for "
                    "as many."
                )
        wanted = schedule.num_devices
        if wanted > found or (is_named and wanted != found):
            self._problems.append(
                f"`schedule` has tasks for {wanted} devices. Received: the "
                f"devices {self._named_devices or self.devices}. Write it for "
                "as many, or name others."
            )

    def _resolve_named(self) -> list[str]:
        found: list[str] = []
        for name in self._named_devices or []:
            full = placement.resolve_device(name)
            if full is None:
                self._problems.append(
                    "`devices` must be devices that TensorFlow lists: "
                    f"{placement.all_devices()}. Received: {name!r}."
                )
                continue
            if full in found:
                self._problems.append(
                    "`devices` must be different from each other. "
                    f"Received: {name!r} more than once. Cells that share a "
                    "device do not run at the same time: use fewer cells."
                )
            found.append(full)
        return found

    def _check_cut(self, is_default: bool) -> None:
        num_layers = len(self.layers)
        k = self.num_partitions
        if k > num_layers > 0:
            default = " (the number of devices)" if is_default else ""
            self._problems.append(
                "`num_partitions` must be at most the number of layers, "
                f"{num_layers}. Received: num_partitions={k}{default}. Ask for "
                "fewer cells, or split a nested model into its layers."
            )
        cut = self.layers_per_cell
        if cut is None:
            return
        if not all(_is_count(n) for n in cut):
            self._problems.append(
                "`layers_per_cell` must hold integers of at least 1. "
                f"Received: layers_per_cell={cut}. Every cell needs a layer."
            )
        elif sum(cut) != num_layers:
            self._problems.append(
                "`layers_per_cell` must place every layer exactly once. "
                f"Expected a sum of {num_layers} (the number of layers). "
                f"Received: layers_per_cell={cut} (sum {sum(cut)}). "
                "Omit it to let `GPipe` balance the cells by cost."
            )
        elif len(cut) != k:
            self._problems.append(
                "`layers_per_cell` must have one number for each of the "
                f"{k} cells. Received: layers_per_cell={cut}. Pass "
                f"num_partitions={len(cut)} with it."
            )


def _as_lists(schedule: Any) -> Any:
    """A schedule as a file can hold it."""
    if not isinstance(schedule, Schedule):
        return schedule
    return [[list(task) for task in own] for own in schedule.tasks]


def _as_plain(value: Any) -> Any:
    """NumPy's integers as Python's, for files; else the value."""
    is_integer = isinstance(value, numbers.Integral)
    return int(value) if is_integer and value is not True else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value is not True and value >= 1


def _is_pair(item: Any) -> bool:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    return not isinstance(item[1], (keras.layers.Layer, keras.KerasTensor))


def _is_input(item: Any) -> bool:
    return isinstance(item, (keras.layers.InputLayer, keras.KerasTensor))


def _input_spec(item: Any) -> Any:
    """The spec of a `keras.Input` or `keras.layers.InputLayer`, or None."""
    if not _is_input(item):
        return None
    is_tensor = isinstance(item, keras.KerasTensor)
    shape = item.shape if is_tensor else item.batch_shape
    return keras.KerasTensor((None, *shape[1:]), item.dtype)
