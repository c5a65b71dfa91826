"""Carries the state of a model from micro-batch to micro-batch to variables.

Every micro-batch of a mini-batch starts from the same state, and the variable
is assigned once, after the last micro-batch:

    random seeds         advance by the draws of every micro-batch
    metrics              run on from micro-batch to micro-batch
    other numbers        the mean of the new values, weighted by rows
    other integers       the new value of the first micro-batch
    batch normalisation  the moments of the mini-batch

Batch normalisation is in `batch_normalization.py`. Seeds are saved here, too,
which Keras does not do. With one micro-batch, the values that its layers
assigned are assigned. A value that a layer assigns and another one reads in the
same micro-batch is a tensor, which crosses as any other does. A backward pass
recomputes from the same state, and assigns nothing.

Limits: a seed that is drawn a number of times that depends on the data, and
state that rows of a mini-batch hand on to each other, cannot be told from the
above. `BatchNormalization(renorm=True)` normalises by its state: refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.devices import Replicas, placement
from tfgpipe.graphs import Part, TracedModel, Values
from tfgpipe.inputs import MicroBatches
from tfgpipe.state.batch_normalization import moving_statistics, sum_of


class StateFlow:
    """The variables that no optimizer updates, during one mini-batch.

    Attributes:
        assigned_values: Variables and their new values, but integers.
    """

    def __init__(
        self,
        traced: TracedModel,
        parts: Sequence[Part],
        metric_state: Collection[int],
        replicas: Replicas,
        micro_batches: MicroBatches,
    ):
        self._traced = traced
        self._metric_state = metric_state
        self._metrics = [
            p for p in traced.new_state if id(p[0]) in metric_state
        ]
        self._replicas = replicas
        self._micro_batches = micro_batches
        self.assigned_values: list[tuple[keras.Variable, tf.Tensor]] = []
        self._is_assigned = False
        self._read = {tensor.ref(): v for v, tensor in traced.state}
        # The first cell that reads a variable; the cell that makes a tensor.
        self._first_cells: dict[int, int] = {}
        self._makers: dict[Hashable, int] = {}
        for part in parts:
            for tensor in [*part.forward_inputs, *part.gradient_inputs]:
                if tensor.ref() in self._read:
                    key = id(self._read[tensor.ref()])
                    self._first_cells.setdefault(key, part.index)
            for tensor in part.forward_outputs:
                self._makers[tensor.ref()] = part.index
        self._check_metrics(parts)
        # By the id of a variable, its value before the mini-batch; and by the
        # id and the replica, the value after the micro-batches so far.
        self._initial: dict[int, tf.Tensor] = {}
        self._so_far: dict[tuple[int, int], tf.Tensor] = {}

    def _kind(self, variable: keras.Variable) -> str:
        """Returns the rule: "seed", "metric", "mean" or "first"."""
        draws = self._traced.draws.get(id(variable), 0)
        if draws != 0:
            return "first" if draws is None else "seed"  # None: no rule known
        if id(variable) in self._metric_state:
            return "metric"
        dtype = tf.as_dtype(variable.dtype)
        return "mean" if dtype.is_floating or dtype.is_complex else "first"

    def _device(self, variable: keras.Variable, r: int) -> str:
        """Returns the device that reads a variable first, in a replica."""
        return self._replicas.device_in(
            r, self._first_cells.get(id(variable), 0)
        )

    # -------------------------------------------------- from task to task
    def start(self, part: Part, m: int, values: Values) -> None:
        """Adds the state with which a micro-batch starts in a cell.

        The recomputation gets the same.
        """
        for tensor in [*part.forward_inputs, *part.gradient_inputs]:
            ref = tensor.ref()
            if ref in self._read and ref not in values:
                values[ref] = self._start_of(self._read[ref], m)

    def _start_of(self, variable: keras.Variable, m: int) -> tf.Tensor:
        r = self._replicas.replica_of(m)
        value = self._value_so_far(variable, r)
        if self._kind(variable) == "seed":
            rank = self._micro_batches.rank(m)
            with tf.device(self._device(variable, r)):
                value = self._advanced(variable, value, rank)
        return value

    def _advanced(
        self, variable: keras.Variable, seed: tf.Tensor, rank: int | tf.Tensor
    ) -> tf.Tensor:
        return advance_seed(seed, self._traced.draws[id(variable)] or 0, rank)

    def _initial_value(self, variable: keras.Variable) -> tf.Tensor:
        """Reads the value before the mini-batch."""
        key = id(variable)
        if key not in self._initial:
            device = self._device(variable, self._replicas.busy[0])
            with tf.control_dependencies(None), tf.device(device):
                self._initial[key] = placement.read_variable(variable)
        return self._initial[key]

    def _value_so_far(self, variable: keras.Variable, r: int) -> tf.Tensor:
        """Returns the value after the micro-batches so far of a replica."""
        key = id(variable), r
        if key not in self._so_far:
            value = self._initial_value(variable)
            is_metric = self._kind(variable) == "metric"
            # What is summed over replicas begins with zero in all but one.
            is_sum = is_metric and variable.aggregation == "sum"
            if r != self._replicas.busy[0]:
                with (
                    tf.control_dependencies(None),
                    tf.device(self._device(variable, r)),
                ):
                    copied = tf.zeros_like if is_sum else tf.identity
                    value = copied(value)
            self._so_far[key] = value
        return self._so_far[key]

    def after(self, part: Part, m: int, values: Values) -> None:
        """Takes the new state that a cell made in micro-batch m."""
        #     metrics   v -> m0 -> m1 -> m2 -> new
        #     others    v -> m0, v -> m1, v -> m2        and a rule makes one
        r, select = self._replicas.replica_of(m), self._micro_batches.select
        for variable, tensor in self._metrics:
            if self._makers.get(tensor.ref()) == part.index:
                self._so_far[id(variable), r] = select(
                    m, values[tensor.ref()], self._value_so_far(variable, r)
                )

    # ------------------------------------------------------- to variables
    @property
    def assigned(self) -> list[keras.Variable]:
        """The variables that `assign` may assign."""
        variables = [variable for variable, _ in self._traced.new_state]
        for layer in self._traced.normalizations:
            variables += [layer.moving_mean, layer.moving_variance]
        return variables

    def assign(self, values: Sequence[Values]) -> None:
        """Assigns the variables, once for the mini-batch.

        To be called when all forward tasks have run; again, it does nothing.
        `values` are each micro-batch's.
        """
        if self._is_assigned:
            return
        self._is_assigned = True
        for variable, tensor in self._traced.new_state:
            with tf.device(variable.value.device):
                new = self._merged(variable, [v[tensor.ref()] for v in values])
                self._assign(variable, new)
        self._assign_normalizations(values)

    def _merged(
        self, variable: keras.Variable, values: list[tf.Tensor]
    ) -> tf.Tensor:
        """Returns the value after the mini-batch, from micro-batches'."""
        kind, micro_batches = self._kind(variable), self._micro_batches
        weights = {id(use.variable) for use in self._traced.trained_uses}
        if kind == "first" or id(variable) in weights:
            return values[0]  # a weight may be assigned by its layer
        if kind == "seed":
            rank = micro_batches.rank(micro_batches.count)
            return self._advanced(variable, self._initial_value(variable), rank)
        if kind == "metric":
            busy = self._replicas.busy
            last = [self._value_so_far(variable, r) for r in busy]
            return merged_metric(last, variable.aggregation)
        return weighted_mean(values, micro_batches)

    def _assign(self, variable: keras.Variable, new: tf.Tensor) -> None:
        if new.dtype.is_floating or new.dtype.is_complex:
            self.assigned_values.append((variable, new))
        variable.assign(new)

    def _assign_normalizations(self, values: Sequence[Values]) -> None:
        traced, micro_batches = self._traced, self._micro_batches
        for layer, tensors, rules in zip(
            traced.normalizations, traced.moments, traced.rules
        ):
            if not tensors:
                continue
            statistics = layer.moving_mean, layer.moving_variance
            with tf.device(statistics[0].value.device):
                moments = [
                    tf.nest.map_structure(
                        lambda t, v=v: None if t is None else v[t.ref()],
                        tensors,
                    )
                    for v in values
                ]
                initial = [self._initial_value(v) for v in statistics]
                new = moving_statistics(rules, initial, moments, micro_batches)
                for variable, value in zip(statistics, new):
                    self._assign(variable, value)

    def _check_metrics(self, parts: Sequence[Part]) -> None:
        """Refuses metrics that several cells update, in turn."""
        for variable, tensor in self._metrics:
            cells = {
                part.index
                for part in parts
                for t in part.forward_inputs
                if self._read.get(t.ref()) is variable
            } | {self._makers.get(tensor.ref(), 0)}
            if len(cells) > 1 and self._micro_batches.count > 1:
                raise ValueError(
                    "A metric of a layer must be updated in one cell, and not "
                    f"in {sorted(cells)}. Received: '{variable.path}'. Cut "
                    "otherwise, by `layers_per_cell`."
                )


