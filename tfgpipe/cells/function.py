"""A cell with all that says how it is run, for a trial of its layers."""

from __future__ import annotations

from typing import Any

from tfgpipe.cells.cell import Cell


class CellFunction:
    """What is run of a cell.

    `head` is the loss and metrics computed with the last cell, or None;
    `recomputes` is whether any micro-batch is computed again; `is_split`
    whether there are several.

    Attributes:
        weights: The trainable variables, a list a layer.
        seeds: The random seeds.
    """

    def __init__(
        self,
        cell: Cell,
        training: bool,
        head: Any,
        recomputes: bool,
        is_split: bool = False,
    ):
        self.cell = cell
        self.device = cell.device
        self.training = training
        self.head = head
        self.recomputes = recomputes
        self.is_split = is_split
        self.weights = cell.weights_by_layer
        self.seeds = cell.seeds

    @property
    def flat_weights(self) -> list[Any]:
        """The trainable variables of all layers, in one list."""
        return [v for layer in self.weights for v in layer]
