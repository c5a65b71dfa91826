"""Carries the state of cells from micro-batch to micro-batch to variables."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.boundary import Output
from tfgpipe.devices import Replicas, placement
from tfgpipe.micro_batches import MicroBatches
from tfgpipe.state.batch_normalization import (
    SingleValues,
    is_synchronized,
    moving_statistics,
)
from tfgpipe.state.rules import FirstRule, MeanRule, MetricRule
from tfgpipe.state.seeds import SeedRule


class StateFlow:
    """The non-trainable variables of all cells during one mini-batch.

    `rules.py` has the rules.
    """

    def __init__(
        self,
        functions: Sequence[Any],
        tasks: Sequence[Any],
        replicas: Replicas,
        micro_batches: MicroBatches,
    ):
        self._functions = functions
        self._tasks = tasks
        self._replicas = replicas
        self._micro_batches = micro_batches
        self._initial: list[list[tf.Tensor]] = []
        for function in functions:
            with tf.device(function.device):
                self._initial.append(
                    [placement.read_variable(v) for v in function.state]
                )
        # A chain is by (cell, replica). What follows is by (cell, micro-batch):
        # with what a task began, for its recomputation, and what it returned.
        self._chains: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._started: dict[tuple[int, int], list[tf.Tensor]] = {}
        self._outputs: dict[tuple[int, int], Output] = {}
        self._owners: dict[int, int] = {}
        self._seed_ids = {id(v) for f in functions for v in f.seeds}
        self._is_assigned = False
        # What has been assigned, but integers.
        self.assigned_values: list[tuple[keras.Variable, tf.Tensor]] = []

    def _assign(self, variable: keras.Variable, new: tf.Tensor) -> None:
        if new.dtype.is_floating or new.dtype.is_complex:
            self.assigned_values.append((variable, new))
        variable.assign(new)

    def _rule(self, k: int, variable: keras.Variable) -> Any:
        """What becomes of a variable of cell k."""
        if id(variable) in self._seed_ids:
            draws = [
                [
                    count
                    for v, count in zip(function.seeds, own.findings.draws)
                    if v is variable
                ]
                for function, own in zip(self._functions, self._tasks)
            ]
            if any(None in own for own in draws):  # of one micro-batch
                return FirstRule()
            counts = [sum(own) for own in draws]
            return SeedRule(sum(counts[:k]), sum(counts))
        if id(variable) in self._functions[k].chained:
            return MetricRule(variable.aggregation)
        dtype = tf.as_dtype(variable.dtype)
        if dtype.is_floating or dtype.is_complex:
            return MeanRule()
        return FirstRule()

    # -------------------------------------------------- from task to task
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
            rule = self._rule(k, variable)
            if isinstance(rule, SeedRule):
                value = rule.start(value, self._micro_batches.rank(m))
            elif id(variable) in self._shared:
                value = self._left_before(k, m, variable, value)
            values.append(value)
        return values

    def assigned(self, k: int, m: int) -> list[Any]:
        """What layers of earlier cells have assigned to weights of cell k."""
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
        # The nearest cell before has the last word, and in it the last use.
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
        """The values that run on through the micro-batches of replica r."""
        if (k, r) not in self._chains:
            is_first = r == self._replicas.busy[0]
            with (
                tf.control_dependencies(None),
                tf.device(self._replicas.device_in(r, k)),
            ):
                self._chains[k, r] = [
                    self._first_of(k, variable, value, is_first)
                    for variable, value in zip(
                        self._functions[k].state, self._initial[k]
                    )
                ]
        return self._chains[k, r]

    def _first_of(
        self, k: int, variable: Any, value: tf.Tensor, is_first: bool
    ) -> tf.Tensor:
        """With what a replica begins."""
        rule = self._rule(k, variable)
        if isinstance(rule, MetricRule):
            return rule.first(value, is_first)
        return value if is_first else tf.identity(value)

    def after(self, k: int, m: int, output: Output) -> None:
        """Takes what cell k made of its state in micro-batch m."""
        function = self._functions[k]
        self._outputs[k, m] = output
        #     chained   v -> m0 -> m1 -> m2 -> new       as metrics
        #     others    v -> m0, v -> m1, v -> m2        and a rule makes one
        r = self._replicas.of(m)
        self._chains[k, r] = [
            self._micro_batches.select(m, new, old)
            if new is not None and id(variable) in function.chained
            else old
            for variable, new, old in zip(
                function.state, output.state, self._chain(k, r)
            )
        ]

    # ------------------------------------------------------- to variables
    def assign(self) -> None:
        """Assigns the variables, once for the mini-batch.

        To be called when all forward tasks have run; again, it does nothing.

        Raises:
            ValueError: If two cells would assign the same one.
        """
        if self._is_assigned:
            return
        self._is_assigned = True
        single = SingleValues(self._micro_batches)
        for k, function in enumerate(self._functions):
            with tf.device(function.device):
                self._assign_weights(k)
                self._assign_values(k)
                self._assign_normalizations(k, single)
        single.warn()

    def _outputs_of(self, k: int) -> list[Output]:
        return [self._outputs[k, m] for m in range(self._micro_batches.count)]

    def _assign_weights(self, k: int) -> None:
        """Weights that a layer itself assigns, as spectral norm does."""
        variables = self._functions[k].flat_weights
        for variable, value in zip(variables, self._outputs[k, 0].weights):
            if value is not None:
                with tf.device(variable.value.device):
                    self._assign(variable, value)

    def _assign_values(self, k: int) -> None:
        for j, variable in enumerate(self._functions[k].state):
            values = [output.state[j] for output in self._outputs_of(k)]
            if values[0] is None:
                continue
            rule = self._rule(k, variable)
            if id(variable) in self._seed_ids:  # cells share one in turn
                if self._owners.setdefault(id(variable), k) == k:
                    self._assign_seed(k, j, rule)
                continue
            self._claim(variable, k)
            if isinstance(rule, MetricRule):
                lasts = [self._chain(k, r)[j] for r in self._replicas.busy]
                new = rule.end(lasts)
            else:
                new = rule.end(values, self._micro_batches)
            self._assign(variable, new)

    def _assign_seed(self, k: int, j: int, rule: SeedRule | FirstRule) -> None:
        variable = self._functions[k].state[j]
        if isinstance(rule, SeedRule):
            new = rule.end(self._initial[k][j], self._micro_batches)
        else:
            new = self._left_before(len(self._functions), 0, variable, None)
        variable.assign(new)

    def _assign_normalizations(self, k: int, single: SingleValues) -> None:
        function = self._functions[k]
        initial = {
            id(v): value for v, value in zip(function.state, self._initial[k])
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
            new_mean, new_variance = moving_statistics(
                self._tasks[k].findings.moving_rules[i],
                (initial[id(mean)], initial[id(variance)]),
                moments,
                self._micro_batches,
            )
            self._assign(mean, new_mean)
            self._assign(variance, new_variance)

    def _claim(self, variable: keras.Variable, k: int) -> None:
        other = self._owners.setdefault(id(variable), k)
        if other != k:
            raise ValueError(
                "A layer that is used twice and updates its own state must "
                f"be in one cell. Received: '{variable.path}', updated in "
                f"cells {other} and {k}. Put both uses into one cell with "
                "`layers_per_cell`, or use two layers."
            )
