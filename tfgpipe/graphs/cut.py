r"""Cuts functions out of one traced graph.

Python runs the model once. All functions of all cells are cut out of the graph
of that run, with the operations that differentiate it: the forward pass alone,
the forward pass with what the backward pass needs of it, the backward pass, and
each half of that.

A function takes some tensors of the graph, or bundles of them, and computes
others. It holds a copy of the operations in between and nothing else:

    the graph      x --> matmul --> h --> gelu --> y      forward pass
                    \               \
                     \               +--> gelu' --> dh    backward pass
                      +---------------------> x^T dh --> dw

    forward        takes x, w           returns y, and h if it is to be kept
    recompute      takes x, w           returns h
    backward       takes x, w, h, dy    returns dx, dw + the sum so far

What one run of Python has made is cut, and not traced a second time: so the
bits of a recomputed h are the first one's, and a layer that draws random
numbers, or prints, is called once a trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import tensor_bytes
from tfgpipe.graphs.flops import LIKELY_ROWS
from tfgpipe.graphs.functions import (
    Bundle,
    OutsideValue,
    Subfunction,
    as_bundle,
    traced,
)

# Repeated rather than carried from one function to the next, where their
# inputs are at hand.
CHEAP = set(
    "BroadcastGradientArgs Const ExpandDims Identity Pack Prod Range Reshape "
    "Shape StridedSlice".split()
)

# What these make of a tensor is carried instead of it, where nothing else of it
# is needed: of gradients, where numbers of rows are not known.
SIZES = {"Rank", "Shape", "ShapeN", "Size"}

# By parts of the names of types; and bytes that they take and make.
_PRODUCTS = ("MatMul", "Einsum", "Conv")
_LARGE = 2**20
# Of a backward pass, so many of them may run side by side.
_AT_ONCE = 3

_VARIANT = tf.variant.as_datatype_enum


class WholeGraph:
    """A graph that is complete, as all that is cut out of it needs it.

    `takes_reads` is whether functions get what the graph reads of variables
    outside of it, and read nothing themselves.

    Attributes:
        graph: The graph.
        operations: Its operations, in order.
        places: Their places, by their names.
        nodes: Their definitions, by their names.
        functions: The definitions of the functions that it calls, likewise.
        captures: Tensors outside of it, by the references of its own; and what
            it reads of variables outside of it that it does not assign.
        texts: What `same_graph.py` has written of operations.
        function_texts: And of functions.
    """

    def __init__(self, graph: tf.Graph, takes_reads: bool = True):
        self.graph = graph
        self.operations = graph.get_operations()
        self.places = {op.name: i for i, op in enumerate(self.operations)}
        definition = graph.as_graph_def()
        self.nodes = {node.name: node for node in definition.node}
        self._versions = definition.versions
        library = definition.library
        self.functions = {f.signature.name: f for f in library.function}
        self._gradients = {g.function_name: g for g in library.gradient}
        self.texts: dict[str, bytes] = {}
        self.function_texts: dict[str, str] = {}
        self.captures: dict[Any, Any] = {}
        for outer, inner in graph.captures:
            self.captures[inner.ref()] = outer
            if not takes_reads or inner.dtype != tf.resource:
                continue
            if internals.is_only_read(inner):
                users = inner.consumers()
                reads = [o for o in users if o.type == "ReadVariableOp"]
                read = [op.outputs[0] for op in reads]
                values = {t.dtype: OutsideValue(outer, t.dtype) for t in read}
                self.captures.update((t.ref(), values[t.dtype]) for t in read)

    def operation(self, name: str) -> tf.Operation:
        """Returns the operation of this name."""
        return self.operations[self.places[name]]

    def in_order(self, names: Iterable[str]) -> list[tf.Operation]:
        """Returns the operations of these names, in the graph's order."""
        places = sorted(self.places[name] for name in names)
        return [self.operations[i] for i in places]

    def is_large_product(self, name: str) -> bool:
        """Returns whether an operation multiplies large matrices."""
        op = self.operation(name)
        if not any(word in op.type for word in _PRODUCTS):
            return False
        known = [t.shape.is_fully_defined() for t in (*op.inputs, *op.outputs)]
        size = sum(map(tensor_bytes, (*op.inputs, *op.outputs)))
        return size * (1 if all(known) else LIKELY_ROWS) >= _LARGE

    def definition_of(
        self, names: Collection[str], merged: Mapping[str, str] | None = None
    ) -> tf.compat.v1.GraphDef:
        """A definition of some operations, with the functions they call.

        They take the results of `merged` of operations with these names.
        """
        part = tf.compat.v1.GraphDef(
            versions=self._versions,
            node=[self.nodes[op.name] for op in self.in_order(names)],
        )
        for node in part.node:
            node.attr.pop("_class", None)  # colocation with what is left out
            inputs = [_output_of(name, merged or {}) for name in node.input]
            node.input[:] = [i for i in inputs if i[0] != "^" or i[1:] in names]
        gradients = {n: [g.gradient_func] for n, g in self._gradients.items()}
        called = called_functions(part.node, self.functions, gradients)
        part.library.function.extend(called.values())
        part.library.gradient.extend(
            self._gradients[name] for name in called if name in gradients
        )
        return part


