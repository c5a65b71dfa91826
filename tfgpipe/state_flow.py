"""Carries the state of cells from micro-batch to micro-batch to variables."""

from __future__ import annotations

import collections
import functools
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import placement, state
from tfgpipe.cell_function import CellFunction
from tfgpipe.cell_values import Output
from tfgpipe.micro_batch import MicroBatches
from tfgpipe.moments import is_synchronized
from tfgpipe.replicas import Replicas
from tfgpipe.single_values import SingleValues


class StateFlow:
    """The non-trainable variables of all cells during one mini-batch.

    `state.py` has the rules.

    Args:
        functions: The cells' functions.
        replicas: Where cells compute micro-batches.
        micro_batches: How the rows fall into micro-batches.

    Attributes:
        initial: For each cell, the values before the mini-batch.
    """

    def __init__(
        self,
        functions: list[CellFunction],
        replicas: Replicas,
        micro_batches: MicroBatches,
    ):
        self._functions = functions
        self._replicas = replicas
        self._micro_batches = micro_batches
        self.initial: list[list[tf.Tensor]] = []
        for function in functions:
            with tf.device(function.device):
                self.initial.append(
                    [placement.read_variable(v) for v in function.state]
                )
        self._chains: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._started: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._outputs: dict[tuple[int, int], Output] = {}
        self._owners: dict[int, int] = {}
        self._seed_ids = {id(v) for f in functions for v in f.seeds}

    def before(self, k: int, m: int) -> list[tf.Tensor]:
        """The state with which cell k computes micro-batch m.

        The recomputation gets the same.
        """
        if (k, m) not in self._started:
            self._started[k, m] = self.values(k, m)
        return self._started[k, m]

    def values(self, k: int, m: int) -> list[tf.Tensor]:
        """What `before` would return now."""
        values = []
        for variable, value in zip(
            self._functions[k].state, self._chain(k, self._replicas.of(m))
        ):
            if id(variable) in self._seed_ids:
                rank = self._micro_batches.rank(m)
                value = self._seed(k, variable, value, rank)
            elif id(variable) in self._shared:
                value = self._left_before(k, m, variable, value)
            values.append(value)
        return values

    def assigned(self, k: int, m: int) -> list[Any]:
        """What layers of earlier cells have assigned to weights of cell k.

        See `Arguments.assigned`.
        """
        found = [
            self._left_before(k, m, v, None) if id(v) in self._shared else None
            for v in self._functions[k].flat_weights
        ]
        return found if any(t is not None for t in found) else []

    def _left_before(
        self, k: int, m: int, variable: keras.Variable, otherwise: Any
    ) -> Any:
        """What the last cell before cell k made of a variable in a micro-batch.

        As in Keras, a layer reads what an earlier layer has assigned.
        """
        for i in reversed(range(k)):
            if (i, m) not in self._outputs:
                continue
            function, output = self._functions[i], self._outputs[i, m]
            variables = [*function.state, *function.flat_weights]
            values = [*output.state, *output.weights]
            for own, new in reversed([*zip(variables, values)]):
                if own is variable and new is not None:
                    return new
        return otherwise

    @functools.cached_property
    def _shared(self) -> set[int]:
        """The ids of variables that several cells have."""
        cells = [
            {id(v) for v in [*f.state, *f.flat_weights]}
            for f in self._functions
        ]
        counts = collections.Counter(key for own in cells for key in own)
        return {key for key, count in counts.items() if count > 1}

    def _chain(self, k: int, r: int) -> list[tf.Tensor]:
        """The values that run on through the micro-batches of replica r.

        What is summed over replicas starts from zero in all but one.
        """
        if (k, r) in self._chains:
            return self._chains[k, r]
        values = list(self.initial[k])
        if r != self._replicas.busy[0]:
            function = self._functions[k]
            with (
                tf.control_dependencies(None),
                tf.device(self._replicas.device_in(r, k)),
            ):
                values = [
                    tf.zeros_like(value)
                    if id(variable) in function.chained
                    and variable.aggregation == "sum"
                    else tf.identity(value)
                    for variable, value in zip(function.state, values)
                ]
        self._chains[k, r] = values
        return values

    def _last(self, k: int, j: int) -> tf.Tensor:
        """What runs on, after all micro-batches, by the variable's rule."""
        values = [self._chain(k, r)[j] for r in self._replicas.busy]
        rule = self._functions[k].state[j].aggregation
        if len(values) == 1 or rule not in ("sum", "mean"):
            return values[0]
        total = state.sum_of(values)
        if rule == "sum":
            return total
        return tf.cast(total / len(values), total.dtype)

    def after(self, k: int, m: int, output: Output) -> None:
        """Takes what cell k made of its state in micro-batch m."""
        function = self._functions[k]
        self._outputs[k, m] = output
        r = self._replicas.of(m)
        self._chains[k, r] = [
            self._micro_batches.select(m, new, old)
            if new is not None and id(variable) in function.chained
            else old
            for variable, new, old in zip(
                function.state, output.state, self._chain(k, r)
            )
        ]

    def assign(self) -> None:
        """Assigns the variables, once for the mini-batch.

        Raises:
            ValueError: If two cells would assign the same one.
        """
        single = SingleValues(self._micro_batches)
        for k, function in enumerate(self._functions):
            with tf.device(function.device):
                self._assign_weights(k)
                self._assign_values(k)
                self._assign_normalizations(k, single)
        single.warn()

    def _seed(
        self, k: int, variable: keras.Variable, value: Any, rank: Any
    ) -> tf.Tensor:
        draws = [
            sum(d for v, d in zip(f.seeds, f.draws) if v is variable)
            for f in self._functions
        ]
        return state.advance_seed(value, sum(draws[:k]), sum(draws), rank)

    def _outputs_of(self, k: int) -> list[Output]:
        return [self._outputs[k, m] for m in range(self._micro_batches.count)]

    def _assign_weights(self, k: int) -> None:
        """Weights that a layer itself assigns, as spectral norm does."""
        variables = [v for layer in self._functions[k].weights for v in layer]
        for variable, value in zip(variables, self._outputs[k, 0].weights):
            if value is not None:
                with tf.device(variable.value.device):
                    variable.assign(value)

    def _assign_values(self, k: int) -> None:
        function = self._functions[k]
        seeds = {id(v) for v in function.seeds}
        rank = self._micro_batches.rank(self._micro_batches.count)
        for j, variable in enumerate(function.state):
            values = [output.state[j] for output in self._outputs_of(k)]
            if values[0] is None:
                continue
            if id(variable) in seeds:  # cells that share one draw in turn
                if self._owners.setdefault(id(variable), k) == k:
                    new = self._seed(0, variable, self.initial[k][j], rank)
                    variable.assign(new)
                continue
            self._claim(variable, k)
            if id(variable) in function.chained:
                variable.assign(self._last(k, j))
            else:
                variable.assign(
                    state.mean_over_micro_batches(values, self._micro_batches)
                )

    def _assign_normalizations(self, k: int, single: SingleValues) -> None:
        function = self._functions[k]
        initial = {
            id(v): value for v, value in zip(function.state, self.initial[k])
        }
        for i, layer in enumerate(function.normalizations):
            moments = [output.moments[i] for output in self._outputs_of(k)]
            if not moments[0]:
                continue
            together = function.synchronizes and is_synchronized(layer)
            single.look(
                layer,
                [[few for *_, few in calls] for calls in moments],
                self._replicas.normalized_at_once(together),
            )
            mean, variance = layer.moving_mean, layer.moving_variance
            self._claim(mean, k)
            new_mean, new_variance = state.moving_statistics(
                layer,
                (initial[id(mean)], initial[id(variance)]),
                moments,
                self._micro_batches,
            )
            mean.assign(new_mean)
            variance.assign(new_variance)

    def _claim(self, variable: keras.Variable, k: int) -> None:
        other = self._owners.setdefault(id(variable), k)
        if other != k:
            raise ValueError(
                "A layer that is used twice and updates its own state must "
                f"be in one cell. Received: '{variable.path}', updated in "
                f"cells {other} and {k}. Put both uses into one cell with "
                "`layers_per_cell`, or use two layers."
            )
