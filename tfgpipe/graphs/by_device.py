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
import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.devices import names as names_lib
from tfgpipe.graphs.cut import GraphCutter, WholeGraph
from tfgpipe.graphs.functions import Subfunction, by_reference
from tfgpipe.graphs.same_graph import Writer, operation_text
from tfgpipe.graphs.traced_model import TraceOptions

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
        family: Identifies the family, or is a word.
        device: Where it runs.
        is_compiled: Whether XLA compiles it.
    """

    family: Any
    device: str
    is_compiled: bool


@dataclasses.dataclass
class _Part:
    """Operations of one function, in order, and a key that equal parts share.

    `inputs` are the tensors that they take, `outputs` those that others take.
    """

    operations: list[tf.Operation]
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor] = dataclasses.field(default_factory=list)
    key: str = ""


@dataclasses.dataclass
class GraphByDevice:
    """A graph on its way to functions; `run` calls them in the current graph.

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
    """

    graph: tf.Graph
    values: dict[Any, Any]
    home: str
    compiles: bool
    as_they_are: Collection[Any]

    def __post_init__(self) -> None:
        self._whole = WholeGraph(self.graph, takes_reads=False)
        # Names of operations that are left out, and of the equal ones.
        self._merged: dict[str, str] = {}
        self._merge()
        self._operations = [
            op
            for op in self._whole.operations
            if op.name not in self._merged and op.type != _GIVEN
        ]
        self._effects = [
            op
            for op in self._operations
            if internals.is_stateful(op.type) and op.type != "ReadVariableOp"
        ]
        self._outputs = [self._kept(t) for t in self.graph.outputs]
        # By tensors, not scalars, and handles: all of their family.
        self._families: dict[Any, set[Any]] = {}
        self._spanning: set[str] = set()  # calls with several families
        self._unite()
        self._units: dict[str, _Unit] = {}  # of operations, but copied ones
        self._find_units()
        self._functions: dict[Any, tuple[Subfunction, list[_Part]]] = {}

    # ---------------------------------------------------------- what is equal
    def _merge(self) -> None:
        """Finds reads of a variable between assignments, and equal scalars."""
        known: dict[Any, str] = {}
        num_writes: collections.Counter[Any] = collections.Counter()
        for op in self._whole.operations:
            handles = [t.ref() for t in op.inputs if t.dtype == tf.resource]
            is_read = op.type == "ReadVariableOp"
            if not is_read:
                num_writes.update(handles)
            if is_read or _is_of_scalars(op):
                key = (
                    operation_text(self._whole, op.name),
                    *(t.ref() for t in self._inputs(op)),
                    *(num_writes[handle] for handle in handles),
                    *sorted(self._controls(op)),
                )
                first = known.setdefault(key, op.name)
                if first != op.name:
                    self._merged[op.name] = first

    def _kept(self, tensor: tf.Tensor) -> tf.Tensor:
        first = self._merged.get(tensor.op.name)
        if first is None:
            return tensor
        return self._whole.operation(first).outputs[tensor.value_index]

    def _inputs(self, op: tf.Operation) -> list[tf.Tensor]:
        return [self._kept(t) for t in op.inputs]

    def _controls(self, op: tf.Operation) -> set[str]:
        return {self._merged.get(o.name, o.name) for o in op.control_inputs}

    # --------------------------------------------------------------- families
    def _join(self, refs: Iterable[Any]) -> None:
        """Makes one family of the families of some tensors."""
        joined: set[Any] = set()
        for ref in refs:
            family = self._families[ref]
            if family is not joined:
                small, joined = sorted((family, joined), key=len)
                joined |= small
                self._families.update(dict.fromkeys(small, joined))

    def _members(self, op: tf.Operation) -> list[Any]:
        """The references of its inputs that are of a family."""
        refs = [t.ref() for t in self._inputs(op)]
        return [ref for ref in refs if ref in self._families]

    def _unite(self) -> None:
        """Puts what is connected by more than scalars into one family."""
        used: set[Any] = set()  # handles, but by calls
        large: set[Any] = set()  # those of more than scalars
        for op in self._operations:
            if not internals.takes_functions(op.type):
                tensors = [*op.inputs, *op.outputs]
                handles = {t.ref() for t in tensors if t.dtype == tf.resource}
                used |= handles
                large |= handles if any(map(_is_large, tensors)) else set()
        for ref in self.values:
            is_handle = ref.deref().dtype == tf.resource
            is_small = ref in used - large
            if _is_large(ref.deref()) or (is_handle and not is_small):
                self._families[ref] = {ref}
        calls = []
        for op in self._operations:
            members = self._members(op)
            made = [t.ref() for t in op.outputs if _is_large(t)]
            is_call = internals.takes_functions(op.type)
            if is_call or members:
                self._families.update((ref, {ref}) for ref in made)
            if members and is_call:
                calls.append(op)
            elif members:
                self._join([*members, *made])
        for op in calls:
            members = self._members(op)
            # A call of one function is of one family, whatever its inputs are.
            num_families = 1
            if "PartitionedCall" not in op.type:
                num_families = len({id(self._families[r]) for r in members})
            has_scalars = any(
                t.dtype == tf.resource and t.ref() not in self._families
                for t in op.inputs
            )
            if num_families + has_scalars > 1:
                self._spanning.add(op.name)
            else:
                made = [t.ref() for t in op.outputs if _is_large(t)]
                self._join([*members, *made])

    # ------------------------------------------------------------------ units
    def _find_units(self) -> None:
        """Says where each operation runs; some are copied where needed."""
        wanted = {t.op.name for t in self._outputs}
        for name in self._spanning:
            inputs = self._inputs(self._whole.operation(name))
            wanted |= {t.op.name for t in inputs}
        plain: set[Any] = {_COMMON}  # families that XLA does not compile
        devices: dict[Any, set[str]] = collections.defaultdict(set)
        for ref, family in self._families.items():
            if ref in self.as_they_are:
                plain.add(id(family))
            if ref.deref().dtype == tf.resource:
                devices[id(family)].add(self.values[ref].device)
        families: dict[str, Any] = {}
        for op in self._operations:
            inputs = self._inputs(op)
            has_handles = any(t.dtype == tf.resource for t in inputs)
            is_alone = internals.is_stateful(op.type) and not has_handles
            ids = {id(self._families[ref]) for ref in self._members(op)}
            if not ids and not has_handles and not is_alone:
                before = {t.op.name for t in inputs} & families.keys()
                ids = {families[name] for name in before}
            if len(ids) == 1 and op.name not in self._spanning:
                (families[op.name],) = ids
                shapes = [t.shape for t in op.outputs]
                if is_alone or not all(s.is_fully_defined() for s in shapes):
                    plain |= ids
        for op in self._operations:
            inputs = self._inputs(op)
            handles = [t for t in inputs if t.dtype == tf.resource]
            family = families.get(op.name, _COMMON)
            if op.name in self._spanning:
                self._units[op.name] = _Unit(op.name, self.home, False)
                continue
            is_once = (
                handles
                or op.name in wanted
                or internals.is_stateful(op.type)
                or (_is_of_scalars(op) and op.type != "Const")
            )
            if family == _COMMON and not is_once:
                continue
            homes = devices.get(family, set())
            # Where a family has no variable: where its first tensor is.
            device = self._place(handles or inputs)
            if len(homes) == 1:
                (device,) = homes
            is_compiled = (
                self.compiles and len(homes) <= 1 and family not in plain
            )
            must = names_lib.only_compiles([device])
            self._units[op.name] = _Unit(family, device, is_compiled or must)

    def _place(self, inputs: Iterable[tf.Tensor]) -> str:
        """Where the first input is that has a place, and is no scalar."""
        for tensor in inputs:
            unit = self._units.get(tensor.op.name)
            value = self.values.get(tensor.ref())
            device = unit.device if unit else getattr(value, "device", "")
            if device and (_is_large(tensor) or tensor.dtype == tf.resource):
                return str(device)
        return self.home

    # ----------------------------------------------------------------- stages
    def _stages(self) -> dict[str, int]:
        """Has each operation wait for as few functions, and run late.

        Returns the stages of operations, the last ones first.
        """
        units = self._units
        before: dict[str, set[str]] = {}  # without copied ones
        for op in self._operations:
            direct = {t.op.name for t in self._inputs(op)} | self._controls(op)
            before[op.name] = set[str]().union(
                *({n} if n in units else before.get(n, ()) for n in direct)
            )
        live = internals.ancestors(
            self._outputs, controls=lambda _: True, effects=self._effects
        )
        kept = {self._merged.get(name, name) for name in live}
        order = [n for n in before if n in kept and n in units]
        early: dict[str, int] = {}
        last: collections.Counter[Any] = collections.Counter()
        for name in order:
            unit = units[name]
            early[name] = max(
                (early[b] + (units[b] != unit) for b in before[name]), default=0
            )
            last[unit] = max(last[unit], early[name])
        stages: dict[str, int] = {}
        latest: dict[str, int] = {}
        for name in reversed(order):
            unit = units[name]
            stages[name] = stage = latest.get(name, last[unit])
            for b in before[name]:
                bound = stage - (units[b] != unit)
                latest[b] = min(latest.get(b, last[units[b]]), bound)
        return stages

    # -------------------------------------------------------------- functions
    def run(self) -> list[tf.Tensor]:
        """Calls the functions, stage by stage; returns the graph's outputs."""
        names: dict[Any, list[str]] = collections.defaultdict(list)
        for name, stage in reversed(self._stages().items()):
            names[stage, self._units[name]].append(name)
        wanted = {t.ref() for t in self._outputs}
        parts: dict[Any, list[_Part]] = collections.defaultdict(list)
        for (stage, unit), inside in names.items():
            part = self._part(inside)
            wanted.update(t.ref() for t in part.inputs)
            alone = unit.family if unit.family in self._spanning else None
            parts[stage, unit.device, unit.is_compiled, alone].append(part)
        for key in sorted(parts, key=lambda key: key[0]):
            _, device, is_compiled, alone = key
            op = None if alone is None else self._whole.operation(alone)
            if op is not None and op.type in _BRANCHES:
                self.values.update(by_reference(op.outputs, self._branch(op)))
                continue
            for part in parts[key]:
                made = [t for op in part.operations for t in op.outputs]
                part.outputs = [t for t in made if t.ref() in wanted]
                part.key = self._key_of(part)
            for group in _groups(parts[key]):
                with tf.device(device):
                    self._call(group, device, is_compiled)
        return [self.values[t.ref()] for t in self._outputs]

    def _part(self, inside: list[str]) -> _Part:
        """Some operations with what is copied for them, and what they take."""
        names, waiting = set(inside), list(inside)
        while waiting:
            op = self._whole.operation(waiting.pop())
            needed = self._controls(op) | {
                t.op.name for t in self._inputs(op) if t.op.type != _GIVEN
            }
            new = {name for name in needed - names if name not in self._units}
            names |= new
            waiting += new
        operations = self._whole.in_order(names)
        inputs = {
            t.ref(): t
            for op in operations
            for t in self._inputs(op)
            if t.op.name not in names
        }
        return _Part(operations, list(inputs.values()))

    def _key_of(self, part: _Part) -> str:
        """Returns what a part computes, as a key that equal parts share.

        They take what is common itself, and all else in the same order.
        """
        given: dict[Any, Any] = {}
        for i, tensor in enumerate(part.inputs):
            unit = self._units.get(tensor.op.name)
            is_common = unit is not None and unit.family == _COMMON
            known_as = tensor.name if is_common else i
            given[tensor.ref()] = known_as, str(tensor.shape), tensor.dtype
        writer = Writer(self._whole, part.operations, given, self._merged)
        return writer.digest([writer.tensor(t) for t in part.outputs])

    def _call(self, parts: list[_Part], device: str, compiled: bool) -> None:
        """Calls one function of some parts, which equal ones share."""
        #     traced     inputs of the parts for which it was made
        #     parts      inputs of these, one for one
        key = (device, compiled, *(part.key for part in parts))
        outputs = [t for part in parts for t in part.outputs]
        if key not in self._functions:
            names = {op.name for part in parts for op in part.operations}
            inputs = {t.ref(): t for part in parts for t in part.inputs}
            definition = self._whole.definition_of(names, self._merged)
            for node in definition.node:
                node.device = ""
            options = TraceOptions(compiled).of_function
            kind = tf.DeviceSpec.from_string(device).device_type or "CPU"
            cutter = GraphCutter(self._whole, (), options, kind)
            new = cutter.imported(definition, [*inputs.values()], outputs)
            self._functions[key] = new, parts
        function, traced = self._functions[key]
        values = {
            t.ref(): self.values[given.ref()]
            for a, b in zip(traced, parts)
            for t, given in zip(a.inputs, b.inputs)
        }
        self.values.update(by_reference(outputs, function(values)))

    def _branch(self, op: tf.Operation) -> list[tf.Tensor]:
        """A branch, of which each side is cut in the same way."""
        chosen, *given = self._inputs(op)

        def run(name: str) -> Any:
            graph = internals.function_graph(op, op.get_attr(name).name)
            pairs = [(t.ref(), o.ref()) for t, o in zip(graph.inputs, given)]
            values = {ref: self.values[outer] for ref, outer in pairs}
            plain = [ref for ref, outer in pairs if outer in self.as_they_are]
            side = GraphByDevice(graph, values, self.home, self.compiles, plain)
            return side.run() or tf.no_op()

        with tf.device(None):
            results = tf.cond(
                self.values[chosen.ref()],
                lambda: run("then_branch"),
                lambda: run("else_branch"),
            )
        return results if op.outputs else []


def _groups(parts: list[_Part]) -> list[list[_Part]]:
    """Deals parts out to functions, of which as many as possible are equal.

    12 equal blocks of 14 weights are 12 calls of one function, compiled once.
    """
    by_key: dict[str, list[_Part]] = collections.defaultdict(list)
    for part in parts:
        by_key[part.key].append(part)
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
