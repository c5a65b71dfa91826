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
    """

    def __init__(self, functions: Sequence[CellFunction]):
        self._functions = functions
        self._first: list[list[list[tf.Tensor]]] = []
        for function in functions:
            with tf.device(function.device):
                self._first.append(
                    tree.map_structure(
                        placement.read_variable, function.weights
                    )
                )
        self._sent: dict[tuple[int, str], list[list[tf.Tensor]]] = {}

    def cast(self, tasks: Sequence[Any]) -> None:
        """Casts weights where a cell would do so for every micro-batch.

        Args:
            tasks: What runs the tasks of each cell.
        """
        for k, (cell, function) in enumerate(zip(tasks, self._functions)):
            values = self._first[k]
            with tf.device(function.device):
                self._first[k] = tf.nest.pack_sequence_as(
                    values, cell.cast_weights(tf.nest.flatten(values))
                )

    def of(self, k: int, device: str) -> list[list[tf.Tensor]]:
        """The weights of cell k, a list a layer, on a device."""
        if device == self._functions[k].device:
            return self._first[k]
        if (k, device) not in self._sent:
            # Sent when the step begins, not when they are used first.
            with tf.control_dependencies(None), tf.device(device):
                self._sent[k, device] = tree.map_structure(
                    tf.identity, self._first[k]
                )
        return self._sent[k, device]
