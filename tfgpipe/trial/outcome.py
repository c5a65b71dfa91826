"""What a layer makes of some rows: outputs, state, losses, gradients.

Nothing changes by it: weights are given as tensors, and assignments are held
back. Keras's batch normalisations normalise by their moving statistics, as
moments are those of micro-batches by the paper's rule. All rows get the same
random numbers. Weights of zeros, behind which nothing would show, are drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import (
    Boundary,
    CellFunction,
    is_continuous,
    stateful_kinds,
    structure_of,
)
from tfgpipe.trial.rows import ROWS, UNCLEAR, cotangent

Values = dict[int, tuple[keras.Variable, tf.Tensor]]


class Given(NamedTuple):
    """What a layer is run on.

    Attributes:
        nest: Its inputs.
        state: By the ids of variables what earlier layers have made of them.
        rows: Which ones of all rows these are.
    """

    nest: Any
    state: Values
    rows: slice


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


class _Scope(internals.ReadingScope):
    """Holds assignments back, and notes them."""

    def __init__(self, given: Any):
        super().__init__(given, collect_losses=True)
        self.assigned: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Called by `Variable.assign`."""
        super().add_update(update)
        self.assigned[id(update[0])] = update[0]


class TriedStep:
    """One step of a cell, to be run on some rows.

    Args:
        function: Of its cell.
        step: The step.
    """

    def __init__(self, function: CellFunction, step: Any):
        self.function, self.step, self.layer = function, step, step.layer
        self.metrics = [m for m in step.layer.metrics if m.variables]
        self._normalizations = [
            layer
            for layer in internals.flat_layers(step.layer)
            if isinstance(layer, keras.layers.BatchNormalization)
        ]
        self._seeds = {id(v) for v in function.seeds}
        self._weights = [
            (v, _not_zero(v)) for v in step.layer.trainable_variables
        ]

    def run(
        self,
        given: Given,
        differentiates: bool = False,
        more: Sequence[Any] = (),
    ) -> Outcome:
        """Runs it.

        Args:
            given: What it takes.
            differentiates: Whether gradients are wanted.
            more: Pairs of variables and values that it shall have besides.
        """
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
        )

    def later(
        self, varying: Sequence[keras.Variable]
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        """What a later micro-batch finds: other seeds, metrics and state.

        Args:
            varying: The state that is other for each.
        """
        seeds = [
            (v, v.value + tf.constant([0, 1000], v.value.dtype))
            for v in self.function.seeds
        ]
        own = {id(v) for v, _ in seeds}
        metrics = [v for m in self.metrics for v in m.variables]
        others = [v for v in [*metrics, *varying] if id(v) not in own]
        return [
            *seeds,
            *((v, v.value + tf.ones_like(v.value)) for v in others),
        ]

    def has_side_effects(self, given: Given) -> bool:
        """Whether its graph has operations that draw or write by themselves."""

        def run(tensors: list[Any], masks: list[Any]) -> Any:
            nest = Boundary(tensors, masks).nest(structure_of(given.nest))
            return self.run(given._replace(nest=nest)).tensors

        traced = tf.function(run, autograph=False)
        graph = traced.get_concrete_function(*Boundary.of(given.nest)).graph
        return bool(stateful_kinds(graph.get_operations()))

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        with (
            tf.device(self.function.device),
            internals.tracing_anew(),
            internals.recording_moments(
                self._normalizations, lambda *_: None, _moving_moments
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


def differentiated(made: Outcome, axes: Sequence[int], rows: slice) -> Outcome:
    """With gradients of its outputs by cotangents, and of its losses by rows.

    Args:
        made: What was run on a tape.
        axes: For each output that of the rows, see `row_axis`; those that are
            `UNCLEAR` are left out.
        rows: Which ones of all rows it has.
    """
    share = (rows.stop - rows.start) / ROWS
    pairs = [
        (t, cotangent(i, t, axis, rows))
        for i, (t, axis) in enumerate(zip(made.tensors, axes))
        if is_continuous(t) and axis != UNCLEAR
    ]
    pairs += [(loss, tf.constant(share, loss.dtype)) for loss in made.losses]
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
