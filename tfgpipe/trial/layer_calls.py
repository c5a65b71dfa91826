"""Tries whether the calls inside a layer compute what the layer computes.

For that it runs layers unnoticed, and sees which variables they use.

What a layer's code does for other sizes, in another phase, or to tensors that
have values, neither the code nor one graph of it tells. So both are run, on
drawn rows: the layer, called as Keras calls it, and the calls. Compared are
outputs with their masks, what they assign, and what they add to the loss; once
also gradients with respect to inputs and weights.

Sizes that are not known are 1, even, odd, a multiple of 4 and long, and so are
numbers of rows, as far as that is cheap: what it takes is estimated by weights
and positions. The sizes that a mini-batch really has are tried when it comes.
Weights have the values that they have; but those that are all equal, as where
they begin with zeros, which would hide what is computed with them, are drawn.

Cost: both run twice for each size, forward, eagerly; once for a long one.
Not seen: what depends on values that were not drawn, and on other sizes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.boundary import is_continuous
from tfgpipe.trial.compare import distance, largest
from tfgpipe.trial.python_state import is_changed, python_state

Shapes: TypeAlias = list[tuple[int, ...]]

# Rows, and what every other unknown size is.
_SIZES = ((2, 6), (3, 5), (4, 8), (1, 1))

_LONG_SIZES = ((1, 2050), (2050, 1))  # not in training, which takes longer

# FLOPs of a run: a tenth of a second, about.
_AFFORDABLE = 1e10


class CallTrialResult(NamedTuple):
    """What a trial has found.

    Attributes:
        has_run: Whether the layer could be run at these sizes.
        is_same: Whether the calls compute the same, or fail as well.
    """

    has_run: bool
    is_same: bool


class _CallOutcome(NamedTuple):
    """What a run has made; of tensors that are not there, None."""

    outputs: list[Any]
    masks: list[Any]
    losses: list[Any]
    assigned: dict[int, Any]
    gradients: list[Any]


class LayerTrial:
    """A layer of a model's graph, and the calls that would take its place.

    `run_calls` makes these on `tensors_of` the call, told `training`, and
    returns what the layer returns, flat.
    """

    def __init__(
        self,
        call: internals.GraphCall,
        run_calls: Callable[[list[Any], bool], list[Any]],
    ):
        self._call = call
        self._run_calls = run_calls
        self._tensors = tensors_of(call)
        self._layer = call.operation

    @property
    def name(self) -> str:
        """The layer's name, for messages."""
        return self._layer.name

    def agrees(self) -> bool:
        """Whether the calls can take the place of the layer.

        Not if there is a difference, nor if half of the trials, or more, fail.
        """
        short = self._shapes(_SIZES)
        long = [s for s in self._shapes(_LONG_SIZES) if s not in short]
        tries = [(shapes, told) for shapes in short for told in (True, False)]
        tries += [(shapes, False) for shapes in long]
        num_run = 0
        for i, (shapes, training) in enumerate(tries):
            one = self.found(shapes, training, with_gradients=i == 0)
            if one.has_run and not one.is_same:
                return False
            num_run += one.has_run
        return 2 * num_run > len(tries)

    def found(
        self, shapes: Shapes, training: bool, with_gradients: bool = False
    ) -> CallTrialResult:
        """Runs both on drawn tensors of some shapes."""
        with tf.device("CPU:0"), calls_undone(()):
            given = self._drawn(shapes)
            expected, found = (
                self._run(function, given, training, with_gradients)
                for function in (self._run_layer, self._run_calls)
            )
        if expected is None or found is None:
            return CallTrialResult(expected is not None, expected is found)
        if _says_nothing(expected.outputs):
            return CallTrialResult(False, True)
        return CallTrialResult(True, _are_near(found, expected))

    def leaves_something(self) -> bool:
        """Whether the layer's code leaves something in Python."""
        shapes = self._shapes(_SIZES)[0]
        states = []  # after each run: the first may keep these sizes
        with tf.device("CPU:0"), calls_undone(()):
            for training in (True, False, True):
                self._run(self._run_layer, self._drawn(shapes), training, False)
                states.append(python_state([self._layer]))
        self.forget_values()
        return any(map(is_changed, states, states[1:]))

    def _drawn(self, shapes: Shapes) -> list[tf.Tensor]:
        """Tensors for the layer, the same for the same shapes."""
        rng = np.random.default_rng(0)
        return [
            _drawn(rng, shape, tensor.dtype)
            for shape, tensor in zip(shapes, self._tensors)
        ]

    def is_affordable(self, shapes: Shapes) -> bool:
        """Whether a run at these sizes takes little time."""
        positions = max(math.prod(shape[:-1]) for shape in shapes)
        num_weights = sum(math.prod(w.shape) for w in self._layer.weights)
        return 2 * num_weights * positions <= _AFFORDABLE

    def _shapes(self, sizes: Sequence[tuple[int, int]]) -> list[Shapes]:
        """The shapes to try, each once: the first, and what is affordable."""
        found = [
            with_sizes((t.shape for t in self._tensors), rows, size)
            for rows, size in sizes
        ]
        return [
            shapes
            for i, shapes in enumerate(found)
            if shapes not in found[:i]
            if (i == 0 and sizes is _SIZES) or self.is_affordable(shapes)
        ]

    def _run_layer(self, given: list[Any], training: bool) -> Any:
        """Calls the layer on tensors in the places of the symbolic ones."""
        by = dict(zip(map(id, self._tensors), given))
        args, kwargs = tree.map_structure(
            lambda leaf: by.get(id(leaf), leaf),
            (self._call.args, self._call.kwargs),
        )
        kwargs["training"] = training  # whatever the graph was made with
        return self._layer(*args, **kwargs)

    def _run(
        self,
        function: Callable[[list[Any], bool], Any],
        given: list[tf.Tensor],
        training: bool,
        with_gradients: bool,
    ) -> _CallOutcome | None:
        """What a function makes of tensors; None if it fails."""
        values = self._values
        scope = keras.StatelessScope(values, True, False)
        trained = [value for variable, value in values if variable.trainable]
        sources = [*filter(is_continuous, [*given, *trained])]
        try:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                for source in sources if with_gradients else ():
                    tape.watch(source)
                with scope, internals.told_training(self._layer, training):
                    outputs = tree.flatten(function(given, training))
            gradients = _gradients(tape, outputs, sources, with_gradients)
        except Exception:  # a user's code may raise anything
            return None
        finally:
            internals.forget_losses(self._layer)
        before = {id(variable): value for variable, value in values}
        assigned = {
            key: value
            for key, value in scope.state_mapping.items()
            if value is not before.get(key)
        }
        masks = [internals.get_mask(tensor) for tensor in outputs]
        return _CallOutcome(outputs, masks, scope.losses, assigned, gradients)

    def forget_values(self) -> None:
        """Lets go of the values of weights, which a step assigns anew."""
        vars(self).pop("_values", None)

    @functools.cached_property
    def _values(self) -> list[tuple[keras.Variable, Any]]:
        """The variables of the layer, and what they are in a trial."""
        rng = np.random.default_rng(1)
        return [(v, _value_of(v, rng)) for v in self._layer.variables]


