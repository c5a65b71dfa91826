"""Tells cells that compute the same, by their graphs; `cells/tracer.py` asks.

A deep model repeats a few blocks. Python runs the layers of each cell; cells of
equal graphs then share all that is made of one: the backward pass, what is
kept, the functions of the tasks. A graph is a function of its arguments, and
variables are among them, so whatever else a layer's code may see, of itself or
of anything, shows in the graph. A key is all that a graph says, except names.

Of what Python knows besides, static shapes are part of the key: functions that
are cut out say them. A gradient that a layer defines itself,
`tf.custom_gradient` or `keras.ops.silu`, is code until it has run. Such cells
are unlike before the backward pass, and are compared again after it.

A kernel that draws, counts or prints has a state, which cells that share a
function would share where they are on one device: such cells are unlike others.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs.cut import is_sum
from tfgpipe.graphs.trace import stateful

# What is said for people, and no part of what is computed.
_WORDS = (
    "_user_specified_name",
    "backward_function_name",
    "forward_function_name",
)

_OWN_GRADIENT = "_gradient_op_type"


def graph_key(graph: Any, ends: Any, has_gradients: bool) -> str:
    """What a graph computes, as a text that equal graphs share.

    What it captures counts by identity, and must be kept alive as long as the
    text is. `ends` is a nest of its tensors and operations that are taken or
    returned, and of what else is known of it. `has_gradients` if it has its
    backward pass, so that no gradients that layers define are still to be
    called.
    """
    definition = graph.as_graph_def(add_shapes=True)
    ignored = [*_WORDS, *([_OWN_GRADIENT] if has_gradients else [])]
    bodies = [
        definition.node,
        *(f.node_def for f in definition.library.function),
    ]
    has_state = stateful(node.op for body in bodies for node in body)
    functions = _Functions(definition.library, ignored)
    # Nodes are written by number: names differ from cell to cell.
    number = {node.name: f"{i}" for i, node in enumerate(definition.node)}
    found = hashlib.sha256()
    for node in definition.node:
        _without_names(node, number, functions)
        found.update(node.SerializeToString(deterministic=True))

    def written(end: Any) -> Any:
        if isinstance(end, tf.Operation):
            return number[end.name]
        if not tf.is_tensor(end):  # the text of a large array leaves some out
            return end.tobytes() if isinstance(end, np.ndarray) else end
        if internals.graph_of(end) is graph:
            return number[end.op.name], end.value_index
        return "outside", id(end)

    facts = [
        id(graph) if has_state else None,  # then like no other
        tf.nest.map_structure(lambda _: 0, ends),
        list(map(written, tf.nest.flatten(ends, expand_composites=True))),
        [(written(inner), id(outer)) for outer, inner in graph.captures],
        [written(op) for op in graph.get_operations() if is_sum(op)],
    ]
    found.update(repr(facts).encode())
    return found.hexdigest()


class _Functions:
    """Texts of the functions that a graph calls.

    The definitions in `library` are changed; attributes of names in `ignored`
    do not count.
    """

    def __init__(self, library: Any, ignored: list[str]):
        self._left = {f.signature.name: f for f in library.function}
        self.ignored = ignored
        self._known: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """The text of the function of this name."""
        if name in self._left:
            self._known[name] = self._written(self._left.pop(name))
        return self._known.get(name, name)

    def _written(self, function: Any) -> str:
        signature = function.signature
        taken, returned = signature.input_arg, signature.output_arg
        number = {a.name: f"a{i}" for i, a in enumerate(taken)}
        number.update((n.name, f"{i}") for i, n in enumerate(function.node_def))
        for node in function.node_def:
            _without_names(node, number, self)
        for said in (function, *function.arg_attr.values()):
            for word in _WORDS:
                said.attr.pop(word, None)
        results = dict(function.ret), dict(function.control_ret)
        function.ret.clear()
        function.control_ret.clear()
        for i, argument in enumerate(returned):
            function.ret[f"{i}"] = _numbered(results[0][argument.name], number)
        for i, name in enumerate(signature.control_output):
            function.control_ret[f"{i}"] = number[results[1][name]]
        for argument in (*taken, *returned):
            argument.name = ""
        del signature.control_output[:]
        signature.name = ""
        text = function.SerializeToString(deterministic=True)
        return hashlib.sha256(text).hexdigest()


def _without_names(
    node: Any, number: dict[str, str], functions: _Functions
) -> None:
    """Has a node's definition say numbers of nodes in the place of names."""
    node.name = ""
    node.ClearField("experimental_debug_info")
    node.input[:] = [_numbered(name, number) for name in node.input]
    for ignored in functions.ignored:
        node.attr.pop(ignored, None)
    if "_class" in node.attr:
        near = node.attr["_class"].list.s
        near[:] = [_place(one.decode(), number).encode() for one in near]
    for value in node.attr.values():
        for called in (value.func, *value.list.func):
            if called.name:
                called.name = functions(called.name)


def _numbered(text: str, number: dict[str, str]) -> str:
    """An input of a node: `name`, `name:output:0` or `^name`."""
    control = "^" * text.startswith("^")
    name, *output = text.lstrip("^").split(":")
    return control + ":".join([number[name], *output])


def _place(text: str, number: dict[str, str]) -> str:
    """What a node is to be near: `loc:@name`."""
    start, _, name = text.partition("@")
    return f"{start}@{number.get(name, name)}"
