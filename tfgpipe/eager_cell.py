"""A cell that runs eagerly, for debugging: see `cell_tasks.py`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfgpipe import gradients
from tfgpipe.cell import Output
from tfgpipe.cell_function import (
    Arguments,
    CellFunction,
    any_rows,
    is_float,
)
from tfgpipe.traced_cell import TracedCell


class EagerCell:
    """The tasks of a cell, run by Python.

    Args:
        function: The cell's function.
        before: The cell before in a list, empty for the first cell.
        input_structure: A nest like the inputs of the first cell.
        needs_dx: Whether the gradients of the inputs are wanted.
        gradient_dtype: See `Tracer`.

    Attributes:
        is_split: See `CellTasks`.
    """

    is_split = False

    def __init__(
        self,
        function: CellFunction,
        before: list[EagerCell],
        input_structure: Any,
        needs_dx: bool,
        gradient_dtype: str | None,
    ):
        self._function = function
        self._before = before
        self._input_structure = input_structure
        self._needs_dx = needs_dx
        self._gradient_dtype = gradient_dtype
        self._repeated: list[list[bool]] | None = None

    @property
    def output_structure(self) -> Any:
        """See `CellFunction`."""
        return self._function.output_structure

    @property
    def num_head_losses(self) -> int:
        """See `CellFunction`."""
        return self._function.num_head_losses

    @property
    def _structure(self) -> Any:
        """A nest like the inputs."""
        if self._before:
            return self._before[-1].output_structure
        return self._input_structure

    @property
    def weight_dtypes(self) -> list[Any]:
        """Those of the flat weights."""
        return [v.dtype for v in self._function.flat_weights]

    def pack_weights(self, weights: Any) -> Any:
        """The weights."""
        return weights

    def unpack_sums(self, sums: list[Any]) -> list[Any]:
        """The sums."""
        return sums

    def forward(self, arguments: Arguments, keeps: bool) -> tuple[Output, Any]:
        """Computes the outputs; keeps a tape for the backward pass."""
        return self._run(arguments, keeps, first=True)

    def recompute(self, arguments: Arguments) -> Any:
        """Computes the outputs again, on a tape."""
        return self._run(arguments, True, first=False)[1]

    def _run(
        self, arguments: Arguments, keeps: bool, first: bool
    ) -> tuple[Output, Any]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            if keeps:
                tape.watch(arguments.sources(self._needs_dx))
            output = self._function(arguments, self._structure, first)
        return output, (tape, output)

    def backward(
        self,
        arguments: Arguments,
        kept: Any,
        dy: list[Any],
        dlosses: list[Any],
        sums: list[Any] | None,
        m: int,
    ) -> tuple[list[Any], list[Any]]:
        """Computes the gradients."""
        tape, output = kept
        sources = arguments.sources(self._needs_dx)
        found = tape.gradient(
            [t for t, d in zip(output.tensors, dy) if d is not None]
            + output.losses,
            sources,
            output_gradients=[d for d in dy if d is not None] + dlosses,
        )
        num_weights = len(arguments.sources(with_inputs=False))
        iterator = iter(found)
        dx = [
            gradients.dense(next(iterator))
            if self._needs_dx and is_float(t)
            else None
            for t in arguments.inputs.tensors
        ]
        dw = [
            [d]
            if isinstance(d, tf.IndexedSlices)
            else gradients.in_dtype(d, self._gradient_dtype)
            for d in found[len(found) - num_weights :]
        ]
        if self._repeated is None:
            self._repeated = [[] for _ in dw]
            if any(isinstance(d, list) for d in dw):
                has_gradient = [d is not None for d in dy]
                self._repeated = self._traced_parts(arguments, has_gradient)
        return dx, gradients.add(sums or [], dw, m, self._repeated)

    def _traced_parts(
        self, arguments: Arguments, has_gradient: list[bool]
    ) -> list[list[bool]]:
        """What `TracedCell.repeated` says of sparse gradients."""
        traced = TracedCell(
            self._function,
            arguments.specs(any_rows),
            self._structure,
            False,
            None,
        )
        traced.differentiate(has_gradient)
        kinds = [set(same) for same in traced.repeated]
        if any(len(kind) > 1 for kind in kinds):
            raise ValueError(
                "With `run_eagerly=True` a layer must not look up a weight "
                "both by its inputs and by constants, such as positions: the "
                "gradients cannot be told apart. Train without it."
            )
        return [list(kind) for kind in kinds]