# ----------------------------------------------------------------------- rules
def advance_seed(
    seed: tf.Tensor, draws: int, micro_batch: Any, draws_before: Any = 0
) -> tf.Tensor:
    """Returns the seed, shape (2,), with which a micro-batch starts.

    Each draws so often, this one has drawn `draws_before`. Bits depend on the
    micro-batch, and not on cells.
    """
    steps = tf.cast(micro_batch, seed.dtype) * draws + draws_before
    return seed + tf.stack([tf.zeros_like(steps), steps])


def merged_metric(values: list[tf.Tensor], aggregation: str) -> tf.Tensor:
    """Returns a metric's value, by the last one of each replica."""
    if len(values) == 1 or aggregation not in ("sum", "mean"):
        return values[0]
    total = sum_of(values)
    if aggregation == "sum":
        return total
    return _if_equal(values, tf.cast(total / len(values), total.dtype))


def weighted_mean(
    values: list[tf.Tensor], micro_batches: MicroBatches
) -> tf.Tensor:
    """Returns the mean of micro-batches' values, weighted by rows.

    Where all are equal it is that value to the bit, an infinity too. A
    micro-batch without rows counts for nothing.
    """
    parts, counted = [], []
    for m, value in enumerate(values):
        part = value * micro_batches.fraction(m, value.dtype)
        parts.append(micro_batches.select(m, part, tf.zeros_like(part)))
        # The last one always has rows.
        counted.append(micro_batches.select(m, value, values[-1]))
    return _if_equal(counted, sum_of(parts))


