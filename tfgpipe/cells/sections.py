"""Sections: where in a graph each call of a layer begins, at any depth.

A model runs once, by its `call`. While it does, each call of a layer begins a
section of the graph, which ends where the next one begins:

    model(x)      embed | block | attention | dense | block | attention | head
    operations    ......|.......|...........|.......|.......|...........|.....

Keras's layers are whole. Calls inside of models, wrappers and layers of users
begin sections: a rule of the layer alone, so sections are the same for every K.
Operations that functional models call, such as `x + y`, begin sections, too.
A cell is some sections, one after the other.

Inside of branches, loops and functions no cell can begin: they belong to the
section around them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells.columns import Pieces, in_columns

# Returns the cell of a call, by the called operation and the number of the call
# (0, 1, ...); None for the cell of the call before.
Home = Callable[[keras.Operation, int], int | None]
# Returns a context for the call of a layer, by the layer and its cell.
Around = Callable[
    [keras.Operation, int], contextlib.AbstractContextManager[None]
]


class Section(NamedTuple):
    """A call of a layer, up to the next call.

    Attributes:
        around: The layers that are being called, the outermost first, and at
            last the called layer or operation; empty outside of all calls.
        call: The number of the call: 0, 1, ...
        start: Number of operations of the graph before it.
        ends: Numbers of operations when that call returned, and then the calls
            around it, if no other section had begun before.
        arguments: The arguments of the call, from the second one on.
    """

    around: tuple[keras.Operation, ...]
    call: int
    start: int
    ends: list[int]
    arguments: tuple[Any, ...] = ()

    def around_at(self, place: int) -> tuple[keras.Operation, ...]:
        """Returns the layers that were being called at an operation."""
        ended = sum(end <= place for end in self.ends)
        return self.around[: len(self.around) - ended]

    @property
    def operation(self) -> keras.Operation | None:
        """The called layer or operation, or None."""
        return self.around[-1] if self.around else None

    @property
    def layer(self) -> keras.layers.Layer | None:
        """The called layer, or None."""
        called = self.operation
        return called if isinstance(called, keras.layers.Layer) else None

    @property
    def name(self) -> str:
        """The names of the layers around it, and of the called one."""
        return "/".join(layer.name for layer in self.around) or "the model"

    @property
    def words(self) -> str:
        """Its name in a sentence."""
        if not self.around:
            return self.name
        kind = "operation" if self.layer is None else "layer"
        return f"{kind} '{self.name}'"


def is_named(section: Section, name: str) -> bool:
    """Returns whether a layer has this name, alone or after those around it.

    Example:

    >>> block = keras.layers.Layer(name="block")
    >>> dense = keras.layers.Layer(name="dense")
    >>> section = Section((block, dense), 0, 0, [])
    >>> [is_named(section, name) for name in ("dense", "block/dense", "block")]
    [True, True, False]
    """
    return f"/{section.name}".endswith(f"/{name}")


def is_whole(layer: keras.Operation) -> bool:
    """Returns whether calls inside of a layer or operation are no sections."""
    if not isinstance(layer, keras.layers.Layer):
        return True
    if isinstance(layer, (keras.Model, keras.layers.Wrapper)):
        return isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional))
    return internals.is_keras(type(layer))


@dataclasses.dataclass
class Sections:
    """The sections of the current graph.

    Args:
        home: Returns the cell of a call. A cell before the last one counts as
            the last one.
        around: Returns a context for the call of a layer.
        shards: By the id of a layer, its number of shards: each is a section in
            a cell of its own, from the layer's `home` on. One section before
            them is in the cell before, one after them in the cell after, see
            `columns.py`.
        reading: Returns a context in which pieces of weights are read.

    Attributes:
        sections: The sections, in order.
        cells: The cell of each.
    """

    home: Home
    around: Around
    shards: Mapping[int, int]
    reading: Callable[[Pieces], contextlib.AbstractContextManager[None]]

    def __post_init__(self) -> None:
        self.sections = [Section((), 0, 0, [])]
        self.cells = [0]
        self._graph = internals.current_graph()
        self._calling: list[keras.Operation] = []
        self._is_inside_whole = False
        self._num_calls: collections.Counter[int] = collections.Counter()
        self._index_in_cell = -1

    @property
    def current(self) -> int:
        """The number of the section of the next operation."""
        return len(self.sections) - 1

    def begin(
        self,
        cell: int | None,
        around: tuple[keras.Operation, ...] = (),
        call: int = 0,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        """Begins a section in this cell or a later one; None for this one."""
        last = self.cells[-1]
        cell = max(last, cell or 0)
        self._index_in_cell = self._index_in_cell + 1 if cell == last else 0
        start = self._graph.num_operations()
        self.sections.append(Section(around, call, start, [], arguments))
        self.cells.append(cell)

    def called(self, layer: keras.Operation, run: Any) -> Any:
        """Begins a section, if the layer is not inside of another's."""
        is_outside = internals.current_graph() is not self._graph
        if is_outside or self._is_inside_whole:
            return run()
        self._calling.append(layer)
        around = tuple(self._calling)
        call = self._num_calls[id(layer)]
        self._num_calls[id(layer)] += 1
        home = self.home(layer, call)
        # The cell before the first shard copies the arguments for all of them.
        has_shards = id(layer) in self.shards and home is not None
        begun = home - 1 if home is not None and has_shards else home
        self.begin(
            begun, around, call, run.args[1:] or _first_tensors(run.keywords)
        )
        cell = self.cells[-1]
        # `failures.py` finds the scope in errors at run time.
        scope = f"cell_{cell}/layer_{self._index_in_cell}"
        try:
            with (
                self.around(layer, cell),
                internals.replaced(self, "_is_inside_whole", is_whole(layer)),
                internals.tracing_anew(),
                tf.name_scope(scope),
            ):
                # A call that the run on shapes did not have, or had in another
                # order, is computed whole.
                if not has_shards or cell != begun:
                    return run()
                in_shards = in_columns(
                    layer,
                    self.shards[id(layer)],
                    lambda i: self.begin(cell + 1 + i, around, call),
                    self.reading,
                )
                with internals.replaced(layer, "call", in_shards):
                    return run()
        finally:
            self._calling.pop()
            self.sections[-1].ends.append(self._graph.num_operations())


def _first_tensors(keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the first keyword argument with tensors that is no mask."""
    arguments = [
        value
        for name, value in keywords.items()
        if name != "mask" and any(map(tf.is_tensor, tree.flatten(value)))
    ]
    return (*arguments[:1],)
