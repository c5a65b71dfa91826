"""The values of the trainable variables during one mini-batch.

A variable is read once, on its own device, and sent to the same cell's devices
in other replicas. What a cell only casts is cast once, before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from tfgpipe import placement
from tfgpipe.cell_function import CellFunction


class Weights:
    """The values of all cells' weights, on every device that needs them.

    Args:
        functions: The cells' functions.

    Attributes:
        values: Of each cell, a list a layer, on the variables' devices.
    """

    def __init__(self, functions: Sequence[CellFunction]):
        self._functions = functions
        self.values: list[list[list[tf.Tensor]]] = []
        for function in functions:
            with tf.device(function.device):
                self.values.append(
                    tree.map_structure(
                        placement.read_variable, function.weights
                    )
                )
        self._tasks: Sequence[Any] = []
        self._packed: dict[tuple[int, str], Any] = {}

    def cast(self, tasks: Sequence[Any]) -> None:
        """Casts weights where a cell would do so for every micro-batch.

        Args:
            tasks: What runs the tasks of each cell.
        """
        self._tasks = tasks
        for k, (cell, function) in enumerate(zip(tasks, self._functions)):
            values = self.values[k]
            with tf.device(function.device):
                self.values[k] = tf.nest.pack_sequence_as(
                    values, cell.cast_weights(tf.nest.flatten(values))
                )

    def packed(self, k: int, device: str) -> Any:
        """The weights of cell k on a device, as its tasks take them."""
        if (k, device) not in self._packed:
            values = self.values[k]
            # Sent when the step begins, not when they are used first.
            with tf.control_dependencies(None), tf.device(device):
                if device != self._functions[k].device:
                    values = tree.map_structure(tf.identity, values)
                self._packed[k, device] = self._tasks[k].pack_weights(values)
        return self._packed[k, device]
