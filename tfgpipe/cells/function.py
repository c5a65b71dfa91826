"""The computation of a cell as a pure function.

    inputs, weights, state, labels -> outputs, new state, losses

Weights are arguments, so nothing is captured, and cells of equal graphs can
share what is made of them. `tracer.py` makes a graph of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.boundary import Boundary, CellArguments, Output, structure_of
from tfgpipe.cells.cell import Cell
from tfgpipe.graphs import TraceFindings
from tfgpipe.state import (
    MovingStatistics,
    StateScope,
    choosing_moments,
    is_synchronized,
)


class ForeignVariables(Exception):
    """A cell reads variables that its layers do not list.

    What a layer reads shows when it runs: a function may have another layer in
    its closure. The mini-batch has to begin again, with these variables among
    the cell's: as those of a tied layer.
    """

    def __init__(
        self, cell: Cell, variables: Sequence[tuple[int, keras.Variable]]
    ):
        super().__init__(f"{[v.path for _, v in variables]} in {cell.name}")
        self._cell = cell
        self._variables = variables

    def note(self) -> None:
        """Gives the variables to the layers that read them."""
        for i, variable in self._variables:
            own = self._cell.borrowed[i]
            if all(v is not variable for v in own):
                own.append(variable)


def until_known(run: Callable[[], Any]) -> Any:
    """What a function returns, once it is known what each cell reads.

    `run` runs a mini-batch through the cells; it begins again if one borrows.
    """
    while True:
        try:
            return run()
        except ForeignVariables as found:
            found.note()


class CellFunction:
    """The function of a cell.

    `head` is the loss and metrics computed with the last cell, or None;
    `recomputes` is whether any micro-batch is computed again; `is_split`
    whether there are several.

    Attributes:
        weights: The trainable variables, a list a layer.
        state: All other variables, the metrics' among them.
        chained: ids of those that run on from micro-batch to micro-batch.
        seeds: Those that are random seeds.
        normalizations: The batch normalisations that move their statistics at
            the end of the mini-batch.
        synchronizes: Whether it takes moments over replicas.
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
        self.state = cell.state + (head.metric_state if head else [])
        self.chained = {id(v) for v in cell.metric_state} | (
            {id(v) for v in head.metric_state} if head else set()
        )
        self.seeds = cell.seeds
        self.normalizations = cell.normalizations if is_split else []
        self.synchronizes = (
            training
            and len(cell.devices) > 1
            and any(map(is_synchronized, self.normalizations))
        )

    @property
    def flat_weights(self) -> list[Any]:
        """The trainable variables of all layers, in one list."""
        return [v for layer in self.weights for v in layer]

    @property
    def repeated(self) -> list[list[bool]]:
        """For each flat weight, which of its lookups are repeated.

        Empty where nothing is known; see `LayerCall.repeated`.
        """
        return [
            step.repeated.get(id(v), [])
            for step, own in zip(self.cell.calls, self.weights)
            for v in own
        ]

    def __call__(
        self,
        arguments: CellArguments,
        input_structure: Any,
        first: bool = True,
        moved: Collection[int] = (),
    ) -> tuple[Output, TraceFindings]:
        """Runs layers and head on given values of all variables.

        `first` is False in a recomputation, which needs no metrics. `moved` are
        ids of the moving statistics that earlier cells have moved.
        """
        # What layers read and assign goes through the scope: the function
        # takes all of it as arguments, and returns what would be left behind.
        #
        #     arguments -> [ scope: layer 0 -> layer 1 -> .. -> head ] -> Output
        moving = MovingStatistics(self.normalizations, moved)
        scope = StateScope(
            list(zip(self.state, arguments.state)),
            self.seeds,
            moving,
            self.training,
        )
        # Where each layer begins in the graph: it is differentiated by layers.
        starts: list[int] = []
        # Flat, as a function takes them -> a list a layer, as the weights are.
        assigned = tf.nest.pack_sequence_as(
            self.weights,
            arguments.assigned or [None] * len(self.flat_weights),
        )
        weights = list(zip(self.weights, arguments.weights, assigned))

        def before_layer(i: int) -> None:
            starts.append(_num_operations())
            if i > 0:  # before the next use of a shared weight
                updated.extend(scope.new_values(self.weights[i - 1]))
            scope.use_weights(i, zip(*weights[i]))

        moments = internals.batch_moments
        if self.synchronizes:
            moments = choosing_moments(internals.current_graph())
        updated: list[Any] = []
        sums, counts = [], []  # scalars, one for each output with a loss
        x = arguments.inputs.nest(input_structure)
        with (
            scope,
            internals.noting_losses(self.cell.model_layers) as added,
            internals.recording_moments(
                self.normalizations, scope.record, moments
            ),
        ):
            y = self.cell(x, before_layer=before_layer, training=self.training)
            starts.append(_num_operations())
            updated.extend(scope.new_values(self.weights[-1]))
            if self.head is not None:
                sums, counts = self.head(y, arguments.labels, first)
        self._check_unknown(scope)
        moving.check(self.cell.number)
        if self.is_split and scope.overwritten:
            raise ValueError(
                "A seed must be drawn by `seed_generator.next()` alone if "
                "there is more than one micro-batch: then it is known where "
                "each one begins. Received: another new value of "
                f"{[*scope.overwritten.values()]} in cell {self.cell.number}, "
                "as of `next(ordered=False)`. Leave that out, or pass "
                "num_micro_batches=1."
            )
        # Only a run can show it: the step begins anew, with them among its own.
        if scope.borrowed:
            raise ForeignVariables(self.cell, scope.borrowed)
        findings = TraceFindings(
            draws=[
                None if id(v) in scope.overwritten else scope.draws[id(v)]
                for v in self.seeds
            ],
            starts=starts,
            output_structure=structure_of(y),
            num_head_losses=len(sums),
            moving_rules=[moving.rules[id(v)] for v in self.normalizations],
        )
        boundary = Boundary.of(y)
        # Where the head has the loss, outputs get no gradient.
        has_loss = self.head is not None and self.head.streams_loss
        hand_out = tf.stop_gradient if has_loss else tf.identity
        output = Output(
            tensors=[
                None if t is None else hand_out(t) for t in boundary.tensors
            ],
            masks=boundary.masks,
            state=scope.new_values(self.state),
            weights=updated,
            losses=sums + [self._own(loss, x) for loss in added(scope.losses)],
            counts=counts,
            moments=[moving.moments[id(v)] for v in self.normalizations],
        )
        scope.check_taken()
        return output, findings

    def _own(self, loss: Any, x: Any) -> tf.Tensor:
        """A loss of `add_loss`, checked."""
        loss = tf.convert_to_tensor(loss)
        first = next((t for t in tree.flatten(x) if t is not None), loss)
        if (
            self.is_split
            and loss.shape.rank
            and loss.shape[0] in (None, first.shape[0])
        ):
            raise ValueError(
                "`add_loss` must be given a scalar, the mean over rows, if "
                "there is more than one micro-batch: Keras adds up the values "
                f"of a vector. Received: shape {tuple(loss.shape)} in cell "
                f"{self.cell.number}. Add `keras.ops.mean(loss)`, or pass "
                "num_micro_batches=1."
            )
        return as_number(loss)

    def _check_unknown(self, scope: StateScope) -> None:
        if not scope.unknown:
            return
        raise ValueError(
            f"A layer must track the variables it assigns. Cell "
            f"{self.cell.number} assigns {sorted(set(scope.unknown))}, which "
            "no layer of it lists among its variables. Make the variable with "
            "`self.add_weight(...)`, or give `keras.random` functions a "
            "`seed=self.seed_generator` that is a "
            "`keras.random.SeedGenerator` attribute of the layer."
        )


def as_number(loss: Any) -> tf.Tensor:
    """A loss of `add_loss`, as a number: Keras sums it up."""
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        loss = tf.cast(loss, keras.config.floatx())
    return tf.reduce_sum(loss) if loss.shape.rank != 0 else loss


def _num_operations() -> int:
    graph = internals.current_graph()
    return 0 if graph is None else len(graph.get_operations())
