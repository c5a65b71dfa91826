"""The values of the trainable variables during one mini-batch.

A variable has one owner among the devices of its cell's column: one a replica.
It is read once, there, and sent to the others; what a cell only casts is cast
before that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe.cells import Cell, CellFunction
from tfgpipe.devices import placement


def place_variables(cells: Iterable[Cell], placed: Collection[int]) -> None:
    """Puts each variable onto its device.

    The trainable ones of a cell are shared out among its devices. What cells
    share belongs to the first of them.

    Args:
        cells: The cells.
        placed: ids of variables that stay where they are.
    """
    known = set(placed)

    def new(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
        found = {id(v): v for v in variables if id(v) not in known}
        known.update(found)
        return list(found.values())

    for cell in cells:
        weights = new(v for layer in cell.weights_by_layer for v in layer)
        for device, own in _shared_out(weights, cell.devices).items():
            placement.create_or_move(own, device)
        placement.create_or_move(new(cell.state), cell.device)


def _shared_out(
    variables: Sequence[keras.Variable], devices: Sequence[str]
) -> dict[str, list[keras.Variable]]:
    """Gives each device about as many bytes of variables."""
    owned: dict[str, list[keras.Variable]] = {device: [] for device in devices}
    held = dict.fromkeys(devices, 0)
    for variable in sorted(variables, key=placement.num_bytes, reverse=True):
        device = min(devices, key=held.__getitem__)
        owned[device].append(variable)
        held[device] += placement.num_bytes(variable)
    return owned


class Weights:
    """The values of all cells' weights, on every device that needs them.

    What a cell only casts, for every micro-batch, is cast once here.

    Args:
        functions: The cells' functions.
        tasks: What runs the tasks of each cell.
    """

    def __init__(self, functions: Sequence[CellFunction], tasks: Sequence[Any]):
        self._functions = functions
        self._tasks = tasks
        self._values = [
            tf.nest.pack_sequence_as(
                function.weights,
                [
                    self._read(variable, dtype)
                    for variable, dtype in zip(
                        function.flat_weights, own.weight_dtypes
                    )
                ],
            )
            for function, own in zip(functions, tasks)
        ]
        self._packed: dict[tuple[int, str], Any] = {}

    def _read(self, variable: keras.Variable, dtype: Any) -> tf.Tensor:
        with tf.device(variable.value.device):
            return tf.cast(placement.read_variable(variable), dtype)

    def packed(self, k: int, device: str) -> Any:
        """The weights of cell k on a device, as its tasks take them."""
        if (k, device) not in self._packed:
            values = self._values[k]
            # Sent when the step begins, not when they are used first.
            with tf.control_dependencies(None), tf.device(device):
                values = tree.map_structure(
                    lambda variable, value: self._sent(variable, value, device),
                    self._functions[k].weights,
                    values,
                )
                self._packed[k, device] = self._tasks[k].pack_weights(values)
        return self._packed[k, device]

    def _sent(
        self, variable: keras.Variable, value: tf.Tensor, device: str
    ) -> tf.Tensor:
        """A value on the current device, which has this name."""
        if placement.same_device(variable.value.device, device):
            return value
        return tf.identity(value)