def functions_of(node: tf.compat.v1.NodeDef) -> list[str]:
    """The names of the functions that an operation may call."""
    called = []
    for attribute in node.attr.values():
        called += [attribute.func, *attribute.list.func]
    return [function.name for function in called if function.name]


def called_functions(
    nodes: Iterable[tf.compat.v1.NodeDef],
    functions: Mapping[str, Any],
    gradients: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """The functions that nodes call, and these in turn, by their names.

    Also those that `gradients` has for them, by names.
    """
    called: dict[str, Any] = {}
    waiting = [name for node in nodes for name in functions_of(node)]
    while waiting:
        name = waiting.pop()
        if name in functions and name not in called:
            called[name] = functions[name]
            for node in functions[name].node_def:
                waiting += functions_of(node)
            waiting += (gradients or {}).get(name, ())
    return called


class GraphCutter:
    """A part of a graph, to cut functions from.

    `inside` are the names of its operations, whose side effects may be asked
    for. `options` are arguments of `tf.function` for what is cut, `device_type`
    such as "GPU". `gradients` are the names of those that are a backward pass.

    Attributes:
        captures: Tensors outside of the graph, by the references of its own.
    """

    def __init__(
        self,
        whole: WholeGraph,
        inside: Collection[str],
        options: dict[str, Any],
        device_type: str,
        gradients: Collection[str] = (),
    ):
        self._options = options
        # For XLA, sizes are no values that a function could take.
        self._sizes = set() if options.get("jit_compile") else SIZES
        self._operations = whole.in_order(inside)
        self._gradients = {
            op.name
            for op in self._operations
            if op.name in gradients and op.type not in self._sizes
        }
        # Among devices of that type, TensorFlow takes the one of the call.
        self._where = f"/device:{device_type}:*"
        self._whole = whole
        self._inside = inside
        self.captures = whole.captures

    def needed(
        self, fetches: Iterable[tf.Tensor], within: Collection[str]
    ) -> set[str]:
        """Returns the names of the operations, of some, that tensors follow."""
        return {
            *internals.ancestors(fetches, lambda t: t.op.name not in within)
        }

    def entering(
        self,
        names: set[str],
        fetches: Iterable[tf.Tensor],
        at_hand: Iterable[tf.Tensor],
    ) -> list[tf.Tensor]:
        """The tensors that operations, and fetches, take from others.

        Without what is `at_hand`, and what follows cheaply from it. Of a
        tensor whose size alone is needed, the size.
        """
        free = {t.ref() for t in at_hand} | set(self.captures)
        entering: dict[Any, tf.Tensor] = {}
        operations = [op for op in self._operations if op.name in names]
        others = [op for op in operations if op.type not in self._sizes]
        for tensor in [*(t for op in others for t in op.inputs), *fetches]:
            if tensor.op.name not in names and not follows(tensor, free):
                entering[tensor.ref()] = tensor
        for op in operations:
            if (
                op.type in self._sizes
                and not all(follows(t, free) for t in op.outputs)
                and any(
                    t.op.name not in names
                    and t.ref() not in entering
                    and not follows(t, free)
                    for t in op.inputs
                )
            ):
                entering.update((t.ref(), t) for t in op.outputs)
        return list(entering.values())

    def function(
        self,
        inputs: Iterable[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        controls: Iterable[tf.Operation] = (),
        sums: Bundle | None = None,
    ) -> Subfunction:
        """Cuts out the function that computes some tensors from others.

        It takes the inputs that it needs. Of operations that no fetch needs it
        runs `controls` alone, for their side effects.
        `sums` is a fetch that is added to an argument of the function's, the
        sums so far.
        """
        names, taken = self._reached(inputs, fetches, controls)
        part = self._whole.definition_of(names)
        is_compiled = self._options.get("jit_compile")  # XLA merges them itself
        merged = {} if is_compiled else _merge_equal(part, self._gradients)
        if not names.isdisjoint(self._gradients):
            _run_in_order(part, self._gradients, self._whole)
        add_in_order(part)
        return self.imported(part, taken, fetches, sums, merged)

    def _reached(
        self,
        inputs: Iterable[tf.Tensor | Bundle],
        fetches: Iterable[tf.Tensor | Bundle],
        controls: Iterable[tf.Operation] = (),
    ) -> tuple[set[str], list[tf.Tensor | Bundle]]:
        """Names of a function's operations, and the inputs that it takes."""
        # What is not computed here: captured from outside, or given.
        known: dict[Any, tf.Tensor | Bundle] = {
            ref: ref.deref() for ref in self.captures
        }
        for one in inputs:
            known.update({t.ref(): one for t in as_bundle(one).aliases})
        taken: dict[int, tf.Tensor | Bundle] = {}

        def is_known(tensor: tf.Tensor) -> bool:
            one = known.get(tensor.ref())
            if one is not None:
                taken[id(one)] = one
            return one is not None

        controls = [*controls]
        followed = {*self._inside} if controls else set()
        wanted = [t for fetch in fetches for t in as_bundle(fetch).tensors]
        operations = internals.ancestors(
            [*wanted, *(op.outputs[0] for op in controls if op.outputs)],
            is_known,
            lambda op: op.name in followed,
            [op for op in controls if not op.outputs],
        )
        return {*operations}, [*taken.values()]

    def imported(
        self,
        part: tf.compat.v1.GraphDef,
        inputs: list[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        sums: Bundle | None = None,
        merged: Mapping[str, str] | None = None,
    ) -> Subfunction:
        """Imports a definition into a function that takes the inputs.

        `merged` are operations for which others of the definition run.
        """
        used = {_full(name) for node in part.node for name in node.input}
        given = {t.name for one in inputs for t in as_bundle(one).aliases}
        wanted = [t for fetch in fetches for t in as_bundle(fetch).tensors]
        computed = [t.name for t in wanted if t.name not in given]
        results_of = [_output_of(name, merged or {}) for name in computed]

        def body(*arguments: tf.Tensor) -> list[tf.Tensor]:
            # Packed values, bundle after bundle, then the sums so far.
            flat = iter(arguments)
            known: dict[str, tf.Tensor] = {}
            for one in map(as_bundle, inputs):
                for slot, value in zip(one.slots, self._unpacked(one, flat)):
                    known.update({t.name: value for t in slot})
            known.update(_by_themselves(part, known))
            imported = internals.import_definition(
                part, {n: v for n, v in known.items() if n in used}, results_of
            )
            known.update(zip(computed, imported))
            for t in wanted:  # what `set_shape` said is in no definition
                known[t.name].set_shape(t.shape)
            results = []
            for fetch in fetches:
                bundle = as_bundle(fetch)
                values = [
                    tf.identity(known[t.name])
                    if t.name in given
                    else known[t.name]
                    for t in bundle.tensors
                ]
                if fetch is sums:
                    values = bundle.add(self._unpacked(bundle, flat), values)
                with tf.device(self._where):
                    results += bundle.pack(values)
            return results

        taken = [*inputs, sums] if sums else inputs
        specs = [spec for one in taken for spec in as_bundle(one).specs]
        concrete = traced(body, specs, self._options, part)
        # And so the functions that it calls.
        internals.keep(concrete, self._whole.graph)
        call = internals.FunctionCall(concrete)
        # A call of a call: TensorFlow builds a called function anew for every
        # call in the step's graph, and this way only one operation's.
        wrapper = traced(lambda *a: call(list(a)), specs, self._options, part)
        internals.keep(wrapper, concrete)
        return Subfunction(wrapper, inputs, fetches, self.captures)

    def _unpacked(
        self, bundle: Bundle, arguments: Iterator[tf.Tensor]
    ) -> list[tf.Tensor]:
        """The values of a bundle in a function."""
        packed = list(itertools.islice(arguments, len(bundle.specs)))
        with tf.device(self._where):
            return bundle.unpack(packed)


def _merge_equal(
    part: tf.compat.v1.GraphDef, gradients: Collection[str]
) -> dict[str, str]:
    """Leaves one of operations that compute the same of the same tensors.

    Each block of a language model makes the causal mask anew, for one. Outside
    of cells TensorFlow's graph optimiser merges such operations. Gradients stay
    apart: zeros of theirs, shared, would be held from the first to the last.

    Args:
        part: The definition of a graph, in the order in which it runs.
        gradients: Names of the operations that stay apart.

    Returns:
        The names of what has left the definition, and of what runs instead.
    """
    by_text: dict[Any, str] = {}
    merged: dict[str, str] = {}
    places = []
    for i, node in enumerate(part.node):
        node.input[:] = [_output_of(name, merged) for name in node.input]
        if node.name in gradients or not _can_be_merged(node):
            continue
        attributes = sorted(
            (key, value.SerializeToString(deterministic=True))
            for key, value in node.attr.items()
        )
        text = (node.op, node.device, *node.input, *attributes)
        kept = by_text.setdefault(text, node.name)
        if kept != node.name:
            merged[node.name] = kept
            places.append(i)
    for i in reversed(places):
        del part.node[i]
    for node in part.node:  # a loop takes lists that come behind it
        node.input[:] = [_output_of(name, merged) for name in node.input]
    return merged


def _can_be_merged(node: tf.compat.v1.NodeDef) -> bool:
    """Returns whether an operation is a function of its inputs alone.

    Not lists, which loops write to: shared ones would be copied.
    """
    return not (
        internals.is_stateful(node.op)
        or "TensorList" in node.op
        or node.op.startswith("Placeholder")
        or any(name[0] == "^" for name in node.input)
        or functions_of(node)
    )


def _output_of(name: str, merged: Mapping[str, str]) -> str:
    """Returns an input `name`, `name:1` or `^name` after operations merged."""
    control = "^" * name.startswith("^")
    operation, *output = name.lstrip("^").split(":")
    return control + ":".join([merged.get(operation, operation), *output])


def _run_in_order(
    part: tf.compat.v1.GraphDef, gradients: Collection[str], whole: WholeGraph
) -> None:
    """Has a backward pass go from layer to layer, so that little is held.

    TensorFlow goes on with what became ready last: with the gradients of the
    inputs of all layers, and then of weights, which hold two tensors of
    each layer until then. It also repeats at once what it can. Here

        dy --> dx3 --> dw3 --> h2 again --> dx2 --> dw2 --> ...

    a product of large matrices waits for the third before it, and for what
    follows from that; and what is repeated, for the second product before the
    first gradient that takes it. Products of small ones wait for nothing.
    """
    nodes = list(part.node)
    makers = {
        n.name: [name.lstrip("^").split(":")[0] for name in n.input]
        for n in nodes
    }
    # A gradient has its place; what is repeated, that before the first of those
    # that take it.
    turn: dict[str, int] = {}
    for i, node in reversed([*enumerate(nodes)]):
        is_gradient = node.name in gradients
        last = 2 * i + 1 if is_gradient else turn.get(node.name)
        if last is not None:
            turn[node.name] = last
            for name in makers[node.name]:
                if name in makers and name not in gradients:
                    turn[name] = min(last - is_gradient, turn.get(name, last))
    products: list[str] = []
    unused: dict[str, int] = {}  # and after how many products it came
    for node in sorted(nodes, key=lambda n: turn.get(n.name, -1)):
        if node.name not in turn:
            continue
        for name in makers[node.name]:
            unused.pop(name, None)
        if whole.is_large_product(node.name):
            early = len(products) + 1 - _AT_ONCE
            before = [name for name, i in unused.items() if i <= early]
            node.input.extend(f"^{name}" for name in before)
            for name in before:
                del unused[name]
            products.append(node.name)
        elif node.name not in gradients and len(products) >= _AT_ONCE:
            node.input.append(f"^{products[1 - _AT_ONCE]}")
        unused[node.name] = len(products)


def _by_themselves(
    part: tf.compat.v1.GraphDef, known: dict[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """Returns what gradients of biases take, each from an operation of its own.

    On CPUs, TensorFlow fuses the gradient of a convolution's filters with that
    of its bias, which it knows by the operation that both take `dy` from:

        unpack --0--> Conv2DBackpropFilter        dy of one convolution
               --1--> BiasAddGrad                 dy of another one

    It does not ask which output (`mkl_layout_pass.cc`, for float32).
    """
    read = [n.input[0] for n in part.node if n.op == "BiasAddGrad"]
    names = dict.fromkeys(map(_full, read))
    return {n: tf.identity(known[n]) for n in names if n in known}


def _full(name: str) -> str:
    """The name of a node's input as a tensor's name."""
    return name if ":" in name else f"{name}:0"


def follows(tensor: tf.Tensor, free: set[Any]) -> bool:
    """Returns whether a tensor is free or follows cheaply from free ones."""
    if tensor.ref() in free:
        return True
    if tensor.op.type not in CHEAP:
        return False
    if all(follows(t, free) for t in tensor.op.inputs):
        free.add(tensor.ref())
        return True
    return False


def add_in_order(definition: tf.compat.v1.GraphDef) -> None:
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
        # AddN(a, b, c, d) -> ((a + b) + c) + d; the node itself adds the last.
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
