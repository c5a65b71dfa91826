"""Cuts functions out of one traced graph.

Python runs a cell's layers once. The graph of that run, with the operations
that differentiate it, is the source from which all functions of the cell are
cut: the forward pass alone, the forward pass with what the backward pass needs
of it, the backward pass, and each half of that.

A function takes some tensors of the graph and computes others. It holds a copy
of the operations in between and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals

# Repeated rather than carried from one function to the next, where their
# inputs are at hand.
_CHEAP = {
    "BroadcastGradientArgs",
    "Const",
    "ExpandDims",
    "Identity",
    "Pack",
    "Prod",
    "Range",
    "Reshape",
    "Shape",
    "StridedSlice",
}
_VARIANT = tf.variant.as_datatype_enum


class Subgraphs:
    """A traced graph to cut functions from.

    Args:
        graph: The graph of a `tf.function`. Operations may be added to it
            under `graph.as_default()` until the first call of a method.
        options: Arguments of `tf.function` for what is cut.
    """

    def __init__(self, graph: Any, options: dict[str, Any]):
        self._options = options
        self._graph = graph
        self._definition = graph.as_graph_def()
        self._nodes = {node.name: node for node in self._definition.node}
        self._operations = graph.get_operations()
        self._place = {op.name: i for i, op in enumerate(self._operations)}
        self.captures = {t.ref(): outer for outer, t in graph.captures}

    def needed(
        self,
        fetches: Iterable[tf.Tensor],
        start: int = 0,
        without: Iterable[str] = (),
    ) -> set[str]:
        """Names of the operations that tensors depend on.

        Args:
            fetches: The tensors.
            start: Leave out the graph's first operations, this many.
            without: Leave out these, and what only they depend on.
        """
        without = set(without)
        found: set[str] = set()
        waiting = [t.op for t in fetches]
        while waiting:
            op = waiting.pop()
            if op.name in found or op.name in without:
                continue
            if self._place[op.name] < start:
                continue
            found.add(op.name)
            waiting.extend(t.op for t in op.inputs)
        return found

    def entering(
        self, names: set[str], at_hand: Iterable[tf.Tensor]
    ) -> list[tf.Tensor]:
        """The tensors that operations take from others.

        Args:
            names: The operations.
            at_hand: Tensors that need not be carried. What follows cheaply
                from them need not be, either.
        """
        free = {t.ref() for t in at_hand} | set(self.captures)
        found: dict[Any, tf.Tensor] = {}
        for op in self._operations:
            if op.name not in names:
                continue
            for tensor in op.inputs:
                if tensor.op.name not in names and not _follows(tensor, free):
                    found[tensor.ref()] = tensor
        return list(found.values())

    def function(
        self,
        inputs: Iterable[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        controls: Iterable[tf.Operation] = (),
        sums: Sequence[int] = (),
    ) -> Subfunction:
        """Cuts out the function that computes some tensors from others.

        Args:
            inputs: Tensors it may take. It takes those that it needs.
            fetches: Tensors it returns.
            controls: Operations it runs for their side effects. Others that
                no fetch needs are left out.
            sums: Indices of fetches to be added to an argument of the
                function's: a sum so far.
        """
        known = {t.ref() for t in inputs} | set(self.captures)
        taken: dict[Any, tf.Tensor] = {}
        names: set[str] = set()
        controls = list(controls)
        waiting = [*fetches, *(op.outputs[0] for op in controls if op.outputs)]
        operations = [op for op in controls if not op.outputs]
        while waiting or operations:
            if waiting:
                tensor = waiting.pop()
                if tensor.ref() in known:
                    taken[tensor.ref()] = tensor
                    continue
                operations.append(tensor.op)
            op = operations.pop()
            if op.name not in names:
                names.add(op.name)
                waiting.extend(op.inputs)
                operations.extend(op.control_inputs if controls else ())
        return self._import(names, list(taken.values()), fetches, sums)

    def _import(
        self,
        names: set[str],
        inputs: list[tf.Tensor],
        fetches: Sequence[tf.Tensor],
        sums: Sequence[int],
    ) -> Subfunction:
        part = tf.compat.v1.GraphDef(
            versions=self._definition.versions,
            library=self._definition.library,
            node=[n for n in self._definition.node if n.name in names],
        )
        for node in part.node:
            node.attr.pop("_class", None)  # colocation with what is left out
            kept = [i for i in node.input if i[0] != "^" or i[1:] in names]
            if len(kept) < len(node.input):
                node.ClearField("input")
                node.input.extend(kept)
        _add_in_order(part)
        used = {_full(name) for node in part.node for name in node.input}
        by_name = {t.name: i for i, t in enumerate(inputs)}
        computed = [t.name for t in fetches if t.name not in by_name]

        def body(*arguments: tf.Tensor) -> list[tf.Tensor]:
            imported = tf.graph_util.import_graph_def(
                part,
                input_map={
                    name: arguments[i]
                    for name, i in by_name.items()
                    if name in used
                },
                return_elements=computed,
                name="",
            )
            found = dict(zip(computed, imported))
            for t in fetches:  # what `set_shape` said is in no definition
                if t.name in found:
                    found[t.name].set_shape(t.shape)
            results = [
                found[t.name]
                if t.name in found
                else tf.identity(arguments[by_name[t.name]])
                for t in fetches
            ]
            for i, total in zip(sums, arguments[len(inputs) :]):
                results[i] = tf.raw_ops.AddV2(x=total, y=results[i])
            return results

        added = [fetches[i] for i in sums]
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in [*inputs, *added]]
        traced = tf.function(body, **self._options)
        concrete = traced.get_concrete_function(*specs)
        internals.keep(concrete, self._graph)  # and so the functions it calls
        call = internals.Call(concrete, as_written=True)
        # A call of a call: TensorFlow builds a called function anew for every
        # call in the step's graph, and this way only that of one operation.
        outer = tf.function(lambda *a: call(list(a)), **self._options)
        wrapper = outer.get_concrete_function(*specs)
        internals.keep(wrapper, concrete)
        return Subfunction(wrapper, inputs, self.captures)


class Subfunction:
    """A function cut out of a graph.

    Args:
        concrete: The function.
        inputs: The tensors of the graph that it takes.
        captures: Tensors outside of the graph, by the reference of the graph's
            own.
    """

    def __init__(
        self,
        concrete: Any,
        inputs: list[tf.Tensor],
        captures: Mapping[Any, Any],
    ):
        self._call = internals.Call(concrete, as_written=True)
        self.inputs = inputs
        self._captures = captures

    def __call__(
        self, values: Mapping[Any, Any], sums: Sequence[tf.Tensor] = ()
    ) -> list[tf.Tensor]:
        """Calls the function.

        Args:
            values: By the references of the graph's tensors.
            sums: What to add fetches to.

        Returns:
            The fetches' values.
        """
        arguments = [
            values[t.ref()] if t.ref() in values else self._captures[t.ref()]
            for t in self.inputs
        ]
        return self._call([*arguments, *sums])


def _add_in_order(definition: Any) -> None:
    """Replaces sums of three and more tensors by sums of two.

    AddN begins with the first tensor whose memory it may write to. That is
    not the same one in every run and at every cut, so neither is the rounding.
    """
    for node in list(definition.node):
        if node.op != "AddN" or node.attr["T"].type == _VARIANT:
            continue
        *others, last = (i for i in node.input if i[0] != "^")
        controls = [i for i in node.input if i[0] == "^"]
        if len(others) < 2:
            continue
        total = others[0]
        for i, other in enumerate(others[1:]):
            partial = definition.node.add(
                op="AddV2",
                name=f"{node.name}/partial_{i}",
                device=node.device,
                input=[total, other],
            )
            partial.attr["T"].CopyFrom(node.attr["T"])
            total = partial.name
        node.op = "AddV2"
        node.attr.pop("N")
        node.ClearField("input")
        node.input.extend([total, last, *controls])


def _full(name: str) -> str:
    """The name of a node's input as a tensor's name."""
    return name if ":" in name else f"{name}:0"


def _follows(tensor: tf.Tensor, free: set[Any]) -> bool:
    """Whether a tensor is among the free ones or follows cheaply from them."""
    if tensor.ref() in free:
        return True
    if tensor.op.type not in _CHEAP:
        return False
    if all(_follows(t, free) for t in tensor.op.inputs):
        free.add(tensor.ref())
        return True
    return False
