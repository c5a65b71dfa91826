"""A cell that runs eagerly, for debugging: see `task.py`."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from tfgpipe.cells import gradients
from tfgpipe.cells.function import CellFunction
from tfgpipe.cells.stages import Exchange
from tfgpipe.cells.traced import TracedCell
from tfgpipe.cells.values import Arguments, any_rows, is_continuous


class _WaitsForTotal(BaseException):
    """Ends a run of layers; not an error that a layer may catch."""


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

    def forward(self, arguments: Arguments, keeps: bool) -> Exchange:
        """Computes the outputs; keeps a tape for the backward pass."""
        return (yield from self._run(arguments, keeps, first=True))

    def recompute(self, arguments: Arguments) -> Exchange:
        """Computes the outputs again, on a tape."""
        return (yield from self._run(arguments, True, first=False))[-1]

    def _run(self, arguments: Arguments, keeps: bool, first: bool) -> Exchange:
        """Runs the layers; from the first one again with every new total.

        A total is a constant of the tape: `backward` adds up its gradients.
        """
        totals = list(arguments.totals)
        own: list[tf.Tensor] = []

        def add_up(tensor: tf.Tensor) -> tf.Tensor:
            own.append(tensor)
            if len(own) > len(totals):
                raise _WaitsForTotal
            return totals[len(own) - 1]

        while True:
            with tf.GradientTape(
                persistent=self._function.synchronizes,
                watch_accessed_variables=False,
            ) as tape:
                if keeps:
                    sources = arguments.sources(self._needs_dx)
                    tape.watch([*sources, *totals])
                with contextlib.suppress(_WaitsForTotal):
                    output = self._function(
                        arguments, self._structure, first, add_up
                    )
                    return output, totals, (tape, output, own, totals)
            totals += yield own[-1:]
            own.clear()

    def backward(
        self,
        arguments: Arguments,
        kept: Any,
        dy: list[Any],
        dlosses: list[Any],
        sums: list[Any] | None,
        m: int,
    ) -> Exchange:
        """Computes the gradients."""
        tape, output, own, totals = kept
        sources = arguments.sources(self._needs_dx)
        targets = [t for t, d in zip(output.tensors, dy) if d is not None]
        targets += output.losses
        seeds = [d for d in dy if d is not None] + dlosses
        for tensor, total in zip(reversed(own), reversed(totals)):
            (d,) = yield tape.gradient(targets, [total], seeds, "zero")
            targets, seeds = [*targets, tensor], [*seeds, d]
        found = tape.gradient(targets, sources, output_gradients=seeds)
        num_weights = len(arguments.sources(with_inputs=False))
        iterator = iter(found)
        dx = [
            gradients.dense(next(iterator))
            if self._needs_dx and is_continuous(t)
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
