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

Where a cell's part of it adds up over replicas, see
`state/batch_normalization.py`, a function ends, and the next one takes the
total:

    sums of stage 1 -> totals -> sums of stage 2 -> totals -> ... -> results

Sums that do not need each other's totals are of one stage. What a stage makes
and a later one takes is carried, so that nothing is computed twice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import (
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import tensor_bytes
from tfgpipe.graphs.bundle import Bundle, as_bundle
from tfgpipe.graphs.flops import LIKELY_ROWS
from tfgpipe.graphs.gradient_sums import add_in_order
from tfgpipe.graphs.turns import stays_where_called, traced

# Repeated rather than carried from one function to the next, where their
# inputs are at hand.
CHEAP = {
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

# What these make of a tensor is carried in its place, where nothing else of it
# is needed: of gradients, where numbers of rows are not known.
SIZES = {"Rank", "Shape", "ShapeN", "Size"}


# By parts of the names of types; and bytes that they take and make.
_PRODUCTS = ("MatMul", "Einsum", "Conv")
_LARGE = 2**20
# Of a backward pass, so many of them may run side by side.
_AT_ONCE = 3


class WholeGraph:
    """A graph that is complete, as all that is cut out of it needs it.

    `takes_reads` is whether functions get what the graph reads of variables
    outside of it, and read nothing themselves.

    Attributes:
        graph: The graph.
        operations: Its operations, in order.
        places: Their places, by their names.
        nodes: Their definitions, by their names.
        versions: Of the definition.
        captures: Tensors outside of it, by the references of its own; and what
            it reads of variables outside of it that it does not assign.
    """

    def __init__(self, graph: tf.Graph, takes_reads: bool = True):
        self.graph = graph
        self.operations = graph.get_operations()
        self.places = {op.name: i for i, op in enumerate(self.operations)}
        definition = graph.as_graph_def()
        self.nodes = {node.name: node for node in definition.node}
        self.versions = definition.versions
        self.functions = {
            function.signature.name: function
            for function in definition.library.function
        }
        self._gradients = {
            gradient.function_name: gradient
            for gradient in definition.library.gradient
        }
        self.captures: dict[Any, Any] = {}
        for outer, own in graph.captures:
            self.captures[own.ref()] = outer
            if not takes_reads or own.dtype != tf.resource:
                continue
            if internals.is_only_read(own):
                self.captures.update(_read_outside(outer, own))

    def is_large_product(self, name: str) -> bool:
        """Returns whether an operation multiplies large matrices."""
        op = self.operations[self.places[name]]
        if not any(word in op.type for word in _PRODUCTS):
            return False
        known = [t.shape.is_fully_defined() for t in (*op.inputs, *op.outputs)]
        size = sum(map(tensor_bytes, (*op.inputs, *op.outputs)))
        return size * (1 if all(known) else LIKELY_ROWS) >= _LARGE

    def definition_of(self, names: Collection[str]) -> tf.compat.v1.GraphDef:
        """A definition of some operations, with the functions they call."""
        places = self.places
        part = tf.compat.v1.GraphDef(
            versions=self.versions,
            node=[self.nodes[n] for n in sorted(names, key=places.__getitem__)],
        )
        for node in part.node:
            node.attr.pop("_class", None)  # colocation with what is left out
            node.input[:] = [
                i for i in node.input if i[0] != "^" or i[1:] in names
            ]
        called: set[str] = set()
        waiting = [name for node in part.node for name in functions_of(node)]
        while waiting:
            name = waiting.pop()
            if name in called or name not in self.functions:
                continue
            called.add(name)
            function = self.functions[name]
            part.library.function.append(function)
            for node in function.node_def:
                waiting += functions_of(node)
            if name in self._gradients:
                part.library.gradient.append(self._gradients[name])
                waiting.append(self._gradients[name].gradient_func)
        return part


class OutsideValue:
    """The value of a variable that is not of the model, a `tf.Variable`.

    It is read once in a step, before what the step assigns, and all cells take
    it: whenever they run, and run again, it is the same.
    """

    def __init__(self, handle: tf.Tensor, dtype: tf.DType):
        self._handle = handle
        self._dtype = dtype
        self._read: tuple[Any, Any] = (None, None)

    def read(self) -> tf.Tensor:
        """The value, in the graph of a step; where that has it already, that.

        It is read where the variable is.
        """
        graph = internals.current_graph()
        known, value = self._read
        if graph is None or known is not graph:
            with tf.control_dependencies(None), tf.device(None):
                value = tf.raw_ops.ReadVariableOp(
                    resource=self._handle, dtype=self._dtype
                )
            self._read = graph, value
        return value


def _read_outside(outer: Any, handle: tf.Tensor) -> dict[Any, OutsideValue]:
    """What a graph reads of a variable outside, by the references of that."""
    reads = [op for op in handle.consumers() if op.type == "ReadVariableOp"]
    found = [op.outputs[0] for op in reads]
    values = {t.dtype: OutsideValue(outer, t.dtype) for t in found}
    return {t.ref(): values[t.dtype] for t in found}


def functions_of(node: tf.compat.v1.NodeDef) -> list[str]:
    """The names of the functions that an operation may call."""
    found = []
    for attribute in node.attr.values():
        found += [attribute.func, *attribute.list.func]
    return [function.name for function in found if function.name]


class GraphCutter:
    """A part of a graph, to cut functions from.

    `own` are the names of its operations, whose side effects may be asked for.
    `options` are arguments of `tf.function` for what is cut, `device_type` such
    as "GPU". `gradients` are the names of those that are a backward pass.

    Attributes:
        operations: All operations of the graph, in order.
        captures: Tensors outside of it, by the references of its own.
    """

    def __init__(
        self,
        whole: WholeGraph,
        own: Collection[str],
        options: dict[str, Any],
        device_type: str,
        gradients: Collection[str] = (),
    ):
        self._options = options
        # For XLA, sizes are no values that a function could take.
        self._sizes = set() if options.get("jit_compile") else SIZES
        self._gradients = {
            name
            for name in gradients
            if whole.operations[whole.places[name]].type not in self._sizes
        }
        # Among devices of that type, TensorFlow takes the one of the call.
        self._where = f"/device:{device_type}:*"
        self._whole = whole
        self._graph = whole.graph
        self._own = own
        self.operations = [
            whole.operations[i] for i in sorted(whole.places[n] for n in own)
        ]
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
        as_sizes: bool = True,
    ) -> list[tf.Tensor]:
        """The tensors that operations, and fetches, take from others.

        Without what is `at_hand`, and what follows cheaply from it. Of a
        tensor whose size alone is needed, the size, unless `as_sizes` is False.
        """
        free = {t.ref() for t in at_hand} | set(self.captures)
        found: dict[Any, tf.Tensor] = {}
        own = [op for op in self.operations if op.name in names]
        kinds = self._sizes if as_sizes else ()
        sizes = [op for op in own if op.type in kinds]
        others = [op for op in own if op.type not in kinds]
        for tensor in [*(t for op in others for t in op.inputs), *fetches]:
            if tensor.op.name not in names and not follows(tensor, free):
                found[tensor.ref()] = tensor
        for op in sizes:
            if not all(follows(t, free) for t in op.outputs) and any(
                t.op.name not in names
                and t.ref() not in found
                and not follows(t, free)
                for t in op.inputs
            ):
                found.update((t.ref(), t) for t in op.outputs)
        return list(found.values())

    def function(
        self,
        inputs: Iterable[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        controls: Iterable[tf.Operation] = (),
        sums: Bundle | None = None,
        done: Collection[str] = (),
    ) -> Subfunction:
        """Cuts out the function that computes some tensors from others.

        It takes the inputs that it needs. Of operations that no fetch needs it
        runs `controls` alone, for their side effects, but none of `done`.
        `sums` is a fetch that is added to an argument of the function's, the
        sums so far.
        """
        names, taken = self.reached(inputs, fetches, controls, done)
        part = self._whole.definition_of(names)
        is_compiled = self._options.get("jit_compile")  # XLA merges them itself
        merged = {} if is_compiled else _merge_equal(part, self._gradients)
        if not names.isdisjoint(self._gradients):
            _run_in_order(part, self._gradients, self._whole)
        add_in_order(part)
        return self.imported(part, taken, fetches, sums, merged)

    def reached(
        self,
        inputs: Iterable[tf.Tensor | Bundle],
        fetches: Iterable[tf.Tensor | Bundle],
        controls: Iterable[tf.Operation] = (),
        done: Collection[str] = (),
    ) -> tuple[set[str], list[tf.Tensor | Bundle]]:
        """Names of a function's operations, and the inputs that it takes.

        As for `function`; `done` is what another function did, which is not run
        for side effects.
        """
        # What is not computed here: captured from outside, or given.
        known: dict[Any, tf.Tensor | Bundle] = {
            ref: ref.deref() for ref in self.captures
        }
        for one in inputs:
            known.update({t.ref(): one for t in as_bundle(one).aliases})
        taken: dict[int, tf.Tensor | Bundle] = {}
        names: set[str] = set()
        controls = [op for op in controls if op.name not in done]
        waiting = [t for fetch in fetches for t in as_bundle(fetch).tensors]
        waiting += [op.outputs[0] for op in controls if op.outputs]
        operations = [op for op in controls if not op.outputs]
        # From what is wanted back to what is known: a tensor waits for the
        # operation that makes it, and that for the tensors that it takes.
        while waiting or operations:
            if waiting:
                tensor = waiting.pop()
                if tensor.ref() in known:
                    one = known[tensor.ref()]
                    taken[id(one)] = one
                    continue
                operations.append(tensor.op)
            op = operations.pop()
            if op.name not in names:
                names.add(op.name)
                waiting.extend(op.inputs)
                if controls:
                    operations += [
                        o
                        for o in op.control_inputs
                        if o.name not in done and o.name in self._own
                    ]
        return names, list(taken.values())

    def imported(
        self,
        part: tf.compat.v1.GraphDef,
        inputs: list[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        sums: Bundle | None = None,
        merged: Mapping[str, str] | None = None,
    ) -> Subfunction:
        """Imports a definition into a function that takes the inputs.

        `merged` are operations in whose stead others of the definition run.
        """
        merged = merged or {}
        used = {_full(name) for node in part.node for name in node.input}
        given = {t.name for one in inputs for t in as_bundle(one).aliases}
        wanted = [t for fetch in fetches for t in as_bundle(fetch).tensors]
        computed = [t.name for t in wanted if t.name not in given]
        results_of = [_output_of(name, merged) for name in computed]

        def body(*arguments: tf.Tensor) -> list[tf.Tensor]:
            # Packed values, bundle after bundle, then the sums so far, and
            # whether there are none.
            flat = iter(arguments)
            found: dict[str, tf.Tensor] = {}
            for one in inputs:
                for slot, value in zip(*self._unpacked(one, flat)):
                    found.update({t.name: value for t in slot})
            found.update(_by_themselves(part, found))
            imported = internals.import_definition(
                part, {n: v for n, v in found.items() if n in used}, results_of
            )
            found.update(zip(computed, imported))
            for t in wanted:  # what `set_shape` said is in no definition
                found[t.name].set_shape(t.shape)
            results = []
            for fetch in fetches:
                values = [
                    tf.identity(found[t.name])
                    if t.name in given
                    else found[t.name]
                    for t in as_bundle(fetch).tensors
                ]
                if fetch is sums:
                    _, so_far = self._unpacked(fetch, flat)
                    is_first = next(flat) if sums.begins else None
                    values = sums.add(so_far, values, is_first)
                with tf.device(self._where):
                    results += as_bundle(fetch).pack(values)
            return results

        taken = [*inputs, sums] if sums else inputs
        specs = [spec for one in taken for spec in as_bundle(one).specs]
        if sums and sums.begins:
            specs.append(tf.TensorSpec([], tf.bool))
        stays = stays_where_called(specs, part)
        concrete = traced(body, specs, self._options, stays)
        internals.keep(concrete, self._graph)  # and so the functions it calls
        call = internals.FunctionCall(concrete, as_written=True)
        # A call of a call: TensorFlow builds a called function anew for every
        # call in the step's graph, and this way only one operation's.
        wrapper = traced(lambda *a: call(list(a)), specs, self._options, stays)
        internals.keep(wrapper, concrete)
        return Subfunction(wrapper, inputs, fetches, self.captures)

    def _unpacked(
        self, one: tf.Tensor | Bundle, arguments: Iterator[tf.Tensor]
    ) -> tuple[list[list[tf.Tensor]], list[tf.Tensor]]:
        """The slots of a bundle, and their values in a function."""
        bundle = as_bundle(one)
        packed = list(itertools.islice(arguments, bundle.num_packed))
        with tf.device(self._where):
            return bundle.slots, bundle.unpack(packed)


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
    makers = {n.name: [*map(_maker, n.input)] for n in nodes}
    # A gradient has its place; what is repeated, that before the first of those
    # that take it.
    turn: dict[str, int] = {}
    for i, node in reversed([*enumerate(nodes)]):
        is_gradient = node.name in gradients
        own = 2 * i + 1 if is_gradient else turn.get(node.name)
        if own is not None:
            turn[node.name] = own
            for name in makers[node.name]:
                if name in makers and name not in gradients:
                    turn[name] = min(own - is_gradient, turn.get(name, own))
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


def _maker(name: str) -> str:
    """The operation that makes a node's input."""
    return name.lstrip("^").split(":")[0]


def _by_themselves(
    part: tf.compat.v1.GraphDef, found: dict[str, tf.Tensor]
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
    return {n: tf.identity(found[n]) for n in names if n in found}


def _full(name: str) -> str:
    """The name of a node's input as a tensor's name."""
    return name if ":" in name else f"{name}:0"


def follows(tensor: tf.Tensor, free: set[Any]) -> bool:
    """Whether a tensor is among the free ones or follows cheaply from them."""
    if tensor.ref() in free:
        return True
    if tensor.op.type not in CHEAP:
        return False
    if all(follows(t, free) for t in tensor.op.inputs):
        free.add(tensor.ref())
        return True
    return False


class Subfunction:
    """A function cut out of a graph.

    `captures` are tensors outside of the graph, by the references of the
    graph's own.
    """

    def __init__(
        self,
        concrete: Any,
        inputs: list[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        captures: Mapping[Any, Any],
    ):
        self._call = internals.FunctionCall(concrete, as_written=True)
        self.inputs = inputs
        self._fetches = fetches
        self._captures = captures

    def __call__(
        self, values: Mapping[Any, Any], sums: Sequence[tf.Tensor] = ()
    ) -> list[Any]:
        """Calls the function; of a bundle it returns a list of what is packed.

        `values` are by the references of the graph's tensors; those of a
        bundle, packed, by the bundle. `sums` are those so far, packed.
        """
        arguments: list[tf.Tensor] = []
        for one in self.inputs:
            if isinstance(one, Bundle):
                arguments += values[one]
            elif one.ref() in values:
                arguments.append(values[one.ref()])
            else:
                value = self._captures[one.ref()]
                is_read = isinstance(value, OutsideValue)
                arguments.append(value.read() if is_read else value)
        results = iter(self._call([*arguments, *sums]))
        return [
            list(itertools.islice(results, fetch.num_packed))
            if isinstance(fetch, Bundle)
            else next(results)
            for fetch in self._fetches
        ]


# ------------------------------------------- functions that wait for replicas
class Stage(NamedTuple):
    """A part of a function, up to where partners add up.

    Attributes:
        function: Returns this replica's sums, and what is carried.
        received: The totals, tensors of the graph, one for each sum.
        carried: What later stages take besides.
    """

    function: Subfunction
    received: list[tf.Tensor]
    carried: Bundle


class StagedFunction:
    """A function cut out of a graph, in stages; see `GraphCutter.function`."""

    def __init__(
        self,
        graph: GraphCutter,
        inputs: Iterable[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        controls: Sequence[tf.Operation],
        sums: Bundle | None,
    ):
        self._graph = graph
        self._inputs = list(inputs)
        self._cut = fetches, controls, sums

    @property
    def before_last(self) -> list[Stage]:
        """All stages but the last one."""
        return self._stages[0]

    @property
    def last(self) -> Subfunction:
        """The last stage, which returns what the function does."""
        return self._stages[1]

    @functools.cached_property
    def whole(self) -> Subfunction:
        """The function in one stage.

        Raises:
            ValueError: If it adds up over replicas.
        """
        if self._levels:
            raise ValueError(
                "What a loss is divided by must not follow from a batch "
                "normalisation over replicas, where it has to be known before "
                "all forward tasks are done. Received: a size, a mask or a "
                "weight that does, or a loss class of your own, after a layer "
                'with synchronized=True. Pass schedule="gpipe", '
                "synchronized=False, or batches of a fixed shape."
            )
        return self.last

    @functools.cached_property
    def _levels(self) -> list[list[tf.Operation]]:
        """The additions, those first that need none of the others."""
        fetches, controls, _ = self._cut
        names, _ = self._graph.reached(self._inputs, fetches, controls)
        levels: list[list[tf.Operation]] = []
        depth: dict[str, int] = {}
        for op in self._graph.operations:
            if op.name not in names:
                continue
            own = max((depth.get(t.op.name, 0) for t in op.inputs), default=0)
            if is_sum(op):
                if own == len(levels):
                    levels.append([])
                levels[own].append(op)
                own += 1
            depth[op.name] = own
        return levels

    @functools.cached_property
    def _stages(self) -> tuple[list[Stage], Subfunction]:
        """All stages but the last one, and that."""
        graph, inputs = self._graph, list(self._inputs)
        fetches, controls, sums = self._cut
        totals = [op.outputs[0] for level in self._levels for op in level]
        done: set[str] = set()  # operations of earlier stages
        stages: list[Stage] = []
        #     stage 0    inputs                       -> sums 0, carried 0
        #                partners add up sums 0: totals 0
        #     stage 1    inputs, totals 0, carried 0  -> sums 1, carried 1
        #                ...
        #     last       inputs, all totals, all carried  -> fetches
        for i, level in enumerate(self._levels):
            own_sums = [op.inputs[0] for op in level]
            received = [op.outputs[0] for op in level]
            own = graph.reached(inputs, own_sums)[0] - done
            done |= own
            wanted = list(fetches)
            for later in self._levels[i + 1 :]:
                wanted += [op.inputs[0] for op in later]
            known = [*inputs, *totals]
            rest, _ = graph.reached(known, wanted, controls, done)
            at_hand = [t for one in known for t in as_bundle(one).aliases]
            direct = [t for one in wanted for t in as_bundle(one).tensors]
            taken = graph.entering(rest - done, direct, at_hand, False)
            made = {t.ref(): t for t in taken if t.op.name in own}
            carried = Bundle(list(made.values()), together=False)
            stage = graph.function(inputs, [*own_sums, carried])
            stages.append(Stage(stage, received, carried))
            inputs += [*received, carried]
        return stages, graph.function(inputs, fetches, controls, sums, done)


_NAME = "moments_over_replicas"

_TYPE = "PlaceholderWithDefault"


@tf.custom_gradient
def sum_over_replicas(tensor: tf.Tensor) -> tf.Tensor:
    """The point of a graph where the partners' tensors are added up."""

    def point(value: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.PlaceholderWithDefault(
            input=value, shape=value.shape, name=_NAME
        )

    return point(tensor), point


def is_sum(op: tf.Operation) -> bool:
    """Whether an operation is what `sum_over_replicas` added to the graph."""
    return op.type == _TYPE and op.name.split("/")[-1].startswith(_NAME)


def sums_over_replicas(
    operations: Iterable[tf.Operation],
) -> list[tf.Tensor]:
    """What `sum_over_replicas` returned in the graph of some operations."""
    return [op.outputs[0] for op in operations if is_sum(op)]
