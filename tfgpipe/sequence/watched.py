"""Runs layers unnoticed, and sees which variables they use."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
from keras import tree

from tfgpipe import internals


class Uses(NamedTuple):
    """The ids of the variables that a call uses.

    Attributes:
        all: Of those that it reads or assigns.
        assigned: Of those that it may assign.
    """

    all: set[int]
    assigned: set[int]


class WatchingScope(internals.ReadingScope):
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
        """Called by `Variable.assign`."""
        self.used.add(id(update[0]))
        self.assigned.add(id(update[0]))
        super().add_update(update)


@contextlib.contextmanager
def unnoticed(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
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
    inside assigns those that no optimizer trains.

    Args:
        operation: A layer or operation of a model's graph.
        specs: `keras.KerasTensor`s of the tensors that it takes.
        arguments: Makes positional and keyword arguments of such tensors.

    Returns:
        None if the call fails on symbolic tensors, or leaves something in an
        attribute, where other calls may find it.
    """
    if _is_own(operation, arguments(specs)):
        variables = getattr(operation, "variables", ())
        state = internals.state_of(operation).all
        return Uses({id(v) for v in variables} | state, state)
    is_layer = isinstance(operation, keras.layers.Layer)
    layers = internals.flat_layers(operation) if is_layer else []
    before = [internals.own_attributes(layer) for layer in layers]
    scope = WatchingScope()

    def run(*tensors: Any) -> None:
        args, kwargs = arguments([*tensors])
        with scope:
            for training in (True, False) if is_layer else ():
                operation(*args, **{**kwargs, "training": training})
            if not is_layer:
                operation(*args, **kwargs)

    with unnoticed(layers):
        try:
            internals.output_spec(run, *specs)
        except Exception:  # a user's code may raise anything
            return None
    after = [internals.own_attributes(layer) for layer in layers]
    if not all(map(_are_same, before, after)):
        return None
    return Uses(scope.used, scope.assigned)


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


def _are_same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(
        after[name] is value for name, value in before.items()
    )
