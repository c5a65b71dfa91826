"""The computation of a cell as two pure functions.

    forward:  inputs, weights, state -> outputs, new state, losses
    backward: the same, and the outputs' gradients -> gradients

The backward function computes the outputs again before it differentiates:
re-materialisation. `tf.recompute_grad` does the same around a function, but it
makes sparse gradients dense, refuses boolean tensors, and has no place for new
state, so the function is written out here.

Each function is traced once and called for every micro-batch. Weights are
arguments, so nothing is captured, and cells with equal functions share them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cell import Boundary, Cell, Output, structure_of
from tfgpipe.micro_batch import MicroBatches
from tfgpipe.state import StateScope
from tfgpipe.stateful_ops import check_operations


class CellFunctions:
    """The forward and the backward function of a cell.

    Args:
        cell: The cell.
        training: The `training` argument of its layers.
        micro_batches: Whose shapes the functions are traced for.
        head: Loss and metrics, computed with the last cell, or None.
        trace: Makes a traced function of a Python function and its argument
            specs, see `trace.Tracer`.
        recomputes: Whether any micro-batch is computed again.
    """

    def __init__(
        self,
        cell: Cell,
        training: bool,
        micro_batches: MicroBatches,
        head: Any,
        trace: Callable,
        recomputes: bool,
    ):
        self.cell = cell
        self.device = cell.device
        self._training = training
        self._spec = micro_batches.spec
        self._head = head
        self._trace = trace
        self._recomputes = recomputes
        self.weights = cell.weights_by_layer
        self.state = cell.state + (head.metric_state if head else [])
        self.chained = {id(v) for v in cell.metric_state} | (
            {id(v) for v in head.metric_state} if head else set()
        )
        self.seeds = cell.seeds
        self.normalizations = cell.normalizations
        self.draws: dict[int, int] = {}
        self.input_structure: Any = None
        self.output_structure: Any = None
        self._traced: dict[str, Callable] = {}

    @property
    def num_head_losses(self) -> int:
        """How many of the losses are the head's."""
        return self._num_head_losses

    def forward(self, *arguments: Any) -> Output:
        """Runs the cell.

        Args:
            *arguments: Boundary of the inputs; weights, a list a layer; state;
                labels, whatever the head takes.
        """
        function = self._function("forward", self._forward, arguments)
        return Output(**function(*arguments))

    def backward(self, *arguments: Any) -> tuple[list[Any], list[Any]]:
        """Runs the cell again and differentiates it.

        Args:
            *arguments: Those of `forward`; the gradients of the output
                tensors, and those of the losses; whether the gradients of the
                inputs are needed.

        Returns:
            The gradients of the input tensors and of the flat weights, None
            where there are none.
        """
        *tensors, needs_inputs = arguments
        result = self._traced_backward(tensors, needs_inputs)(*tensors)
        return result["dx"], result["dw"]

    def only_connected(
        self, found: tuple[list[Any], list[Any]], *arguments: Any
    ) -> tuple[list[Any], list[Any]]:
        """Gradients, with None for those that `backward` does not have.

        To a tape a traced function is one operation: where an output has no
        gradient it takes zeros, and so finds zeros for what only leads there.

        Args:
            found: Gradients that a tape has found.
            *arguments: Those of `backward`.
        """
        *tensors, needs_inputs = arguments
        traced = self._traced_backward(tensors, needs_inputs)
        if tf.executing_eagerly():  # nothing is traced: the tape saw it all
            return found
        known = traced.structured_outputs
        dx, dw = (
            [None if k is None else d for d, k in zip(part, known[name])]
            for part, name in zip(found, ("dx", "dw"))
        )
        return dx, dw

    def _traced_backward(self, tensors: Any, needs_inputs: bool) -> Any:
        def backward(*tensors: Any) -> dict[str, Any]:
            inputs, weights, state, labels, dy, dlosses = tensors
            with self.tape(inputs, weights, needs_inputs) as tape:
                output = self._run(inputs, weights, state, labels, False)
            dx, dw = self.gradients(
                tape, inputs, weights, output, dy, dlosses, needs_inputs
            )
            return {"dx": dx, "dw": dw}

        return self._function("backward", backward, tensors)

    @contextlib.contextmanager
    def tape(
        self, inputs: Boundary, weights: Any, needs_inputs: bool
    ) -> Iterator[tf.GradientTape]:
        """A tape that watches what a backward task differentiates by."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(_sources(inputs, weights, needs_inputs))
            yield tape

    def gradients(
        self,
        tape: tf.GradientTape,
        inputs: Boundary,
        weights: Any,
        output: Output,
        dy: list[Any],
        dlosses: list[Any],
        needs_inputs: bool,
    ) -> tuple[list[Any], list[Any]]:
        """Differentiates what a tape has recorded, see `backward`."""
        targets = [t for t, d in zip(output.tensors, dy) if d is not None]
        seeds = [d for d in dy if d is not None]
        for loss, d in zip(output.losses, dlosses):
            targets.append(loss)
            seeds.append(tf.cast(d, loss.dtype))
        sources = _sources(inputs, weights, needs_inputs)
        found = tape.gradient(targets, sources, output_gradients=seeds)
        num_weights = len(tree.flatten(weights))
        iterator = iter(found)
        dx = [
            next(iterator) if needs_inputs and _is_float(t) else None
            for t in inputs.tensors
        ]
        return dx, found[len(found) - num_weights :]

    def _function(
        self, name: str, function: Callable, arguments: Any
    ) -> Callable:
        if name not in self._traced:
            batched = tf.nest.map_structure(
                self._spec_of, (arguments[0], *arguments[3:5])
            )
            fixed = tf.nest.map_structure(
                lambda t: tf.TensorSpec(t.shape, t.dtype),
                (*arguments[1:3], *arguments[5:]),
            )
            specs = (batched[0], *fixed[:2], *batched[1:], *fixed[2:])
            self._traced[name] = self._trace(function, specs)
        return self._traced[name]

    def _spec_of(self, tensor: Any) -> Any:
        return None if tensor is None else self._spec(tensor)

    def _forward(
        self, inputs: Boundary, weights: Any, state: list[Any], labels: Any
    ) -> dict[str, Any]:
        return self._run(inputs, weights, state, labels, True)._asdict()

    def _run(
        self,
        inputs: Boundary,
        weights: Any,
        state: list[Any],
        labels: Any,
        first: bool,
    ) -> Output:
        """Runs layers and head on given values of all variables.

        `first` is False in a recomputation, which needs no metrics.
        """
        scope = StateScope(
            list(zip(self.state, state)), self.seeds, self.normalizations
        )
        starts: list[int] = []

        def before_layer(i: int) -> None:
            starts.append(_num_operations())
            if i > 0:  # before the next use of a shared weight
                updated.extend(scope.new_values(self.weights[i - 1]))
            scope.use_weights(list(zip(self.weights[i], weights[i])))

        updated: list[Any] = []
        sums, counts = [], []
        x = inputs.nest(self.input_structure)
        with (
            scope,
            internals.recording_moments(self.normalizations, scope.record),
        ):
            y = self.cell(x, before_layer=before_layer, training=self._training)
            updated.extend(scope.new_values(self.weights[-1]))
            if first:
                check_operations(self.cell, starts, self._recomputes)
            if self._head is not None:
                sums, counts = self._head(y, labels, first)
        self._check_unknown(scope)
        self.draws = {id(v): scope.draws[id(v)] for v in self.seeds}
        self.output_structure = structure_of(y)
        self._num_head_losses = len(sums)
        boundary = Boundary.of(y)
        # Where the head has the loss, no gradient comes in by the outputs.
        has_loss = self._head is not None and self._head.streams_loss
        hand_out = tf.stop_gradient if has_loss else tf.identity
        return Output(
            tensors=[
                None if t is None else hand_out(t) for t in boundary.tensors
            ],
            masks=boundary.masks,
            state=scope.new_values(self.state),
            weights=updated,
            losses=sums + list(scope.losses),
            counts=counts,
            moments=[scope.moments[id(v)] for v in self.normalizations],
        )

    def _check_unknown(self, scope: StateScope) -> None:
        if not scope.unknown:
            return
        raise ValueError(
            f"A layer must track the variables it assigns. Cell "
            f"{self.cell.index} assigns {sorted(set(scope.unknown))}, which "
            "no layer of it lists among its variables. Make the variable with "
            "`self.add_weight(...)`, or give `keras.random` functions a "
            "`seed=self.seed_generator` that is a "
            "`keras.random.SeedGenerator` attribute of the layer."
        )


def _is_float(tensor: Any) -> bool:
    return tensor is not None and tensor.dtype.is_floating


def _sources(inputs: Boundary, weights: Any, needs_inputs: bool) -> list[Any]:
    floats = [t for t in inputs.tensors if needs_inputs and _is_float(t)]
    return floats + tree.flatten(weights)


def _num_operations() -> int:
    if tf.executing_eagerly():
        return 0
    return len(tf.compat.v1.get_default_graph().get_operations())
