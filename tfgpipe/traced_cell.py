"""A cell as one TensorFlow graph, with its backward pass.

Python runs the layers once, in a graph, and `differentiate.py` adds the
operations that differentiate them. `cell_tasks.py` has functions cut out of
this graph, one for each kind of task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals, placement
from tfgpipe.bundle import Bundle, by_reference, tensors
from tfgpipe.cell_function import CellFunction
from tfgpipe.cell_values import Arguments, Output, any_rows, is_continuous
from tfgpipe.differentiate import differentiate
from tfgpipe.gradients import dense, in_dtype
from tfgpipe.moments import is_sum
from tfgpipe.sparse import RowDependence, parts
from tfgpipe.stages import Stages
from tfgpipe.subgraph import Subgraphs


class TracedCell:
    """The graph of a cell, or of several equal ones.

    Args:
        function: The cell's function.
        specs: `Arguments` of `tf.TensorSpec`s.
        input_structure: A nest like the inputs.
        jit_compile: Whether XLA compiles what is cut out of it.
        gradient_dtype: See `Tracer`.

    Attributes:
        cell: The cell, the first of the equal ones.
        inputs: The arguments, tensors of the graph.
        outputs: The outputs, tensors of the graph.
        operations: The operations of the forward pass.
        totals: What of it is added up over replicas.
        recomputes_in_backward: Whether `backward` computes again what it needs
            itself.
        draws: See `CellFunction`, as `starts`, `output_structure` and
            `num_head_losses`.
        dy: The gradients of the output tensors, None where there are none.
        dlosses: Those of the losses.
        dx: The gradients of the input tensors, None where there are none.
        dw: Those of the flat weights; lists where they are sparse.
        repeated: For each of `dw`, and each part of it if it is sparse,
            whether its indices are the same for all micro-batches.
        weights: The flat weights, or the casts of those that are only cast.
        kept: What the backward pass needs of the forward pass.
        crossing: What the second half of the backward pass needs of the first.
        sums: Those of `dw` that are dense.
    """

    inputs: Arguments
    outputs: Output
    weights: Bundle
    kept: Bundle
    crossing: Bundle
    sums: Bundle

    def __init__(
        self,
        function: CellFunction,
        specs: Arguments,
        input_structure: Any,
        jit_compile: bool,
        gradient_dtype: str | None,
    ):
        self.cell = function.cell
        # XLA cannot hand the state of loops from function to function.
        self.recomputes_in_backward = jit_compile
        self._made_from = (
            function,
            specs,
            input_structure,
            jit_compile,
            gradient_dtype,
        )
        self._jit_compile = jit_compile
        self._gradient_dtype = gradient_dtype
        self._options: dict[str, Any] = {"autograph": False}
        if jit_compile:
            self._options["jit_compile"] = True
        else:  # inlined, the calls would lose their place in the schedule
            self._options["experimental_attributes"] = {"_noinline": True}
        self._graph = self._trace(function, specs, input_structure)
        self._effects = list(self._graph.control_outputs)
        self.operations = list(self._graph.get_operations())
        self.totals = [op.outputs[0] for op in self.operations if is_sum(op)]
        self.draws = function.draws
        self.starts = function.starts
        self.output_structure = function.output_structure
        self.num_head_losses = function.num_head_losses
        self._has_gradient: tuple[bool, ...] | None = None
        self.dy: list[Any] = []
        self.dlosses: list[Any] = []
        self.dx: list[Any] = []
        self.dw: list[Any] = []
        self.repeated: list[list[bool]] = []
        self._functions: dict[Any, Stages] = {}

    def again(self) -> TracedCell:
        """Another trace of the same."""
        return TracedCell(*self._made_from)

    def _trace(
        self, function: CellFunction, specs: Arguments, input_structure: Any
    ) -> Any:
        def run(*arguments: Any) -> Any:
            self.inputs = Arguments(*arguments)
            self.outputs = function(self.inputs, input_structure, True)
            return self.outputs

        traced = tf.function(run, **self._options)
        graph = traced.get_concrete_function(*specs).graph
        function.cell.check_by_itself(graph)
        return graph

    # ------------------------------------------------------ the backward pass
    def is_differentiated_for(self, has_gradient: Sequence[bool]) -> bool:
        """Whether `differentiate` may be called with that."""
        return self._has_gradient in (None, tuple(has_gradient))

    def differentiate(self, has_gradient: Sequence[bool]) -> list[bool]:
        """Adds the backward pass to the graph.

        Args:
            has_gradient: For each output tensor, whether it will have a
                gradient.

        Returns:
            The same for each input tensor.
        """
        if self._has_gradient is None:
            self._has_gradient = tuple(has_gradient)
            with self._graph.as_default(), self._for_xla():
                self.dy = [
                    tf.compat.v1.placeholder(t.dtype, t.shape) if has else None
                    for t, has in zip(self.outputs.tensors, has_gradient)
                ]
                self.dlosses = [
                    tf.compat.v1.placeholder(loss.dtype, loss.shape)
                    for loss in self.outputs.losses
                ]
                self.dx, self.dw = self._gradients()
            self.repeated = self._repeated_parts(has_gradient)
        return [d is not None for d in self.dx]

    def _for_xla(self) -> Any:
        """Inside, loops are differentiated as XLA needs it, if it compiles."""
        if self._jit_compile:
            return internals.in_xla()
        return contextlib.nullcontext()

    def _gradients(self) -> tuple[list[Any], list[Any]]:
        targets = [
            t for t, d in zip(self.outputs.tensors, self.dy) if d is not None
        ]
        if not targets and not self.outputs.losses:
            num_weights = len(self.inputs.sources(with_inputs=False))
            none = [None] * len(self.inputs.inputs.tensors)
            return none, [None] * num_weights
        found = differentiate(
            self.operations,
            self.starts,
            [*targets, *self.outputs.losses],
            [*tensors(self.dy), *self.dlosses],
            self.inputs.sources(with_inputs=True),
        )
        self._check_gradients()
        iterator = iter(found)
        dx = [
            dense(next(iterator)) if is_continuous(t) else None
            for t in self.inputs.inputs.tensors
        ]
        return dx, [
            parts(d)
            if isinstance(d, tf.IndexedSlices)
            else in_dtype(d, self._gradient_dtype)
            for d in iterator
        ]

    def _repeated_parts(self, has_gradient: Sequence[bool]) -> list[list[bool]]:
        """See `repeated`."""
        depends = RowDependence(
            tensors([self.inputs.inputs, self.inputs.labels, self.dy])
        )
        found = [
            [not depends(part.indices) for part in d]
            if isinstance(d, list)
            else []
            for d in self.dw
        ]
        function, specs, *others = self._made_from
        relaxed = specs.specs(any_rows)
        if relaxed == specs or not any(map(any, found)):
            return found
        # What follows from a number of rows that is known looks constant.
        same = TracedCell(function, relaxed, *others)
        same.differentiate(has_gradient)
        return same.repeated

    def _check_gradients(self) -> None:
        """Refuses what TensorFlow can differentiate once at a time."""
        new = self._graph.get_operations()[len(self.operations) :]
        if any(op.type == "EagerPyFunc" for op in new):
            raise ValueError(
                "Layers must not need the gradient of `tf.py_function`: it is "
                "that of its last call, which another micro-batch may have "
                "made. Received: a layer with such a call, see the warning "
                "above. Use TensorFlow's operations, or `tf.numpy_function` "
                "in a `tf.custom_gradient`."
            )

    # ----------------------------------------------------------- what is cut
    def finish(self) -> None:
        """To be called when all operations are there, before what follows."""
        if hasattr(self, "_cut"):
            return
        device_types = placement.device_types(self.cell.devices)
        together = len(device_types) == 1 and not self._jit_compile
        self._together = together
        self._cut = Subgraphs(self._graph, self._options, device_types[0])
        weights = [
            _only_cast(w) or [w] for w in self.inputs.sources(with_inputs=False)
        ]
        self.weights = Bundle(weights, together)
        others = tensors([self.inputs._replace(weights=[]), self.dy])
        others += self.dlosses
        self._at_hand = [*others, self.weights]
        at_hand = [*others, *self.weights.aliases, *self.totals]
        start = len(self.operations)
        backward = self._cut.needed(tensors([self.dx, self.dw]), start)
        half = self._cut.needed(tensors(self.dx), start)
        kept = self._cut.entering(backward, at_hand)
        crossing = self._cut.entering(backward - half, [*at_hand, *kept])
        self.kept = Bundle(kept, together)
        self.crossing = Bundle(crossing, together)
        self.sums = Bundle(
            [d for d in self.dw if isinstance(d, tf.Tensor)], together
        )

    def function(
        self,
        key: Any,
        inputs: Sequence[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        sums: Bundle | None = None,
        with_effects: bool = False,
    ) -> Stages:
        """A function of the arguments.

        Args:
            key: Which function it is: asked for again, it is the same one.
            inputs: What else of the graph it may take.
            fetches: What of the graph it returns.
            sums: See `Subgraphs.function`.
            with_effects: Whether it has the layers' side effects.
        """
        if key not in self._functions:
            self._functions[key] = Stages(
                self._cut,
                [*self._at_hand, *inputs],
                fetches,
                self._effects if with_effects else (),
                sums,
                self._together,
            )
        return self._functions[key]

    def values(self, arguments: Arguments) -> dict[Any, Any]:
        """Arguments by what they are of the graph.

        Args:
            arguments: The arguments; weights are packed.
        """
        own = self.inputs._replace(weights=[], totals=self.totals)
        values = by_reference(
            tf.nest.flatten(own),
            tf.nest.flatten(arguments._replace(weights=[])),
        )
        return {**values, self.weights: arguments.weights}


def _only_cast(weight: tf.Tensor) -> list[tf.Tensor] | None:
    """A weight's casts, if all that happens to it is casts to one dtype."""
    consumers = weight.consumers()
    casts = [op.outputs[0] for op in consumers if op.type == "Cast"]
    same = len({t.dtype for t in casts}) == 1
    return casts if same and len(casts) == len(consumers) else None
