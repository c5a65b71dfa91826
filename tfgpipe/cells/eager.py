"""Cells that run eagerly, for debugging: see `tracer.py` and `tasks.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe.cells.backward import of_lookups
from tfgpipe.cells.function import CellFunction, Findings
from tfgpipe.cells.gradients import Gradient, as_merged, as_tensor
from tfgpipe.cells.seen import Seen, differ
from tfgpipe.cells.values import (
    CellArguments,
    Output,
    is_continuous,
    structure_of,
)
from tfgpipe.schedules import Facts


class EagerTracer:
    """Has Python run the tasks of cells; does what `Tracer` does in a graph.

    Args:
        gradient_dtype: See `Tracer`.
    """

    can_recompute = True

    def __init__(self, gradient_dtype: str | None):
        self._gradient_dtype = gradient_dtype

    def led(self, x: Any) -> Any:
        """The mini-batch."""
        return x

    def trace(
        self, functions: Sequence[CellFunction], x: Any, *_: Any
    ) -> list[EagerCell]:
        """Makes cells that follow each other; runs nothing."""
        made: list[EagerCell] = []
        makers: dict[int, Any] = {}
        for function in functions:
            if function.synchronizes:
                raise ValueError(
                    "Batch normalisation over replicas must be trained in a "
                    "graph, where replicas wait for each other. Received: "
                    "run_eagerly=True and a layer with synchronized=True in "
                    f"cell {function.cell.number}. Debug with one replica, or "
                    "with synchronized=False."
                )
            dtype = self._gradient_dtype
            made.append(
                EagerCell(function, made[-1:], structure_of(x), dtype, makers)
            )
        return made

    def differentiate(self, cells: list[EagerCell], *_: Any) -> list[EagerCell]:
        """The cells: tapes do it."""
        return cells

    def tasks(
        self, cells: list[EagerCell], needs_dx: Sequence[bool]
    ) -> list[EagerCell]:
        """The cells, which know whether gradients of inputs are wanted."""
        for cell, needs in zip(cells, needs_dx):
            cell.needs_dx = needs
        return cells


class EagerCell:
    """The tasks of a cell, run by Python.

    Args:
        function: The cell's function.
        before: The cell before in a list, empty for the first cell.
        input_structure: A nest like the inputs of the first cell.
        gradient_dtype: See `Tracer`.
        makers: For all cells, see `Seen`.

    Attributes:
        needs_dx: Whether the gradients of the inputs are wanted.
        findings: What the layers were seen to do when they ran last.
    """

    def __init__(
        self,
        function: CellFunction,
        before: list[EagerCell],
        input_structure: Any,
        gradient_dtype: str | None,
        makers: dict[int, Any],
    ):
        self._function = function
        self._before = before
        self._input_structure = input_structure
        self._gradient_dtype = gradient_dtype
        self.needs_dx = True
        self._seen: Seen | None = Seen(function.cell, makers)
        self._returned: Any = None
        self.findings = Findings([0] * len(function.seeds), [], None, 0)

    @property
    def _structure(self) -> Any:
        """A nest like the inputs."""
        if self._before:
            return self._before[-1].findings.output_structure
        return self._input_structure

    def _moved_before(self) -> frozenset[int]:
        """The moving statistics, by id, that earlier cells have moved."""
        return frozenset(
            id(v)
            for cell, made in self._earlier()
            for layer, calls in zip(cell.normalizations, made.moments)
            for v in (layer.moving_mean, layer.moving_variance)
            if calls
        )

    def _earlier(self) -> Iterator[tuple[CellFunction, Output]]:
        """The functions of the cells before, and what they returned last."""
        for cell in self._before:
            yield from cell._earlier()
            yield cell._function, cell._returned

    @property
    def weight_dtypes(self) -> list[Any]:
        """Those of the flat weights."""
        return [v.dtype for v in self._function.flat_weights]

    def facts(self, has_backward: bool) -> Facts:
        """See `CellTasks`; a tape has no halves."""
        return Facts(has_backward, self.needs_dx, has_halves=False)

    def pack_weights(self, weights: Any) -> Any:
        """The weights."""
        return weights

    def unpack_sums(self, sums: list[Gradient]) -> list[Gradient]:
        """The sums."""
        return sums

    def forward(self, arguments: CellArguments, keeps: bool) -> Callable:
        """A task that computes the outputs, on a tape if it is kept."""
        return functools.partial(self._run, arguments, keeps, first=True)

    def recompute(self, arguments: CellArguments, kept: Any) -> Callable:
        """A task that computes the outputs again, on a tape."""
        return functools.partial(self._run_again, arguments, kept)

    def _run(
        self, arguments: CellArguments, keeps: bool, first: bool
    ) -> tuple[Output, Any]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            if keeps:
                tape.watch(arguments.sources(self.needs_dx))
            output, self.findings = self._called(arguments, first)
        self._returned = output
        return output, (tape if keeps else None, output)

    def _called(
        self, arguments: CellArguments, first: bool
    ) -> tuple[Output, Findings]:
        """What the function returns; at first it is seen what it runs."""
        call = functools.partial(
            self._function,
            arguments,
            self._structure,
            first,
            self._moved_before(),
        )
        seen, self._seen = self._seen, None
        if seen is None:
            return call()
        with seen.watching(arguments):
            output, findings = call(num_operations=seen.count)
        seen.check(findings, self._function.recomputes)
        return output, findings

    def _run_again(self, arguments: CellArguments, kept: Any) -> Any:
        """A recomputation, which must come to the same outputs."""
        output, again = self._run(arguments, True, first=False)
        if differ(kept[1], output):
            cell = self._function.cell
            raise ValueError(
                "With `remat` a cell must compute the same again in the "
                "backward pass, or the gradient is wrong. Received: other "
                f"outputs of cell {cell.number} with the layers "
                f"{[layer.name for layer in cell.sequence]}, whose Python code "
                "draws random numbers, or counts calls. Draw with "
                "`keras.random` and a `keras.random.SeedGenerator` attribute "
                'of the layer, or pass `remat="never"`.'
            )
        return again

    def backward(self, *arguments: Any) -> Callable:
        """A task that computes the gradients, see `CellTasks`."""
        return functools.partial(self._differentiate, *arguments)

    def _differentiate(
        self,
        arguments: CellArguments,
        kept: Any,
        dy: Sequence[Any],
        dlosses: Sequence[Any],
        sums: list[Gradient] | None,
        m: int,
    ) -> tuple[list[Any], list[Gradient]]:
        tape, output = kept
        seeds = [*dy, *dlosses]
        targets = zip([*output.tensors, *output.losses], seeds)
        found = tape.gradient(
            [t for t, d in targets if d is not None],
            arguments.sources(self.needs_dx),
            output_gradients=[d for d in seeds if d is not None],
        )
        num_weights = len(arguments.sources(with_inputs=False))
        iterator = iter(found)
        dx = [
            as_tensor(next(iterator))
            if self.needs_dx and is_continuous(t)
            else None
            for t in arguments.inputs.tensors
        ]
        dw = [
            as_merged(Gradient(slices={(0, 0): d}), variable)
            if isinstance(d, tf.IndexedSlices)
            else of_lookups(d, variable).in_dtype(self._gradient_dtype)
            for d, variable in zip(
                found[len(found) - num_weights :], self._function.flat_weights
            )
        ]
        own = [
            d.of_micro_batch(m, [same] * len(d.slices))
            for d, same in zip(dw, self._repeated)
        ]
        return dx, own if sums is None else [
            a.plus(b) for a, b in zip(sums, own)
        ]

    @functools.cached_property
    def _repeated(self) -> list[bool]:
        """For each weight, whether its lookups are: a tape joins them."""
        pairs = zip(self._function.flat_weights, self._function.repeated)
        kinds = [(v.path, set(known)) for v, known in pairs]
        if mixed := [path for path, kind in kinds if len(kind) > 1]:
            raise ValueError(
                "With `run_eagerly=True` a layer must not look up a weight "
                "both by its inputs and by constants, such as positions: the "
                "gradients cannot be told apart. Received: lookups of "
                f"{mixed}. Train without it, or use a weight for each."
            )
        return [True in kind for _, kind in kinds]
