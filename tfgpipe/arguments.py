"""Checks the arguments of `GPipe` before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfgpipe import placement
from tfgpipe.pipeline import REMAT
from tfgpipe.schedule import SCHEDULES


class Arguments:
    """The arguments of a `GPipe`, checked and completed.

    Args:
        layers: See `GPipe`, as all others.
        num_partitions: K or None.
        num_micro_batches: M.
        devices: Names, or None.
        layers_per_cell: The cut, or None.
        schedule: Name of the schedule.
        remat: Name of the rule.

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
        schedule: str,
        remat: str,
    ):
        self._problems: list[str] = []
        self.layers: list[keras.layers.Layer] = []
        self.costs: list[Any] = []
        self.input_spec: Any = None
        self._check_layers(layers)
        self._named_devices = None if devices is None else list(devices)
        self.layers_per_cell = (
            None if layers_per_cell is None else list(layers_per_cell)
        )
        self.schedule = schedule
        self.remat = remat
        self.num_micro_batches = num_micro_batches
        self._check_choice("schedule", schedule, SCHEDULES)
        self._check_choice("remat", remat, REMAT)
        self._check_count("num_micro_batches", num_micro_batches)
        self.devices = self._resolve_devices(num_partitions)
        self.num_partitions = (
            len(self.devices) if num_partitions is None else num_partitions
        )
        self._check_cut()
        if self._problems:
            raise ValueError("\n".join(self._problems))
        self.devices = self.devices[: self.num_partitions]

    def config(self) -> dict[str, Any]:
        """The arguments other than the layers, as plain values."""
        return {
            "num_partitions": self.num_partitions,
            "num_micro_batches": self.num_micro_batches,
            "devices": self._named_devices,
            "layers_per_cell": self.layers_per_cell,
            "schedule": self.schedule,
            "remat": self.remat,
        }

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
            is_pair = isinstance(item, (tuple, list)) and len(item) == 2
            layer, cost = item if is_pair else (item, None)
            if not isinstance(layer, keras.layers.Layer):
                self._problems.append(
                    "`layers` must hold Keras layers or pairs (layer, cost). "
                    f"Received: {item!r} (of type {type(item).__name__}) at "
                    f"index {index}. Wrap a function in "
                    "`keras.layers.Lambda`."
                )
                continue
            self.layers.append(layer)
            self.costs.append(cost)
        self._check_names()

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

    def _check_count(self, name: str, value: Any) -> bool:
        if isinstance(value, int) and not isinstance(value, bool):
            if value >= 1:
                return True
        self._problems.append(
            f"`{name}` must be an integer of at least 1. "
            f"Received: {name}={value!r}."
        )
        return False

    def _resolve_devices(self, num_partitions: Any) -> list[str]:
        """Full names of the devices, at least `num_partitions` of them."""
        found = placement.accelerators()
        if self._named_devices is not None:
            found = self._resolve_named()
        if num_partitions is None:
            return found
        if not self._check_count("num_partitions", num_partitions):
            return found
        if num_partitions > len(found):
            self._problems.append(
                "`num_partitions` must be at most the number of devices. "
                f"Received: num_partitions={num_partitions} and the devices "
                f"{found}. Ask for fewer cells; to try a pipeline without "
                "accelerators, split the CPU with "
                "`tf.config.set_logical_device_configuration` first."
            )
        elif self._named_devices is not None and num_partitions != len(found):
            self._problems.append(
                "`devices` must name one device a cell. Received: "
                f"{len(found)} devices and num_partitions={num_partitions}. "
                "Name as many as there are cells."
            )
        return found

    def _resolve_named(self) -> list[str]:
        found = []
        for name in self._named_devices:
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

    def _check_cut(self) -> None:
        num_layers = len(self.layers)
        k = self.num_partitions
        if isinstance(k, int) and k > num_layers > 0:
            self._problems.append(
                "`num_partitions` must be at most the number of layers, "
                f"{num_layers}. Received: num_partitions={k}. Ask for fewer "
                "cells, or split a nested model into its layers."
            )
        cut = self.layers_per_cell
        if cut is None:
            return
        if not all(isinstance(n, int) and n >= 1 for n in cut):
            self._problems.append(
                "`layers_per_cell` must hold positive integers. "
                f"Received: layers_per_cell={cut}."
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


def _input_spec(item: Any) -> Any:
    """The spec of a `keras.Input` or `keras.layers.InputLayer`, or None."""
    if isinstance(item, keras.layers.InputLayer):
        return keras.KerasTensor(item.batch_shape, item.dtype)
    if isinstance(item, keras.KerasTensor):
        return keras.KerasTensor(item.shape, item.dtype)
    return None