def with_sizes(shapes: Iterable[Sequence[Any]], rows: int, size: int) -> Shapes:
    """Shapes with a number of rows, and a size, where there is None."""
    return [
        tuple(
            d if d is not None else size if axis else rows
            for axis, d in enumerate(shape)
        )
        for shape in shapes
    ]


def _drawn(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str
) -> tf.Tensor:
    """A tensor; of whole numbers, such as there are in every table."""
    if keras.backend.is_float_dtype(dtype):
        return tf.cast(rng.standard_normal(shape), dtype)
    return tf.cast(rng.integers(0, 2, shape), dtype)


def _value_of(variable: keras.Variable, rng: np.random.Generator) -> Any:
    """The value of a variable, or a drawn one, positive as a variance is."""
    is_float = keras.backend.is_float_dtype(variable.dtype)
    if internals.is_created(variable) or not is_float:
        value = tf.identity(variable.value)  # or what it will begin with
        array = np.asarray(value).ravel()
        is_varied = bool(np.any(array != array[:1]))
        if value.dtype == tf.bool and not is_varied:
            return tf.logical_not(value)
        if value.dtype.is_integer and not is_varied:
            return value + tf.ones_like(value)
        if not is_float or (is_varied and np.all(array)):
            return value
    # Zeros and equal numbers would hide what a layer does with them.
    shape = variable.shape
    fan_in = math.prod(shape[:-1]) if len(shape) > 1 else 1
    drawn = rng.uniform(0.5, 1.5, shape) / math.sqrt(fan_in)
    return tf.cast(drawn, variable.dtype)


