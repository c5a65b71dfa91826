"""What a layer makes of some rows: outputs, state, losses, gradients.

Nothing changes by it: weights are given as tensors, and assignments are held
back. Keras's batch normalisations normalise by their moving statistics, as
moments are those of micro-batches by the paper's rule. All rows get the same
random numbers. Weights of zeros, behind which nothing would show, are drawn.

It is tried, too, which slices of a sparse gradient belong to rows. A lookup by
tokens gives a slice for each row and token: the slices of a mini-batch are
those of its micro-batches, one after the other. A lookup by positions gives a
slice for each position, the sum over the rows: there the slices of the
micro-batches are added up. Keras's optimizers do not merge slices of equal
indices, so they tell the difference. Which it is shows when the layer is run on
all rows and on parts of them:

    tokens      whole 4 7 7 2 4    parts 4 7 | 7 2 4      one after the other
    positions   whole 0 1 2        parts 0 1 2 | 0 1 2    the same: repeated
    others      whole 2 4 7        parts 4 7 | 2 4 7      neither
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.boundary import Boundary, is_continuous, structure_of
from tfgpipe.cells import CellFunction
from tfgpipe.failures import check_interruption
from tfgpipe.graphs import lookups, stateful_kinds
from tfgpipe.trial.rows import UNCLEAR, cotangent

Values = dict[int, tuple[keras.Variable, tf.Tensor]]


class TrialInputs(NamedTuple):
    """What a layer is run on, a nest.

    Attributes:
        state: By the ids of variables what earlier layers have made of them.
        rows: Which ones of all rows these are.
        total: How many rows there are of all.
        num_bytes: Of the numbers that the layer computes in.
    """

    nest: Any
    state: Values
    rows: slice
    total: int


class Outcome(NamedTuple):
    """What a layer has made of them.

    Attributes:
        nest: The outputs.
        tensors: The same, flat.
        masks: Their masks.
        state: The new values of what was assigned, by ids.
        losses: What it gave `add_loss`, summed as Keras does.
        results: Those of its metrics, by names.
        draws: The shapes of its random numbers, without the rows; None if
            there were others, which are not the same for all rows.
        inputs: The tensors that it has taken.
        weights: Pairs of a weight and the value that it has taken.
        tape: That on which it ran, if gradients are wanted.
        dx: Gradients with respect to the inputs.
        dw: By the ids of weights those with respect to them.
        rows: Which ones of all rows it has.
        total: How many rows there are of all.
        num_bytes: Of the numbers that the layer computes in.
    """

    nest: Any
    tensors: list[Any]
    masks: list[Any]
    state: Values
    losses: list[tf.Tensor]
    results: dict[str, Any]
    draws: list[Any] | None
    inputs: list[Any]
    weights: list[tuple[keras.Variable, tf.Tensor]]
    tape: Any
    dx: list[Any]
    dw: dict[int, tuple[keras.Variable, Any]]
    rows: slice
    total: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return int(self.rows.stop - self.rows.start)

    @property
    def share(self) -> float:
        """The share that these rows are of all rows, from 0 to 1."""
        return self.num_rows / self.total


class _Scope(internals.ReadingScope):
    """Holds assignments back, and notes them."""

    def __init__(self, given: Any):
        super().__init__(given, collect_losses=True)
        self.assigned: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """`Variable.assign` calls it: the value is noted, and not assigned."""
        super().add_update(update)
        self.assigned[id(update[0])] = update[0]


class TriedCall:
    """One step of a cell, to be run on some rows."""

    def __init__(self, function: CellFunction, step: Any):
        self.function, self.step, self.layer = function, step, step.layer
        self.metrics = [m for m in step.layer.metrics if m.variables]
        self.normalizations = [
            layer
            for layer in internals.flat_layers(step.layer)
            if isinstance(layer, keras.layers.BatchNormalization)
            and not internals.has_own_moments(layer)
        ]
        self._seeds = {id(v) for v in function.seeds}
        self._weights = [
            (v, _not_zero(v)) for v in step.layer.trainable_variables
        ]

    def run(
        self,
        given: TrialInputs,
        differentiates: bool = False,
        more: Sequence[Any] = (),
    ) -> Outcome:
        """Runs it, with gradients or not.

        `more` are pairs of variables and values that it shall have besides.
        """
        check_interruption(in_trial=True)
        flat, masks = Boundary.of(given.nest)
        inputs = [None if t is None else tf.identity(t) for t in flat]
        nest = Boundary(inputs, masks).nest(structure_of(given.nest))
        # The identities of `nest` are not those of `inputs`: watch these.
        inputs = tree.flatten(nest)
        values = [*self._weights, *given.state.values(), *more]
        with self._tape(differentiates, inputs) as tape, self._around():
            scope = _Scope(values)
            with scope, internals.alike_rows(_num_rows(inputs)) as draws:
                made = self.step(nest, self.function.training)
            tensors, masks = Boundary.of(made)
            losses = [tf.reduce_sum(loss) for loss in scope.losses]
        state = {
            key: (v, scope.get_current_value(v))
            for key, v in scope.assigned.items()
        }
        is_known = self._drawn(state, values) == len(draws)
        return Outcome(
            made,
            tensors,
            masks,
            state,
            losses,
            self._results(state),
            draws if is_known else None,
            inputs,
            self._weights,
            tape,
            [],
            {},
            given.rows,
            given.total,
            self._num_bytes(inputs),
        )

    def _num_bytes(self, inputs: list[Any]) -> int:
        """Of the numbers in which most is lost."""
        inside = internals.flat_layers(self.layer)
        dtypes = [getattr(one, "compute_dtype", None) for one in inside]
        dtypes += [t.dtype for t in inputs if t is not None]
        known = [tf.as_dtype(d).real_dtype for d in dtypes if d is not None]
        return min((d.size for d in known if d.is_floating), default=8)

    def other_seeds(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Those that a later micro-batch finds."""
        return [
            (v, v.value + tf.constant([0, 1000], v.value.dtype))
            for v in self.function.seeds
        ]

    def later(
        self, varying: Sequence[keras.Variable]
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        """What a later micro-batch finds: other seeds, metrics and state.

        Of the state, what is in `varying` is other for each micro-batch.
        """
        seeds = self.other_seeds()
        own = {id(v) for v, _ in seeds}
        metrics = [v for m in self.metrics for v in m.variables]
        others = [v for v in [*metrics, *varying] if id(v) not in own]
        return [
            *seeds,
            *((v, v.value + tf.ones_like(v.value)) for v in others),
        ]

    def has_side_effects(self, given: TrialInputs) -> bool:
        """Whether its graph has operations that draw or write by themselves."""

        def run(tensors: list[Any], masks: list[Any]) -> Any:
            nest = Boundary(tensors, masks).nest(structure_of(given.nest))
            return self.run(given._replace(nest=nest)).tensors

        traced = tf.function(run, autograph=False)
        graph = traced.get_concrete_function(*Boundary.of(given.nest)).graph
        kinds = {*stateful_kinds(graph.get_operations())}
        # A function of Python's has shown in a second run what it draws.
        return bool(kinds - {"PyFunc", "EagerPyFunc"})

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        with (
            tf.device(self.function.device),
            internals.tracing_anew(),
            internals.recording_moments(
                self.normalizations, lambda *_: None, _moving_moments
            ),
        ):
            yield

    def _tape(self, is_wanted: bool, inputs: list[Any]) -> Any:
        if not is_wanted:
            return contextlib.nullcontext()
        tape = tf.GradientTape(watch_accessed_variables=False)
        weights = [value for _, value in self._weights]

        @contextlib.contextmanager
        def watching() -> Iterator[tf.GradientTape]:
            with tape:
                for t in [*inputs, *weights]:
                    if is_continuous(t):
                        tape.watch(t)
                yield tape

        return watching()

    def _drawn(self, state: Values, values: Sequence[Any]) -> int:
        """How many random numbers, or sets of them, seeds have given."""
        before = {id(v): value for v, value in values}
        count = 0
        for key in self._seeds & state.keys():
            variable, new = state[key]
            old = before.get(key, variable.value)
            count += int(tf.cast(new - old, tf.int64)[1])
        return count

    def _results(self, state: Values) -> dict[str, Any]:
        """Of the metrics, with the values that they have now."""
        if not self.metrics:
            return {}
        with tf.device(self.function.device), _Scope([*state.values()]):
            return {
                f"{metric.name}.{i}": tf.convert_to_tensor(result)
                for metric in self.metrics
                for i, result in enumerate(tree.flatten(metric.result()))
            }


def _num_rows(tensors: list[Any]) -> int | None:
    found = (t.shape[0] for t in tensors if t is not None and t.shape)
    return next(found, None)


def _not_zero(variable: keras.Variable) -> tf.Tensor:
    """A weight's value, or a drawn one where it is zero throughout."""
    value = variable.value.read_value()
    if not is_continuous(value) or tf.reduce_any(value != 0):
        return value
    drawn = tf.random.stateless_normal(variable.shape, (1, 2))
    return tf.cast(drawn, value.dtype)


def _moving_moments(layer: Any, inputs: Any, mask: Any) -> Any:
    """What a batch normalisation normalises by in a trial."""
    del mask
    statistics = layer.moving_mean, layer.moving_variance
    return tuple(keras.ops.cast(v, inputs.dtype) for v in statistics)


def differentiated(made: Outcome, axes: Sequence[int]) -> Outcome:
    """With gradients, for cotangents of its outputs and shares of its losses.

    It has run on a tape. `axes` are those of the rows, see `row_axis`, one for
    each output; those that are `UNCLEAR` are left out.
    """
    pairs = [
        (t, cotangent(i, t, axis, made.rows, made.total))
        for i, (t, axis) in enumerate(zip(made.tensors, axes))
        if is_continuous(t) and axis != UNCLEAR
    ]
    pairs += [
        (loss, tf.constant(made.share, loss.dtype)) for loss in made.losses
    ]
    targets, seeds = zip(*pairs) if pairs else ((), ())
    sources = [t for t in made.inputs if is_continuous(t)]
    weights = [own for own in made.weights if is_continuous(own[1])]
    found = [None] * (len(sources) + len(weights))
    if targets:
        found = made.tape.gradient(
            list(targets), [*sources, *(w for _, w in weights)], list(seeds)
        )
    iterator = iter(found)
    return made._replace(
        tape=None,
        dx=[next(iterator) if is_continuous(t) else None for t in made.inputs],
        dw={id(v): (v, next(iterator)) for v, _ in weights},
    )


def look_up(
    tried: TriedCall,
    given: Sequence[TrialInputs],
    axes: Sequence[int],
    varying: Sequence[keras.Variable],
) -> tuple[dict[int, list[bool]], list[Any]]:
    """Finds out which lookups of a step are repeated.

    It is run on all rows and on each part, as `given`, with state in `varying`
    that micro-batches have assigned otherwise. Returns, by the ids of weights,
    for each lookup whether it is repeated; and the weights of which slices are
    neither kept apart nor repeated.
    """
    found = [_slices(tried, g, axes) for g in given]
    later = _slices(tried, given[0], axes, tried.later(varying), times=2)
    repeated: dict[int, list[bool]] = {}
    odd = []
    for key, (variable, whole) in found[0].items():
        parts = [own[key][1] for own in found[1:]]
        kinds = [_kind(*own) for own in zip(whole, *parts)]
        for lookup, (one, other) in enumerate(zip(whole, later[key][1])):
            if not np.array_equal(one, other):
                kinds[lookup] = False  # each micro-batch has its own
        counts = {len(whole), *map(len, parts)}
        if None in kinds or len(counts) > 1:
            odd.append(variable)
        repeated[key] = [kind is True for kind in kinds]
    return repeated, odd


def are_by_rows(made: Sequence[Outcome]) -> bool:
    """Whether all slices are shown to be those of rows, by their indices."""
    for key, (_, d) in made[0].dw.items():
        found = [d, *(own.dw[key][1] for own in made[1:])]
        if not isinstance(d, tf.IndexedSlices):
            continue
        if not all(isinstance(own, tf.IndexedSlices) for own in found):
            return False
        whole, *parts = (own.indices.numpy() for own in found)
        if not np.array_equal(whole, np.concatenate(parts)):
            return False
    return True


def _kind(whole: Any, *parts: Any) -> bool | None:
    """Whether it is repeated; None if it is neither that nor by rows."""
    if np.array_equal(whole, np.concatenate(parts)):
        return False
    return True if all(np.array_equal(whole, p) for p in parts) else None


def _slices(
    tried: TriedCall,
    given: TrialInputs,
    axes: Sequence[int],
    more: Sequence[Any] = (),
    times: int = 1,
) -> dict[int, tuple[Any, list[Any]]]:
    """By ids of weights the indices of each lookup.

    In a graph, as in a step: there TensorFlow shows lookups one by one. What
    is drawn by no seed of Keras's is other in a second run.
    """
    flat, masks = Boundary.of(given.nest)
    structure = structure_of(given.nest)
    variables: list[Any] = []

    def indices(tensors: list[Any], masks: list[Any]) -> list[Any]:
        nest = Boundary(tensors, masks).nest(structure)
        run = tried.run(given._replace(nest=nest), True, more)
        made = differentiated(run, axes)
        sparse = [
            (v, lookups(d))
            for v, d in made.dw.values()
            if isinstance(d, tf.IndexedSlices)
        ]
        variables[:] = [v for v, _ in sparse]
        return [[part.indices for part in parts] for _, parts in sparse]

    traced = tf.function(indices, autograph=False)
    function = traced.get_concrete_function(flat, masks)
    for _ in range(times):
        made = function(flat, masks)
    return {
        id(v): (v, [i.numpy() for i in own]) for v, own in zip(variables, made)
    }
