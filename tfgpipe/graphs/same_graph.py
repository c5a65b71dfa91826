"""Tells cells that compute the same, by their graphs; `cells/tracer.py` asks.

A deep model repeats a few blocks. Cells whose parts of the model's graph are
equal, backward pass included, share the functions of their tasks, which are cut
out of one of them. A graph is a function of its arguments, and
variables are among them, so whatever else a layer's code may see, of itself or
of anything, shows in the graph. A key is all that a graph says, except names.

Of what Python knows besides, static shapes are part of the key: functions that
are cut out say them.

A kernel that draws, counts or prints has a state, which cells that share a
function would share where they are on one device: such cells are unlike others.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs.cut import WholeGraph, is_sum
from tfgpipe.graphs.parts import Part
from tfgpipe.graphs.traced_model import kinds_called, stateful

# What is said for people, and no part of what is computed.
_WORDS = (
    "_user_specified_name",
    "backward_function_name",
    "forward_function_name",
    # Of a gradient that a layer defines: it has been called.
    "_gradient_op_type",
)


def part_key(part: Part, facts: Any, in_process: bool = True) -> str:
    """Tells what a part of a graph computes, as a text that equal parts share.

    What it captures counts by identity, and must be kept alive as long as the
    text is; and a part with a state of its own is like no other. Unless the
    text is for other processes, too (`in_process`). `facts` are what else is
    known of it.
    """
    return _Writer(part, in_process).key(facts)


class _Writer:
    """Writes what a part computes, without names."""

    def __init__(self, part: Part, in_process: bool):
        self._part = part
        self._in_process = in_process
        self._whole = part.whole
        self._functions = _functions_of(part.whole)
        self._inputs: dict[Hashable, str] = {}
        weights = [use.tensor for use in part.uses]
        for i, tensor in enumerate(
            [*part.forward_inputs, *part.gradient_inputs, *weights]
        ):
            self._inputs.setdefault(tensor.ref(), f"in{i}")

    def key(self, facts: Any) -> str:
        """The text, see `part_key`."""
        part, places = self._part, self._whole.places
        ends = part.forward_outputs, part.gradient_outputs, part.dw
        made = tf.nest.flatten(ends, expand_composites=True)
        names = self._between([t for t in made if t is not None])
        order = sorted(names, key=places.__getitem__)
        operations = [self._whole.operations[places[n]] for n in order]
        # Operations are written by number: names differ from cell to cell.
        self._number = {name: f"{i}" for i, name in enumerate(order)}
        found = hashlib.sha256()
        for op in operations:
            found.update(self._written_op(op))
        # Then like no other.
        kinds = {op.type for op in operations}
        nodes = [op.node_def for op in operations]
        kinds |= kinds_called(nodes, self._whole.functions)
        is_alone = self._in_process and stateful(kinds)
        has_backward = [name in part.backward for name in order]
        weights = [use.tensor for use in part.uses]
        taken = [*part.forward_inputs, *part.gradient_inputs, *weights]
        flat = tf.nest.flatten(facts)
        rest = [
            (id(part.whole), part.index) if is_alone else None,
            tf.nest.map_structure(lambda _: 0, ends),
            [None if t is None else self._written(t) for t in made],
            [(str(t.shape), t.dtype.name) for t in taken],
            (
                len(part.forward_inputs),
                len(part.gradient_inputs),
                len(part.forward_outputs),
            ),
            [i for i, is_back in enumerate(has_backward) if is_back],
            [self._number[op.name] for op in operations if is_sum(op)],
            [self._number[op.name] for op in part.effects],
            [f.tobytes() if isinstance(f, np.ndarray) else f for f in flat],
        ]
        found.update(repr(rest).encode())
        return found.hexdigest()

    def _between(self, ends: Sequence[tf.Tensor]) -> set[str]:
        """Returns the names of the operations between inputs and ends."""
        known = {*self._inputs, *self._whole.captures}
        effects = self._part.effects
        return {
            *internals.ancestors(
                ends, lambda t: t.ref() in known, effects=effects
            )
        }

    def _written_op(self, op: tf.Operation) -> bytes:
        text = operation_text(self._whole.nodes[op.name], self._functions)
        controls = [self._number.get(o.name) for o in op.control_inputs]
        tensors = [self._written(t) for t in op.inputs]
        shapes = [str(t.shape) for t in op.outputs]
        wiring = repr((tensors, [c for c in controls if c], shapes))
        return text + wiring.encode()

    def _written(self, tensor: tf.Tensor) -> Any:
        ref = tensor.ref()
        if ref in self._inputs:
            return self._inputs[ref]
        if ref in self._whole.captures:
            outside = id(self._whole.captures[ref])
            return "outside", outside if self._in_process else str(tensor.shape)
        return self._number[tensor.op.name], tensor.value_index


_known_functions: weakref.WeakKeyDictionary[WholeGraph, FunctionTexts] = (
    weakref.WeakKeyDictionary()
)


def _functions_of(whole: WholeGraph) -> FunctionTexts:
    """The functions of a graph, once for all its parts."""
    if whole not in _known_functions:
        _known_functions[whole] = FunctionTexts(whole.functions)
    return _known_functions[whole]


class FunctionTexts:
    """Texts of the functions that a graph calls.

    `definitions` are a graph's, by their names.
    """

    def __init__(self, definitions: Mapping[str, Any]):
        self._definitions = definitions
        self._known: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """The text of the function of this name."""
        if name not in self._known:
            self._known[name] = name  # also inside of itself
            if name in self._definitions:
                own = type(self._definitions[name])()
                own.CopyFrom(self._definitions[name])
                self._known[name] = self._written(own)
        return self._known[name]

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


def operation_text(
    node: tf.compat.v1.NodeDef, functions: FunctionTexts
) -> bytes:
    """Returns what an operation computes, without names and inputs."""
    copy = type(node)()
    copy.CopyFrom(node)
    del copy.input[:]
    copy.attr.pop("_class", None)  # colocation
    _without_names(copy, {}, functions)
    return bytes(copy.SerializeToString(deterministic=True))


def _without_names(
    node: tf.compat.v1.NodeDef, number: dict[str, str], functions: FunctionTexts
) -> None:
    """Has a node's definition say numbers of nodes in the place of names."""
    node.name = ""
    node.ClearField("experimental_debug_info")
    node.input[:] = [_numbered(name, number) for name in node.input]
    for ignored in _WORDS:
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
    """Returns what a node is to be near: `loc:@name`."""
    start, _, name = text.partition("@")
    return f"{start}@{number.get(name, name)}"
