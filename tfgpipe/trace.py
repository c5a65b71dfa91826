"""Traces the functions of cells; cells with equal functions share one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf


class Tracer:
    """Makes a function that TensorFlow calls as one operation.

    Args:
        eagerly: Leave the functions as they are, for debugging.
        jit_compile: Compile each with XLA. XLA draws other random numbers from
            a seed than TensorFlow does, so it is all functions or none.
    """

    def __init__(self, eagerly: bool, jit_compile: bool):
        self._eagerly = eagerly
        self._known: dict[Any, Callable] = {}
        self._options: dict[str, Any] = {"autograph": False}
        if jit_compile:
            self._options["jit_compile"] = True
        else:  # inlined, the calls would lose their place in the schedule
            self._options["experimental_attributes"] = {"_noinline": True}

    def __call__(self, function: Callable, specs: tuple[Any, ...]) -> Callable:
        """Traces `function` for arguments of these `tf.TensorSpec`s.

        Returns:
            The traced function, or an earlier one that computes the same.
        """
        if self._eagerly:
            return function
        traced = tf.function(function, **self._options)
        concrete = traced.get_concrete_function(*specs)
        if concrete.captured_inputs:
            return concrete
        return self._known.setdefault(_fingerprint(concrete), concrete)


def _fingerprint(concrete: Any) -> Any:
    """What a traced function computes, without the names in it."""
    graph = concrete.graph
    definition = graph.as_graph_def()
    library = {f.signature.name: f for f in definition.library.function}
    numbers = _numbers(definition.node)
    outputs = tf.nest.map_structure(
        lambda t: (
            None
            if t is None
            else _renamed(t.name, numbers) + str((t.shape, t.dtype))
        ),
        concrete.structured_outputs,
        expand_composites=True,
    )
    inputs = [_renamed(t.name, numbers) for t in graph.inputs]
    nodes = _nodes(definition.node, numbers, library)
    return repr((inputs, str(outputs), nodes))


def _numbers(nodes: Iterable[Any]) -> dict[str, str]:
    return {node.name: str(i) for i, node in enumerate(nodes)}


def _renamed(name: str, numbers: dict[str, str]) -> str:
    """`^name:output:0` with the node's number for its name."""
    mark = "^" if name.startswith("^") else ""
    node, separator, rest = name.removeprefix("^").partition(":")
    return mark + numbers.get(node, node) + separator + rest


def _nodes(
    nodes: Iterable[Any], numbers: dict[str, str], library: dict[str, Any]
) -> list[Any]:
    return [
        (
            node.op,
            [_renamed(name, numbers) for name in node.input],
            sorted(
                (key, _attribute(value, library))
                for key, value in node.attr.items()
                if key != "_user_specified_name"
            ),
        )
        for node in nodes
    ]


def _attribute(value: Any, library: dict[str, Any]) -> Any:
    """An operation's attribute; of a function, what it computes."""
    if value.WhichOneof("value") == "func" and value.func.name in library:
        function = library[value.func.name]
        arguments = {
            argument.name: f"argument {i}"
            for i, argument in enumerate(function.signature.input_arg)
        }
        numbers = {**_numbers(function.node_def), **arguments}
        results = [
            _renamed(function.ret[argument.name], numbers)
            for argument in function.signature.output_arg
        ]
        return repr((results, _nodes(function.node_def, numbers, library)))
    return value.SerializeToString(deterministic=True)
