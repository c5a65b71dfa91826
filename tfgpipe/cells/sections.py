"""Where in a graph each call of a layer begins, at any depth: its sections.

A model runs once, by its own call. While it does, each call of a layer begins a
section of the graph, which ends where the next one begins:

    model(x)      embed | block | attention | dense | block | attention | head
    operations    ......|.......|...........|.......|.......|...........|.....

Keras's own layers are whole. Models, wrappers and layers of a user's are gone
into: that is a rule of the layer alone, so sections are the same for every K.
Operations that functional models call, such as `x + y`, begin sections, too.
A cell is some sections, one after the other.

Inside of branches, loops and functions no cell can begin: they belong to the
section around them.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells.columns import Pieces, in_columns
from tfgpipe.failures import check_interruption


class Section(NamedTuple):
    """A call of a layer, up to the next call.

    Attributes:
        around: The layers that are being called, the outermost first, and at
            last what is called; empty outside of all calls.
        call: Which call of the last one it is: 0, 1, ...
        start: How many operations the graph had before it.
        ends: How many it had when that call returned, and then those around
            it, if no other section had begun before.
        arguments: The tensors that it is called on, and what else.
    """

    around: tuple[keras.Operation, ...]
    call: int
    start: int
    ends: list[int]
    arguments: tuple[Any, ...] = ()

    def around_at(self, place: int) -> tuple[keras.Operation, ...]:
        """The layers that were being called when an operation was made."""
        ended = sum(end <= place for end in self.ends)
        return self.around[: len(self.around) - ended]

    @property
    def operation(self) -> keras.Operation | None:
        """The layer or operation that is called; None where there is none."""
        return self.around[-1] if self.around else None

    @property
    def layer(self) -> keras.layers.Layer | None:
        """The layer that is called; None where there is none."""
        called = self.operation
        return called if isinstance(called, keras.layers.Layer) else None

    @property
    def name(self) -> str:
        """What to call it: the names of the layers around it, and its own."""
        return "/".join(layer.name for layer in self.around) or "the model"

    @property
    def words(self) -> str:
        """What to call it in a sentence."""
        if not self.around:
            return self.name
        kind = "operation" if self.layer is None else "layer"
        return f"{kind} '{self.name}'"


def is_named(section: Section, name: str) -> bool:
    """Whether a section is of a layer, by its name or with those around it.

    Example:

    >>> block = keras.layers.Layer(name="block")
    >>> dense = keras.layers.Layer(name="dense")
    >>> section = Section((block, dense), 0, 0, [])
    >>> [is_named(section, name) for name in ("dense", "block/dense", "block")]
    [True, True, False]
    """
    return f"/{section.name}".endswith(f"/{name}")


def is_whole(layer: keras.Operation) -> bool:
    """Whether the calls inside a layer, or operation, begin no sections."""
    if not isinstance(layer, keras.layers.Layer):
        return True
    if isinstance(layer, (keras.Model, keras.layers.Wrapper)):
        return isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional))
    return internals.is_keras(type(layer))


class Sections:
    """The sections of the current graph.

    Args:
        home: The cell in which a call is to be, by what is called and which
            of its calls it is; None where nobody has said so, then it goes
            with the one before. None goes back.
        around: A context for the call of a layer, by the layer and its cell.
        shards: By the id of a layer, in how many groups of columns it is
            computed: its sections are in a cell each, from that of its `home`
            on, between one before and one behind, see `columns.py`.
        reading: A context in which pieces of weights are read.

    Attributes:
        found: The sections, in order.
        cells: The cell of each.
    """

    def __init__(
        self,
        home: Callable[[keras.Operation, int], int | None],
        around: Callable[
            [keras.Operation, int], contextlib.AbstractContextManager
        ],
        shards: Mapping[int, int] | None = None,
        reading: Callable[[Pieces], Any] | None = None,
    ):
        self._shards = shards or {}
        self._reading = reading
        self.found = [Section((), 0, 0, [])]
        self.cells = [0]
        self._home = home
        self._around = around
        self._graph = internals.current_graph()
        self._around_call: list[keras.Operation] = []
        self._is_inside_whole = False
        self._calls: collections.Counter[int] = collections.Counter()
        self._index_in_cell = -1

    @property
    def current(self) -> int:
        """The section of what is made now."""
        return len(self.found) - 1

    def begin(
        self, cell: int | None = None, arguments: tuple[Any, ...] = ()
    ) -> None:
        """What is made from now on is a section, in this cell or a later."""
        around, call = tuple(self._around_call), 0
        if around:
            layer = around[-1]
            call = self._calls[id(layer)]
            self._calls[id(layer)] += 1
            cell = self._home(layer, call)
            if id(layer) in self._shards and cell is not None:
                cell -= 1  # what it is given is handed out there
        self._add(around, call, cell, arguments)

    def _add(
        self,
        around: tuple[keras.Operation, ...],
        call: int,
        cell: int | None,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        last = self.cells[-1]
        cell = max(last, cell or 0)
        self._index_in_cell = self._index_in_cell + 1 if cell == last else 0
        place = self._graph.num_operations()
        self.found.append(Section(around, call, place, [], arguments))
        self.cells.append(cell)

    def noting(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the calls of layers and operations begin sections."""
        return internals.around_calls(self._called)

    def _called(self, layer: Any, run: Any) -> Any:
        is_outside = internals.current_graph() is not self._graph
        if is_outside or self._is_inside_whole:
            return run()
        check_interruption()
        self._around_call.append(layer)
        self.begin(arguments=run.args[1:] or _first_tensors(run.keywords))
        cell = self.cells[-1]
        # `failures.py` finds the scope in errors at run time.
        scope = f"cell_{cell}/layer_{self._index_in_cell}"
        try:
            with (
                self._around(layer, cell),
                internals.replaced(self, "_is_inside_whole", is_whole(layer)),
                internals.tracing_anew(),
                tf.name_scope(scope),
            ):
                if not self._has_shards(layer):
                    return run()
                call = self._in_columns(layer, cell + 1)
                with internals.replaced_method(layer, "call", call):
                    return run()
        finally:
            self._around_call.pop()
            self.found[-1].ends.append(self._graph.num_operations())

    def _has_shards(self, layer: keras.Operation) -> bool:
        """Whether a call that has begun has cells for its shards.

        Not one that there was not when cells were made, or in another order:
        it is computed whole.
        """
        home = self._home(layer, self.found[-1].call)
        if id(layer) not in self._shards or home is None:
            return False
        return self.cells[-1] == home - 1

    def _in_columns(self, layer: Any, first: int) -> Callable[..., Any]:
        """The `call` of a layer, in groups of columns from a cell on."""
        around = tuple(self._around_call)
        call = self._calls[id(layer)] - 1
        return in_columns(
            layer,
            self._shards[id(layer)],
            lambda i: self._add(around, call, first + i),
            self._reading or contextlib.nullcontext,
        )


def _first_tensors(keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """The first keyword argument that has tensors, masks left out."""
    found = [
        value
        for name, value in keywords.items()
        if name != "mask" and any(map(tf.is_tensor, tree.flatten(value)))
    ]
    return (*found[:1],)