def _gradients(
    tape: tf.GradientTape,
    outputs: list[Any],
    sources: list[tf.Tensor],
    is_asked: bool,
) -> list[Any]:
    """Gradients of the outputs, each weighed by a drawn tensor."""
    if not is_asked:
        return []
    rng = np.random.default_rng(2)
    made = [*filter(is_continuous, outputs)]
    weights = [_drawn(rng, tuple(t.shape), t.dtype.name) for t in made]
    found = tape.gradient(made, sources, weights) if made else []
    return [g if g is None else tf.convert_to_tensor(g) for g in found]


def _are_near(found: _CallOutcome, expected: _CallOutcome) -> bool:
    """Whether two runs made the same but for rounding.

    Differences are by the largest value of a tensor. What is zero is so but for
    rounding: of gradients by the largest of all, of anything else by that which
    is least, as a bias that hides positions is 1e9 times larger.
    """
    if found.assigned.keys() != expected.assigned.keys():
        return False
    pairs: Iterable[tuple[Any, Any]] = zip(found, expected)
    for ours, theirs in pairs:
        of = max if theirs is expected.gradients else min
        if isinstance(theirs, dict):
            ours, theirs = [ours[key] for key in theirs], [*theirs.values()]
        sizes = [float(largest(t)) for t in theirs if is_continuous(t)]
        least = 1e-3 * of(filter(None, sizes), default=0.0)
        if len(ours) != len(theirs) or any(
            distance(b, a, least) for a, b in zip(ours, theirs)
        ):
            return False
    return True


def _says_nothing(outputs: list[Any]) -> bool:
    """Whether no value is finite."""
    return not any(
        np.isfinite(tf.cast(tensor, "float64").numpy()).any()
        for tensor in outputs
    )


class Uses(NamedTuple):
    """The ids of the variables that a call uses.

    Attributes:
        all: Of those that it reads or assigns.
        assigned: Of those that it may assign.
    """

    all: set[int]
    assigned: set[int]


class UsageScope(internals.ReadingScope):
    """Notes which variables are read and assigned; none changes.

    Attributes:
        used: ids of all of them.
        assigned: ids of those that are assigned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()
        self.assigned: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Called where a variable is read."""
        self.used.add(id(variable))
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """`Variable.assign` calls it: the variable is noted, and stays."""
        self.used.add(id(update[0]))
        self.assigned.add(id(update[0]))
        super().add_update(update)


