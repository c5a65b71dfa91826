"""Refuses layers of a functional model that is no chain.

A functional model is a graph of layers and of operations such as `+`, which are
no layers. Its list of layers says nothing of branches and operations: called
one after the other, the layers compute something else. Keras notes in each
layer on which symbolic tensors it was called; so the chain that is asked for
can be compared with the graph.

A layer that was never called in a graph goes anywhere, and so does one that
takes the outputs of a layer that is left out: the user has put something else
in its place, or begins in the middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tfgpipe import internals
from tfgpipe.internals import SymbolicCall


def graph_problem(
    layers: Sequence[keras.layers.Layer], first: Any = None, start: int = 0
) -> str | None:
    """What of the layers' graph is not the chain of the layers, or None.

    Args:
        layers: The layers, in order.
        first: The `keras.KerasTensor` before them, if it is given.
        start: Index of the first layer in the user's list.
    """
    return _Chain(layers).problem(first, start)


class _Chain:
    """Follows the layers through their graphs."""

    def __init__(self, layers: Sequence[keras.layers.Layer]):
        self._layers = layers
        self._own = {id(layer) for layer in layers}
        self._taken: set[int] = set()  # tensors that earlier layers take

    def problem(self, first: Any, start: int) -> str | None:
        """See `graph_problem`."""
        before = _Outputs(_input_calls(first), "the input")
        for i, layer in enumerate(self._layers, start):
            calls = internals.symbolic_calls(layer)
            found = [c for c in calls if self._follows(c, before)]
            if calls and not found:
                return (
                    f"layer '{layer.name}' at index {i}, which was called on "
                    f"{_names(calls)}, not on the outputs of {before.name} "
                    "alone"
                )
            for call in calls:
                self._taken |= _ids(call.inputs)
            before = _Outputs(found, f"layer '{layer.name}'")
        return self._problem_after(before.calls)

    def _follows(self, call: SymbolicCall, before: _Outputs) -> bool:
        """Whether a call is the next of the chain, or begins another one."""
        if any(_ids(call.inputs) == _ids(c.outputs) for c in before.calls):
            return True
        sources = [internals.producer(t) for t in call.inputs]
        if any(id(source) in self._own for source in sources):
            return False
        are_layers = not any(_is_operation(source) for source in sources)
        is_fork = bool(_ids(call.inputs) & self._taken)
        return not is_fork and (are_layers or not before.calls)

    def _problem_after(self, last: list[SymbolicCall]) -> str | None:
        """What takes the outputs of the last layer that is missing, or None."""
        following: list[Any] = []
        for call in last:
            users = [
                c.operation
                for c in internals.calls_on(self._layers[-1])
                if _ids(c.inputs) & _ids(call.outputs)
            ]
            following = [
                u for u in users if id(u) in self._own or _is_operation(u)
            ]
            if not following:
                return None
        if not following:
            return None
        return (
            f"layer '{self._layers[-1].name}' at the end, whose outputs go to "
            f"{_quoted(following)}"
        )


class _Outputs:
    """What the next layer should take, and of what it is."""

    def __init__(self, calls: list[SymbolicCall], name: str):
        self.calls = calls
        self.name = name


def _input_calls(first: Any) -> list[SymbolicCall]:
    """The call that made an input, if it goes anywhere."""
    layer = internals.producer(first)
    if layer is None or not internals.calls_on(layer):
        return []
    return internals.symbolic_calls(layer)


def _is_operation(source: Any) -> bool:
    """Whether something that was called, or None, is no layer."""
    return source is not None and not isinstance(source, keras.layers.Layer)


def _ids(tensors: Iterable[Any]) -> set[int]:
    return {id(tensor) for tensor in tensors}


def _names(calls: list[SymbolicCall]) -> str:
    return _quoted(internals.producer(t) for c in calls for t in c.inputs)


def _quoted(operations: Iterable[Any]) -> str:
    """Names of layers and operations, each once."""
    texts = [
        f"{'layer' if isinstance(o, keras.layers.Layer) else 'operation'} "
        f"'{getattr(o, 'name', o)}'"
        for o in operations
    ]
    return " and ".join(dict.fromkeys(texts))
