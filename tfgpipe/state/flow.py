"""Carries the state of a model from micro-batch to micro-batch to variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.devices import Replicas, placement
from tfgpipe.graphs import Part, TracedModel
from tfgpipe.micro_batches import MicroBatches
from tfgpipe.state.batch_normalization import (
    SingleValues,
    is_synchronized,
    moving_statistics,
)
from tfgpipe.state.rules import FirstRule, MeanRule, MetricRule, SeedRule


class StateFlow:
    """The variables that no optimizer updates, during one mini-batch.

    `rules.py` has the rules. What a layer assigns and another one reads in the
    same micro-batch is a tensor, which crosses as any other does.

    Args:
        traced: The model.
        parts: Those of its cells.
        chained: The ids of variables that run on from micro-batch to
            micro-batch.
        replicas: Which replica computes which micro-batches.
        micro_batches: How the rows fall into micro-batches.
        is_synchronized: Whether a cell takes moments over replicas.

    Attributes:
        assigned_values: What has been assigned, but integers.
    """

    def __init__(
        self,
        traced: TracedModel,
        parts: Sequence[Part],
        chained: set[int],
        replicas: Replicas,
        micro_batches: MicroBatches,
        is_synchronized: Callable[[int], bool],
    ):
        self._traced = traced
        self._chained = chained
        self._replicas = replicas
        self._micro_batches = micro_batches
        self._is_synchronized = is_synchronized
        self.assigned_values: list[tuple[keras.Variable, tf.Tensor]] = []
        self._is_assigned = False
        self._given = {tensor.ref(): v for v, tensor in traced.state}
        self._new = {id(v): tensor for v, tensor in traced.new_state}
        # Where a variable is read first, and its last value is made.
        self._home: dict[int, int] = {}
        self._maker: dict[Any, int] = {}
        for part in parts:
            for tensor in [*part.takes, *part.takes_back]:
                if tensor.ref() in self._given:
                    key = id(self._given[tensor.ref()])
                    self._home.setdefault(key, part.index)
            for tensor in part.gives:
                self._maker[tensor.ref()] = part.index
        self._check_chained(parts)
        # By the id of a variable, its value before the mini-batch; and by that
        # and the replica, what a chain has come to.
        self._initial: dict[int, tf.Tensor] = {}
        self._chains: dict[tuple[int, int], tf.Tensor] = {}

    def _rule(self, variable: keras.Variable) -> Any:
        """What becomes of a variable."""
        key = id(variable)
        if key in self._traced.draws:
            draws = self._traced.draws[key]
            # None: of one micro-batch.
            return FirstRule() if draws is None else SeedRule(draws)
        if key in self._chained:
            return MetricRule(variable.aggregation)
        dtype = tf.as_dtype(variable.dtype)
        if dtype.is_floating or dtype.is_complex:
            return MeanRule()
        return FirstRule()

    def _device(self, variable: keras.Variable, r: int) -> str:
        """Where a variable is read first, in a replica."""
        return self._replicas.device_in(r, self._home.get(id(variable), 0))

    # -------------------------------------------------- from task to task
    def start(self, part: Part, m: int, values: dict[Any, Any]) -> None:
        """Adds the state with which a micro-batch starts, as a cell takes it.

        The recomputation gets the same.
        """
        for tensor in [*part.takes, *part.takes_back]:
            ref = tensor.ref()
            if ref in self._given and ref not in values:
                values[ref] = self._start_of(self._given[ref], m)

    def _start_of(self, variable: keras.Variable, m: int) -> tf.Tensor:
        rule, r = self._rule(variable), self._replicas.of(m)
        value = self._chain(variable, r)
        if isinstance(rule, SeedRule):
            with tf.device(self._device(variable, r)):
                value = rule.start(value, self._micro_batches.rank(m))
        return value

    def _read(self, variable: keras.Variable) -> tf.Tensor:
        """The value before the mini-batch."""
        key = id(variable)
        if key not in self._initial:
            device = self._device(variable, self._replicas.busy[0])
            with tf.control_dependencies(None), tf.device(device):
                self._initial[key] = placement.read_variable(variable)
        return self._initial[key]

    def _chain(self, variable: keras.Variable, r: int) -> tf.Tensor:
        """The value that runs on through the micro-batches of a replica."""
        key = id(variable), r
        if key not in self._chains:
            value = self._read(variable)
            is_first = r == self._replicas.busy[0]
            rule = self._rule(variable)
            with (
                tf.control_dependencies(None),
                tf.device(self._device(variable, r)),
            ):
                if isinstance(rule, MetricRule):
                    value = rule.first(value, is_first)
                elif not is_first:
                    value = tf.identity(value)
            self._chains[key] = value
        return self._chains[key]

    def after(self, part: Part, m: int, values: Mapping[Any, Any]) -> None:
        """Takes what a cell made of the state in micro-batch m."""
        #     chained   v -> m0 -> m1 -> m2 -> new       as metrics
        #     others    v -> m0, v -> m1, v -> m2        and a rule makes one
        r = self._replicas.of(m)
        for variable, tensor in self._traced.new_state:
            is_own = self._maker.get(tensor.ref()) == part.index
            if is_own and id(variable) in self._chained:
                self._chains[id(variable), r] = self._micro_batches.select(
                    m, values[tensor.ref()], self._chain(variable, r)
                )

    # ------------------------------------------------------- to variables
    @property
    def assigned(self) -> list[keras.Variable]:
        """The variables that `assign` may assign."""
        found = [variable for variable, _ in self._traced.new_state]
        for layer in self._traced.normalizations:
            found += [layer.moving_mean, layer.moving_variance]
        return found

    def assign(self, values: Sequence[Mapping[Any, Any]]) -> None:
        """Assigns the variables, once for the mini-batch.

        To be called when all forward tasks have run; again, it does nothing.
        `values` are those of each micro-batch.
        """
        if self._is_assigned:
            return
        self._is_assigned = True
        for variable, tensor in self._traced.new_state:
            with tf.device(variable.value.device):
                new = self._end_of(variable, [v[tensor.ref()] for v in values])
                self._assign(variable, new)
        self._assign_normalizations(values)

    def _end_of(
        self, variable: keras.Variable, values: list[tf.Tensor]
    ) -> tf.Tensor:
        rule = self._rule(variable)
        if id(variable) in {id(u.variable) for u in self._traced.trained_uses}:
            return values[0]  # a weight that a layer itself assigns
        if isinstance(rule, SeedRule):
            return rule.end(self._read(variable), self._micro_batches)
        if isinstance(rule, MetricRule):
            return rule.end(
                [self._chain(variable, r) for r in self._replicas.busy]
            )
        new: tf.Tensor = rule.end(values, self._micro_batches)
        return new

    def _assign(self, variable: keras.Variable, new: tf.Tensor) -> None:
        if new.dtype.is_floating or new.dtype.is_complex:
            self.assigned_values.append((variable, new))
        variable.assign(new)

    def _assign_normalizations(
        self, values: Sequence[Mapping[Any, Any]]
    ) -> None:
        traced = self._traced
        single = SingleValues(self._micro_batches)
        for layer, own, rules in zip(
            traced.normalizations, traced.moments, traced.rules
        ):
            if not own:
                continue
            mean, variance = layer.moving_mean, layer.moving_variance
            with tf.device(mean.value.device):
                moments = [
                    tf.nest.map_structure(
                        lambda t, v=v: None if t is None else v[t.ref()], own
                    )
                    for v in values
                ]
                together = is_synchronized(layer) and self._is_synchronized(
                    self._home.get(id(mean), 0)
                )
                single.look(
                    layer,
                    [[few for *_, few in calls] for calls in moments],
                    self._replicas.normalized_at_once(together),
                )
                new_mean, new_variance = moving_statistics(
                    rules,
                    (self._read(mean), self._read(variance)),
                    moments,
                    self._micro_batches,
                )
                self._assign(mean, new_mean)
                self._assign(variance, new_variance)
        single.warn()

    def _check_chained(self, parts: Sequence[Part]) -> None:
        """Refuses metrics that several cells update, in turn."""
        for variable, tensor in self._traced.new_state:
            if id(variable) not in self._chained:
                continue
            given = [t for v, t in self._traced.state if v is variable]
            cells = {
                part.index
                for part in parts
                for t in part.takes
                if any(t is own for own in given)
            } | {self._maker.get(tensor.ref(), 0)}
            if len(cells) > 1 and self._micro_batches.count > 1:
                raise ValueError(
                    "A metric of a layer must be updated in one cell, if "
                    "there is more than one micro-batch. Received: "
                    f"'{variable.path}', which the cells {sorted(cells)} "
                    "update in turn. Put the calls of its layer into one cell "
                    "with `layers_per_cell`."
                )