@contextlib.contextmanager
def calls_undone(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Inside, calls of these layers leave nothing behind."""
    with (
        internals.in_no_graph(layers),
        internals.names_kept(),
        internals.seed_generator_kept(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the real calls will warn
        yield


def uses_of(
    operation: Any, specs: list[Any], arguments: Callable[[list[Any]], Any]
) -> Uses | None:
    """The variables that a call uses, in training or not.

    Those of other layers are among them, which a function may have in its
    closure or take as arguments. So it is run, except where there is nothing
    but Keras's own code: that uses its own variables, and a layer with none
    inside assigns those that no optimizer trains. `arguments` makes (args,
    kwargs) of tensors like `specs`. None if the call fails on symbolic tensors,
    or leaves something in `python_state`, where other calls may find it.
    """
    if _is_own(operation, arguments(specs)):
        variables = getattr(operation, "variables", ())
        state = internals.state_of(operation).all
        return Uses({id(v) for v in variables} | state, state)
    is_layer = isinstance(operation, keras.layers.Layer)
    layers = internals.flat_layers(operation) if is_layer else []
    before = python_state(layers or [operation])
    scope = UsageScope()

    def run(*tensors: Any) -> None:
        args, kwargs = arguments([*tensors])
        with scope:
            for training in (True, False) if is_layer else ():
                operation(*args, **{**kwargs, "training": training})
            if not is_layer:
                operation(*args, **kwargs)

    with calls_undone(layers):
        try:
            internals.output_spec(run, *specs)
        except Exception:  # a user's code may raise anything
            return None
    if is_changed(before, python_state(layers or [operation])):
        return None
    return Uses(scope.used, scope.assigned)


def masked_layers(model: keras.Model) -> set[int]:
    """The ids of the layers that get masks when the model runs.

    Symbolic tensors do not show them: inside a nested model they have none, and
    behind a layer that says that it supports none there may be one. Where the
    model fails on unknown sizes, they are known; all layers if it fails again.
    """
    layers = internals.flat_layers(model)
    found: set[int] = set()
    if not any(map(_may_make_masks, layers)):
        return found

    def run(inputs: Any) -> None:
        for training in (True, False):
            model(inputs, training=training)

    def known(spec: keras.KerasTensor) -> keras.KerasTensor:
        (shape,) = with_sizes([spec.shape], *_SIZES[0])
        return keras.KerasTensor(shape, spec.dtype)

    def noting(layer: keras.layers.Layer) -> Callable:
        call = layer.call

        @functools.wraps(call)  # layers may ask others for their signature
        def noted(*args: Any, **kwargs: Any) -> Any:
            masks = map(internals.get_mask, tree.flatten((args, kwargs)))
            if any(mask is not None for mask in masks):
                found.add(id(layer))
            return call(*args, **kwargs)

        return noted

    with contextlib.ExitStack() as stack:
        stack.enter_context(calls_undone(layers))
        for layer in layers:
            stack.enter_context(
                internals.replaced_method(layer, "call", noting(layer))
            )
        for inputs in (model.input, tree.map_structure(known, model.input)):
            try:
                internals.output_spec(run, inputs)
                return found
            except Exception:  # a user's code may raise anything
                continue
    return set(map(id, layers))


def _may_make_masks(layer: keras.layers.Layer) -> bool:
    makers = keras.layers.Masking, keras.layers.Lambda
    is_keras = internals.is_keras(type(layer))
    has_zero = getattr(layer, "mask_zero", False)
    return not is_keras or isinstance(layer, makers) or has_zero


def _is_own(operation: Any, arguments: Any) -> bool:
    """Whether a call runs Keras's code alone, that of one layer."""
    if not internals.is_keras(type(operation)):
        return False
    is_layer = isinstance(operation, keras.layers.Layer)
    if is_layer and len(internals.flat_layers(operation)) > 1:
        return False
    if any(isinstance(v, keras.Variable) for v in tree.flatten(arguments)):
        return False
    given = [arguments, internals.own_attributes(operation)]
    return not any(
        callable(leaf) and not internals.is_keras(leaf)
        for leaf in tree.flatten(given)
    )


def tensors_of(call: internals.GraphCall) -> list[keras.KerasTensor]:
    """The tensors of a call, each once, in the order of its arguments."""
    leaves = tree.flatten((call.args, call.kwargs))
    found = {id(t): t for t in leaves if isinstance(t, keras.KerasTensor)}
    return list(found.values())