def _if_equal(values: list[tf.Tensor], otherwise: tf.Tensor) -> tf.Tensor:
    """Returns the value of all, where they are equal; else another one."""
    is_equal = tf.stack([value == values[-1] for value in values])
    return tf.where(tf.reduce_all(is_equal, axis=0), values[-1], otherwise)


# ------------------------------------------------------------------ saved seeds
class RandomState(keras.layers.Layer):
    """Saves the states of seed generators, which Keras does not.

    Without them a resumed run would draw the dropout masks of its first steps
    again. `seeds` returns them: they are not tracked, for the layers own them.
    """

    def __init__(self, seeds: Callable[[], list[keras.Variable]]):
        super().__init__(name="random_state")
        self._seeds = seeds
        self.built = True

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras to save."""
        for i, seed in enumerate(self._seeds()):
            store[str(i)] = seed.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras to load; plain Keras files have no seeds."""
        seeds = self._seeds()
        saved = {key: store[key] for key in list(store.keys())}
        expected = {str(i): tuple(seed.shape) for i, seed in enumerate(seeds)}
        if {key: tuple(v.shape) for key, v in saved.items()} == expected:
            for i, seed in enumerate(seeds):
                seed.assign(saved[str(i)])
        elif saved:
            warnings.warn(
                f"The states of random seeds must be {len(seeds)}, as in the "
                f"model: none of {len(saved)} in the file was loaded, and the "
                "next random numbers are others than without a break.",
                stacklevel=2,
            )
