"""Runs a graph that assigns variables as a few functions, each on one device.

An update is one graph: Keras's `apply_gradients`, traced once. Most of it is
about one weight, its slots and its gradient: a family, which is computed where
its variables are. What belongs to no family, or to several, is common: rate,
iterations, loss scale, the norm of all gradients. It is scalars, computed once:

    stage 0     common     reads rate and iterations, counts on    -> rate, t
    stage 1     CPU:0      updates its families, with rate and t
                CPU:1      updates its families, with rate and t

    with a norm over all gradients:
    stage 0     CPU:0, CPU:1     squares of each gradient          -> scalars
    stage 1     common           rate, t, the norm of all          -> scalars
    stage 2     CPU:0, CPU:1     the update

A function is called for each device and stage. Each operation runs as late as
those allow that take its results, so that hardly more than scalars crosses.
What is common does not depend on the number of devices, and neither do bits:
XLA compiles families alone, if anything, and TensorFlow's graph optimiser is
off.

A branch that touches several families stays a branch, whose graphs are cut in
the same way. Families on several devices, as of an optimizer that mixes
weights, are not compiled, and their operations run where their first input is.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import names as names_lib
from tfgpipe.graphs.cut import GraphCutter, WholeGraph
from tfgpipe.graphs.same_graph import FunctionTexts, operation_text

_BRANCHES = {"If", "StatelessIf"}
_COMMON = "common"
_GIVEN = "Placeholder"
# Calls of a device and a stage, at most; and what one costs, in weights that
# are compiled.
_MOST_CALLS = 16
_CALL = 2


class _Unit(NamedTuple):
    """Operations that need not wait for a function that ends between them.

    Attributes:
        family: The name of one of its tensors, or a word.
        device: Where it runs.
        is_compiled: Whether XLA compiles it.
    """

    family: str
    device: str
    is_compiled: bool


class _Part(NamedTuple):
    """Operations of one function.

    Attributes:
        operations: In the order of the graph.
        inputs: The tensors that they take.
        outputs: Those that others take.
    """

    operations: list[tf.Operation]
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]

    def giving(self, wanted: Collection[Any]) -> _Part:
        """The same with outputs: those that are wanted, by references."""
        outputs = [t for op in self.operations for t in op.outputs]
        return self._replace(outputs=[t for t in outputs if t.ref() in wanted])


def run_by_device(
    graph: tf.Graph,
    values: Mapping[Any, Any],
    home: str,
    compiles: bool = False,
    as_they_are: Collection[Any] = (),
) -> list[tf.Tensor]:
    """Adds to the current graph what another one does, device by device.

    Args:
        graph: A graph that is complete, with its automatic control
            dependencies.
        values: Of its placeholders, by their references. Variables by their
            handles, which say where they are.
        home: The device of what is common.
        compiles: Whether XLA compiles families. Not those with shapes that are
            not known, or with side effects that are no assignments.
        as_they_are: References of placeholders whose families XLA does not
            compile either.

    Returns:
        The graph's outputs.
    """
    return _Cut(graph, values, home, compiles, as_they_are).run()


class _Cut:
    """A graph on its way to functions."""

    def __init__(
        self,
        graph: tf.Graph,
        values: Mapping[Any, Any],
        home: str,
        compiles: bool,
        as_they_are: Collection[Any],
    ):
        self._whole = WholeGraph(graph, takes_reads=False)
        self._texts = FunctionTexts(self._whole.functions)
        self._outputs = graph.outputs
        self._values = dict(values)
        self._home = home
        self._compiles = compiles
        self._as_they_are = set(as_they_are)
        # Tensors by the references of equal ones, operations by names.
        self._same: dict[Any, tf.Tensor] = {}
        self._merged: dict[str, str] = {}
        self._merge()
        self._operations = [
            op
            for op in self._whole.operations
            if op.name not in self._merged and op.type != _GIVEN
        ]
        self._parents: dict[Any, Any] = {}  # of families, to their roots
        self._unite()
        self._units: dict[str, _Unit] = {}  # of operations, but copied ones
        self._find_units()
        self._stages: dict[str, int] = {}
        self._find_stages()
        self._functions: dict[Any, tuple[Any, list[_Part]]] = {}

    # ---------------------------------------------------------- what is equal
    def _merge(self) -> None:
        """Finds reads of a variable between assignments, and equal scalars."""
        known: dict[Any, tf.Operation] = {}
        num_writes: collections.Counter[Any] = collections.Counter()
        for op in self._whole.operations:
            inputs = [t.ref() for t in self._inputs(op)]
            handles = [t.ref() for t in op.inputs if t.dtype == tf.resource]
            is_read = op.type == "ReadVariableOp"
            if handles and not is_read:
                num_writes.update(handles)
            if not (is_read or _is_of_scalars(op)):
                continue
            key = (
                self._text(op),
                *inputs,
                *(num_writes[handle] for handle in handles),
                *sorted(self._controls(op)),
            )
            first = known.setdefault(key, op)
            if first is not op:
                self._merged[op.name] = first.name
                self._same.update(
                    (t.ref(), kept)
                    for t, kept in zip(op.outputs, first.outputs)
                )

    def _inputs(self, op: tf.Operation) -> list[tf.Tensor]:
        return [self._same.get(t.ref(), t) for t in op.inputs]

    def _controls(self, op: tf.Operation) -> set[str]:
        return {self._merged.get(o.name, o.name) for o in op.control_inputs}

    # --------------------------------------------------------------- families
    def _root(self, key: Any) -> Any:
        while self._parents[key] is not key:
            key = self._parents[key]
        return key

    def _join(self, keys: Iterable[Any]) -> None:
        first, *others = map(self._root, keys)
        for other in others:
            self._parents[self._root(other)] = self._root(first)

    def _unite(self) -> None:
        """Puts what is connected by more than scalars into one family."""
        self._key: dict[Any, Any] = {}  # of tensors, not scalars, and handles
        calls = [
            op for op in self._operations if internals.takes_functions(op.type)
        ]
        scalar_handles: set[Any] = set()
        large_handles: set[Any] = set()
        for op in self._operations:
            tensors = [*op.inputs, *op.outputs]
            handles = {t.ref() for t in tensors if t.dtype == tf.resource}
            if op in calls or not handles:
                continue
            is_large = any(map(_is_large, tensors))
            (large_handles if is_large else scalar_handles).update(handles)
        self._scalar_handles = scalar_handles - large_handles
        for ref in self._values:
            tensor = ref.deref()
            if _is_large(tensor) or (
                tensor.dtype == tf.resource and ref not in self._scalar_handles
            ):
                self._key[ref] = self._parents[ref] = ref
        for op in self._operations:
            large = [t.ref() for t in op.outputs if _is_large(t)]
            if op in calls:
                self._key.update((ref, ref) for ref in large)
                self._parents.update((ref, ref) for ref in large)
            elif keys := self._keys_of(op):
                self._join(keys)
                self._key.update((ref, keys[0]) for ref in large)
        self._spanning: set[str] = set()
        for op in calls:
            keys = self._keys_of(op)
            handles = {t.ref() for t in op.inputs} & self._scalar_handles
            num_families = 1 if _is_call(op) else len({*map(self._root, keys)})
            if keys and num_families + bool(handles) > 1:
                self._spanning.add(op.name)
            elif keys:
                self._join(
                    keys
                    + [self._key[t.ref()] for t in op.outputs if _is_large(t)]
                )

    def _keys_of(self, op: tf.Operation) -> list[Any]:
        """The families of its inputs that are no scalars."""
        refs = [t.ref() for t in self._inputs(op)]
        return [self._key[ref] for ref in refs if ref in self._key]

    # ------------------------------------------------------------------ units
    def _find_units(self) -> None:
        """Says where each operation runs; some are copied where needed."""
        wanted = [t.op.name for t in map(self._kept, self._outputs)]
        for op in self._operations:
            if op.name in self._spanning:
                wanted += [t.op.name for t in self._inputs(op)]
        needed = set(wanted)
        plain: set[Any] = set()  # families that XLA does not compile
        devices: dict[Any, set[str]] = collections.defaultdict(set)
        for ref in self._key:
            root = self._root(self._key[ref])
            if ref in self._as_they_are:
                plain.add(root)
            if ref.deref().dtype == tf.resource:
                devices[root].add(self._values[ref].device)
        families: dict[str, Any] = {}
        for op in self._operations:
            inputs = self._inputs(op)
            keys = self._keys_of(op)
            has_handles = any(t.dtype == tf.resource for t in inputs)
            is_alone = internals.is_stateful(op.type) and not has_handles
            if not keys and not has_handles and not is_alone:
                own = [families.get(t.op.name) for t in inputs]
                roots = {*own} - {None}
                keys = list(roots) if len(roots) == 1 else []
            if not keys or op.name in self._spanning:
                continue
            root = families[op.name] = self._root(keys[0])
            if is_alone or not all(
                t.shape.is_fully_defined() for t in op.outputs
            ):
                plain.add(root)
        # Where a family has no variable: where its first tensor is.
        for op in self._operations:
            inputs = self._inputs(op)
            handles = [t for t in inputs if t.dtype == tf.resource]
            root = families.get(op.name)
            if op.name in self._spanning:
                self._units[op.name] = _Unit(op.name, self._home, False)
            elif root is not None:
                places = devices[root]
                device = next(iter(places), "")
                if len(places) != 1:
                    device = self._place(handles or inputs)
                is_compiled = self._compiles and len(places) <= 1
                is_compiled = is_compiled and root not in plain
                family = root.deref().name
                self._units[op.name] = self._unit(family, device, is_compiled)
            elif (
                handles
                or op.name in needed
                or internals.is_stateful(op.type)
                or (_is_of_scalars(op) and op.type != "Const")
            ):
                device = self._place(handles or inputs)
                self._units[op.name] = self._unit(_COMMON, device, False)

    def _unit(self, family: str, device: str, is_compiled: bool) -> _Unit:
        must = names_lib.only_compiles([device])
        return _Unit(family, device, is_compiled or must)

    def _place(self, inputs: Iterable[tf.Tensor]) -> str:
        """Where the first input is that has a place, and is no scalar."""
        found = []
        for tensor in inputs:
            unit = self._units.get(tensor.op.name)
            value = self._values.get(tensor.ref())
            device = unit.device if unit else getattr(value, "device", "")
            if device and (_is_large(tensor) or tensor.dtype == tf.resource):
                return str(device)
            found += [device] if unit and device != self._home else []
        return str(next(iter(found), self._home))

    # ----------------------------------------------------------------- stages
    def _find_stages(self) -> None:
        """Has each operation wait for as few functions, and run late."""
        units = self._units
        before: dict[str, set[str]] = {}  # without copied ones
        for op in self._operations:
            direct = {t.op.name for t in self._inputs(op)} | self._controls(op)
            found: set[str] = set()
            before[op.name] = found
            for name in direct:
                found |= {name} if name in units else before.get(name, set())
        live: set[str] = set()
        waiting = [t.op.name for t in map(self._kept, self._outputs)]
        waiting += [
            op.name
            for op in self._operations
            if internals.is_stateful(op.type) and op.type != "ReadVariableOp"
        ]
        while waiting:
            name = waiting.pop()
            if name not in live and name in before:
                live.add(name)
                waiting += before[name]
        order = [
            op.name
            for op in self._operations
            if op.name in live and op.name in units
        ]
        early: dict[str, int] = {}
        last: collections.Counter[Any] = collections.Counter()
        for name in order:
            own = units[name]
            early[name] = max(
                (early[b] + (units[b] != own) for b in before[name]), default=0
            )
            last[own] = max(last[own], early[name])
        latest: dict[str, int] = {}
        for name in reversed(order):
            own = units[name]
            self._stages[name] = stage = latest.get(name, last[own])
            for b in before[name]:
                bound = stage - (units[b] != own)
                latest[b] = min(latest.get(b, last[units[b]]), bound)

    # -------------------------------------------------------------- functions
    def run(self) -> list[tf.Tensor]:
        """Calls the functions, stage by stage; returns the graph's outputs."""
        names: dict[Any, list[str]] = collections.defaultdict(list)
        for name, stage in reversed(self._stages.items()):
            names[stage, self._units[name]].append(name)
        wanted = {t.ref() for t in map(self._kept, self._outputs)}
        parts: dict[Any, list[_Part]] = collections.defaultdict(list)
        for (stage, unit), own in names.items():
            part = self._part(own)
            wanted.update(t.ref() for t in part.inputs)
            alone = unit.family if unit.family in self._spanning else None
            parts[stage, unit.device, unit.is_compiled, alone].append(part)
        for key in sorted(parts, key=lambda key: key[0]):
            _, device, is_compiled, alone = key
            op = None if alone is None else self._operation(alone)
            if op is not None and op.type in _BRANCHES:
                results = self._branch(op)
                self._values.update(zip((t.ref() for t in op.outputs), results))
                continue
            ready = [part.giving(wanted) for part in parts[key]]
            for group in _groups(ready, self._key_of):
                with tf.device(device):
                    self._call(group, device, is_compiled)
        return [self._values[self._kept(t).ref()] for t in self._outputs]

    def _part(self, own: list[str]) -> _Part:
        """Some operations with what is copied for them, and what they take."""
        names, waiting = set(own), list(own)
        while waiting:
            op = self._operation(waiting.pop())
            needed = self._controls(op) | {
                t.op.name for t in self._inputs(op) if t.op.type != _GIVEN
            }
            new = {name for name in needed - names if name not in self._units}
            names |= new
            waiting += new
        places = self._whole.places
        operations = [
            self._operation(name)
            for name in sorted(names, key=places.__getitem__)
        ]
        inputs = {
            t.ref(): t
            for op in operations
            for t in self._inputs(op)
            if t.op.name not in names
        }
        return _Part(operations, list(inputs.values()), [])

    def _key_of(self, part: _Part) -> Any:
        """Returns what a part computes, as a key that equal parts share.

        They take what is common itself, and all else in the same order.
        """
        numbers: dict[Any, Any] = {}
        for i, tensor in enumerate(part.inputs):
            unit = self._units.get(tensor.op.name)
            is_common = unit is not None and unit.family == _COMMON
            own = tensor.name if is_common else i
            numbers[tensor.ref()] = own, str(tensor.shape), tensor.dtype
        order = {op.name: i for i, op in enumerate(part.operations)}
        written = []
        for i, op in enumerate(part.operations):
            numbers.update((t.ref(), (i, j)) for j, t in enumerate(op.outputs))
            controls = [order[n] for n in self._controls(op) if n in order]
            written.append(
                (
                    self._text(op),
                    *(numbers[t.ref()] for t in self._inputs(op)),
                    *sorted(controls),
                    *(str(t.shape) for t in op.outputs),
                )
            )
        return (*written, *(numbers[t.ref()] for t in part.outputs))

    def _text(self, op: tf.Operation) -> bytes:
        return operation_text(self._whole.nodes[op.name], self._texts)

    def _call(self, parts: list[_Part], device: str, compiled: bool) -> None:
        """Calls one function of some parts, which equal ones share."""
        #     traced     inputs of the parts for which it was made
        #     parts      inputs of these, one for one
        key = (device, compiled, *map(self._key_of, parts))
        if key not in self._functions:
            function = self._function(parts, device, compiled)
            self._functions[key] = function, parts
        function, traced = self._functions[key]
        values = {
            t.ref(): self._values[own.ref()]
            for a, b in zip(traced, parts)
            for t, own in zip(a.inputs, b.inputs)
        }
        outputs = [t.ref() for part in parts for t in part.outputs]
        self._values.update(zip(outputs, function(values)))

    def _kept(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._same.get(tensor.ref(), tensor)

    def _operation(self, name: str) -> tf.Operation:
        return self._whole.operations[self._whole.places[name]]

    def _function(
        self, parts: list[_Part], device: str, is_compiled: bool
    ) -> Any:
        """The function of some parts."""
        names = {op.name for part in parts for op in part.operations}
        inputs = {t.ref(): t for part in parts for t in part.inputs}
        outputs = [t for part in parts for t in part.outputs]
        definition = self._whole.definition_of(names)
        same = {ref.deref().name: t.name for ref, t in self._same.items()}
        for node in definition.node:
            kept = []
            for text in node.input:
                if text[0] == "^":
                    name = self._merged.get(text[1:], text[1:])
                    kept += [f"^{name}"] if name in names else []
                else:
                    full = text if ":" in text else f"{text}:0"
                    kept.append(same.get(full, full))
            node.input[:] = kept
            node.attr.pop("_class", None)
            node.device = ""
        options: dict[str, Any] = {"autograph": False}
        if is_compiled:
            options["jit_compile"] = True
        else:
            options["experimental_attributes"] = {"_noinline": True}
        kind = tf.DeviceSpec.from_string(device).device_type or "CPU"
        cutter = GraphCutter(self._whole, (), options, kind)
        return cutter.imported(definition, list(inputs.values()), outputs)

    def _branch(self, op: tf.Operation) -> list[tf.Tensor]:
        """A branch, of which each side is cut in the same way."""
        chosen, *given = self._inputs(op)
        values = [self._values[t.ref()] for t in given]

        def side(name: str) -> Any:
            graph = internals.function_graph(op, op.get_attr(name).name)
            inputs = [t.ref() for t in graph.inputs]
            plain = [
                ref
                for ref, t in zip(inputs, given)
                if t.ref() in self._as_they_are
            ]

            def run() -> Any:
                results = run_by_device(
                    graph,
                    dict(zip(inputs, values)),
                    self._home,
                    self._compiles,
                    plain,
                )
                return results or tf.no_op()

            return run

        with tf.device(None):
            results = tf.cond(
                self._values[chosen.ref()],
                side("then_branch"),
                side("else_branch"),
            )
        return results if op.outputs else []


def _groups(
    parts: list[_Part], key_of: Callable[[_Part], Any]
) -> list[list[_Part]]:
    """Deals parts out to functions, of which as many as possible are equal.

    12 equal blocks of 14 weights are 12 calls of one function, compiled once.
    """
    by_key: dict[Any, list[_Part]] = collections.defaultdict(list)
    for part in parts:
        by_key[key_of(part)].append(part)
    counts = [len(equal) for equal in by_key.values()]

    def cost(number: int) -> int:
        return number * _CALL + sum(n // number + n % number for n in counts)

    number = min(range(1, _MOST_CALLS + 1), key=cost)
    groups: list[list[_Part]] = [[] for _ in range(number + 1)]
    for equal in by_key.values():
        each = len(equal) // number
        for i in range(number):
            groups[i] += equal[i * each : (i + 1) * each]
        groups[number] += equal[number * each :]
    return [group for group in groups if group]


def _is_call(op: tf.Operation) -> bool:
    """Says whether an operation calls one function, whatever its inputs are."""
    return "PartitionedCall" in op.type


def _is_large(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor may be more than a scalar."""
    return tensor.dtype != tf.resource and tensor.shape.rank != 0


def _is_of_scalars(op: tf.Operation) -> bool:
    """Tells whether an operation makes scalars of scalars, or is a constant."""
    if internals.is_stateful(op.type) or op.type == _GIVEN:
        return False
    tensors = [*op.inputs, *op.outputs]
    return op.type == "Const" or not (
        any(map(_is_large, tensors)) or internals.takes_functions(op.type)
    )
