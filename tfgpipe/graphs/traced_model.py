"""One run of a model in one TensorFlow graph, and its backward pass.

Python runs model, loss and metrics once, as Keras does: `TracedModel`. A tape
adds the backward pass to the same graph: `Differentiated`. What follows only
takes that graph apart, see `parts.py`.

The tape tells which operation it differentiates. So each new operation belongs
to the place of one of the forward pass:

    forward    op 0 .. op 5 | op 6 .. op 9 | op 10 ..      sections
    backward   of 0 .. 5   <- of 6 .. 9   <- of 10 ..      go the other way

An operation that no other differentiates, such as the sum of two gradients, is
where the first of those is whose results it takes.

Which operations have side effects, or draw, is asked of any graph: `stateful`.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.failures import add_note, check_interruption
from tfgpipe.graphs.cut import SIZES, functions_of
from tfgpipe.graphs.gradient_sums import (
    Gradient,
    as_merged,
    lookups,
)
from tfgpipe.internals import Nest

# What they do is what the functions do that they call.
_CALLS = {
    "Case",
    "If",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "StatelessCase",
    "StatelessIf",
    "StatelessWhile",
    "While",
}

# Reading a variable or a table has no effect; cuDNN's recurrent kernels are
# stateful for the sake of their dropout, which Keras does not use. What nobody
# needs any more, Python destroys when it comes to it. A gradient of CTC begins
# with memory of any values; what checks values fails, or does nothing.
_HARMLESS = internals.READS | {
    "Assert",
    "CheckNumerics",
    "CheckNumericsV2",
    "DestroyResourceOp",
    "Empty",
    "VarHandleOp",
    "CudnnRNN",
    "CudnnRNNV2",
    "CudnnRNNV3",
    "CudnnRNNBackprop",
    "CudnnRNNBackpropV2",
    "CudnnRNNBackpropV3",
}

# Their sizes follow from values, not only from sizes.
_SIZED_BY_VALUES = {
    "RaggedTensorToTensor",
    "Unique",
    "UniqueV2",
    "Where",
} | _CALLS


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """How graphs are made, and what is cut out of them.

    Attributes:
        jit_compile: Whether XLA compiles what is cut out.
        gradient_dtype: In which gradients of weights are summed; None for that
            of each weight.
        begins_sums: Whether the function that adds to sums of gradients also
            begins them.
    """

    jit_compile: bool = False
    gradient_dtype: str | None = None
    begins_sums: bool = False

    @property
    def of_function(self) -> dict[str, Any]:
        """The arguments of `tf.function`."""
        if self.jit_compile:
            return {"autograph": False, "jit_compile": True}
        # Inlined, the calls would lose their place in the schedule.
        no_inline = {"_noinline": True}
        return {"autograph": False, "experimental_attributes": no_inline}

    def for_xla(self) -> Any:
        """Inside, loops are differentiated as XLA needs it, if it compiles."""
        if self.jit_compile:
            return internals.in_xla()
        return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, eq=False)
class TracedModel:
    """The graph of one run of a model, its loss and metrics.

    Attributes:
        graph: The graph.
        options: How it was made.
        tape: What recorded it; None without training.
        operations: Its operations, in order.
        effects: Those that run for their side effects.
        sections: The calls of layers, in order.
        cells: The cell of each section.
        x: What comes in, flat, None where there is nothing.
        labels: What the loss and the metrics take besides, likewise.
        uses: The weights, by section, as it reads them: those that are trained
            or sent.
        state: The other variables that it reads, and its tensors for them.
        outputs: What the model returns, flat, None where there is nothing.
        attached: For each, what hangs on it, by its name: masks, logits.
        structure: A nest like the outputs.
        losses: Scalars to be minimised, the head's first.
        num_head_losses: How many are the head's.
        counts: What those are to be divided by.
        new_state: The variables that are assigned, and their new values.
        assigned: All values that are, also on the way to the new one.
        normalizations: The batch normalisations whose statistics move at the
            end of the mini-batch.
        moments: For each, its calls' moments, see `MovingStatistics`.
        rules: For each, its calls' rules.
        draws: By the id of a seed, how often it is drawn; None for one that
            got another value than the next one.
    """

    graph: tf.Graph
    options: TraceOptions
    tape: tf.GradientTape | None
    operations: Sequence[tf.Operation]
    effects: Sequence[tf.Operation]
    sections: Sequence[Any]
    cells: Sequence[int]
    x: Sequence[tf.Tensor | None]
    labels: Sequence[tf.Tensor | None]
    uses: Sequence[Any]
    state: Sequence[tuple[keras.Variable, tf.Tensor]]
    outputs: Sequence[tf.Tensor | None]
    attached: Sequence[Mapping[str, tf.Tensor]]
    structure: Nest
    losses: Sequence[tf.Tensor]
    num_head_losses: int
    counts: Sequence[tf.Tensor]
    new_state: Sequence[tuple[keras.Variable, tf.Tensor]]
    assigned: Sequence[tf.Tensor]
    normalizations: Sequence[keras.layers.Layer]
    moments: Sequence[Sequence[Any]]
    rules: Sequence[Sequence[Any]]
    draws: Mapping[int, int | None]

    @property
    def trained_uses(self) -> list[Any]:
        """Those of `uses` that may have a gradient."""
        return [use for use in self.uses if use.is_trained]

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [section.start for section in self.sections]

    @functools.cached_property
    def places(self) -> Mapping[str, int]:
        """The places of the operations, by their names."""
        return {op.name: i for i, op in enumerate(self.operations)}

    def cells_by(self, home: Callable[[Any, int], int | None]) -> list[int]:
        """The cell of each section, if calls have other homes than here."""
        found = [0]
        for section in self.sections[1:]:
            own = home(section.operation, section.call)
            found.append(max(found[-1], own or 0))
        return found

    def section_at(self, place: int) -> int:
        """The number of the section of an operation of the forward pass."""
        return max(0, bisect.bisect_right(self._starts, place) - 1)

    def section_of(self, place: int) -> Any:
        """The section that made an operation of the forward pass."""
        return self.sections[self.section_at(place)]

    def cell_of(self, place: int) -> int:
        """The cell of an operation of the forward pass."""
        return self.cells[self.section_at(place)]

    def operations_for(
        self, rows: int, size: int | None
    ) -> dict[str, tf.Operation] | None:
        """The operations by their names, in a copy for so many rows.

        A graph for any number of rows says little behind operations that turn
        one row into several. Where inputs have sizes, TensorFlow infers all
        others: nothing runs, and no Python of the model.

        Sizes that are not known become `size`, or stay unknown if that is None.
        None if the operations do not take these sizes.
        """
        graph = tf.Graph()
        given = {}
        with graph.as_default(), tf.name_scope("inputs_with_sizes"):
            for tensor in self.x:
                if tensor is None or not tensor.shape.rank:
                    continue
                first, *others = tensor.shape.as_list()
                shape = [first or rows, *(n or size for n in others)]
                given[tensor.name] = tf.compat.v1.placeholder(
                    tensor.dtype, shape
                )
        try:
            with graph.as_default():
                # With what Python said of shapes, by `set_shape`.
                definition = self.graph.as_graph_def(add_shapes=True)
                internals.import_definition(definition, given)
        except Exception:  # no training fails for what it costs
            return None
        return {op.name: op for op in graph.get_operations()}

    def varying(self) -> Callable[[tf.Tensor], bool]:
        """Tells whether a tensor follows from what micro-batches differ in.

        That is their rows, what is assigned, and what is drawn; not the number
        of rows, nor other sizes, if these do not follow from such things.
        """
        assigned = {id(variable) for variable, _ in self.new_state}
        given = [*self.x, *self.labels]
        given += [t for v, t in self.state if id(v) in assigned]
        values = {t.op.name: True for t in given if t is not None}
        sizes = dict.fromkeys(values, False)

        def look(op: tf.Operation) -> None:
            before = [t.op.name for t in op.inputs]
            by_value = any(values[name] for name in before)
            by_size = any(sizes[name] for name in before)
            values.setdefault(
                op.name,
                by_size
                if op.type in SIZES
                else by_value or by_size or internals.is_stateful(op.type),
            )
            is_known = all(
                t.shape.rank is not None and None not in t.shape[1:]
                for t in op.outputs
            )
            sizes.setdefault(
                op.name,
                not is_known and (by_size or _is_sized_by_values(op, values)),
            )

        def varies(tensor: tf.Tensor) -> bool:
            waiting = [tensor.op]
            while waiting:
                op = waiting[-1]
                before = [t.op for t in op.inputs if t.op.name not in values]
                if before and op.name not in values:
                    waiting += before
                else:
                    look(waiting.pop())
            return values[tensor.op.name]

        return varies

    def all_lookups(self) -> list[tuple[tuple[int, int], Any, tf.Operation]]:
        """Where rows of weights are looked up.

        The id of the weight and which of its lookups it is, its use, and the
        operation.
        """
        counts: collections.Counter[int] = collections.Counter()
        found = []
        for use in self.uses:
            key = id(use.variable)
            for op in _lookups(use.tensor):
                found.append(((key, counts[key]), use, op))
                counts[key] += 1
        return found

    @property
    def tables(self) -> list[keras.Variable]:
        """The variables of which rows are looked up, trained or not."""
        found = [use.variable for _, use, _ in self.all_lookups()]
        return found + [v for v, t in self.state if _lookups(t)]

    @property
    def handed_out(self) -> list[tf.Tensor | None]:
        """The outputs, and then all that hangs on them."""
        attached = [t for own in self.attached for t in own.values()]
        return [*self.outputs, *attached]

    @property
    def results(self) -> list[tf.Tensor]:
        """All that the step takes of it."""
        found = [
            *(*self.handed_out, *self.losses, *self.counts),
            *(tensor for _, tensor in self.new_state),
            *tf.nest.flatten(self.moments),
        ]
        return [t for t in found if t is not None]


def _lookups(table: tf.Tensor) -> list[tf.Operation]:
    found = []
    for op in table.consumers():
        if op.type in ("Identity", "Cast"):
            found += _lookups(op.outputs[0])
        elif op.type == "GatherV2" and op.inputs[0] is table:
            found.append(op)
    return found


def _is_sized_by_values(op: tf.Operation, varies: Mapping[str, bool]) -> bool:
    """Returns whether sizes of what it makes may follow from values that vary.

    Those are given as a few whole numbers, such as the end of a slice; `varies`
    says of operations, by their names, whether what they make does.
    """
    found = [t for t in op.inputs if varies[t.op.name]]
    if op.type in _SIZED_BY_VALUES:
        return bool(found)
    return op.type not in ("Gather", "GatherV2", "ResourceGather") and any(
        t.dtype.is_integer and t.shape.rank in (0, 1) for t in found
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Differentiated:
    """A model's graph with the operations that differentiate it.

    Attributes:
        traced: The forward pass.
        dy: Gradients of `TracedModel.handed_out`, which come from outside; None
            where there is none.
        dlosses: Those of the losses, scalars.
        dw: Those of `TracedModel.uses`.
        places: For each operation by its name, the place in the forward pass to
            which it belongs.
        backward: The names of the backward pass's operations.
    """

    traced: TracedModel
    dy: Sequence[tf.Tensor | None]
    dlosses: Sequence[tf.Tensor | None]
    dw: Sequence[Gradient]
    places: Mapping[str, int]
    backward: set[str]


def without_gradients(traced: TracedModel) -> Differentiated:
    """A model that is not differentiated."""
    return Differentiated(
        traced,
        [None] * len(traced.handed_out),
        [None] * len(traced.losses),
        [Gradient()] * len(traced.uses),
        dict(traced.places),
        set(),
    )


def differentiate(
    traced: TracedModel,
    has_gradient: Sequence[bool],
    has_losses: Sequence[bool],
) -> Differentiated:
    """Adds the backward pass to a graph, which must have none yet.

    It is told of all that is handed out, and of each loss, whether it will have
    a gradient.
    """
    graph = traced.graph
    with graph.as_default(), traced.options.for_xla():
        dy = _placeholders(traced.handed_out, has_gradient)
        dlosses = _placeholders(traced.losses, has_losses)
        given = zip([*traced.handed_out, *traced.losses], [*dy, *dlosses])
        pairs = [(t, d) for t, d in given if d is not None]
        sources = [use.tensor for use in traced.uses]
        found: list[tf.Tensor | None] = [None] * len(sources)
        with internals.noting_gradients(graph) as notes:
            if pairs and found and traced.tape is not None:
                check_interruption()
                with _naming(traced, notes):
                    found = traced.tape.gradient(
                        [t for t, _ in pairs], sources, [d for _, d in pairs]
                    )
        dw = [
            _of_lookups(d, use.variable).in_dtype(traced.options.gradient_dtype)
            for d, use in zip(found, traced.uses)
        ]
    _check_gradients(traced)
    places, backward = _placed(traced, notes)
    return Differentiated(traced, dy, dlosses, dw, places, backward)


@contextlib.contextmanager
def _naming(traced: TracedModel, notes: Sequence[Any]) -> Iterator[None]:
    """Says in an error in the gradient of which layer it happened."""
    try:
        yield
    except Exception as error:
        places = traced.places
        if notes and notes[-1].name in places:
            section = traced.section_of(places[notes[-1].name])
            add_note(error, f"In the gradient of {section.words}.")
        raise


def _placeholders(
    tensors: Sequence[tf.Tensor | None], has: Sequence[bool]
) -> list[tf.Tensor | None]:
    return [
        tf.compat.v1.placeholder(t.dtype, t.shape)
        if t is not None and has_one
        else None
        for t, has_one in zip(tensors, has)
    ]


def _of_lookups(gradient: Any, variable: keras.Variable) -> Gradient:
    """Returns what TensorFlow returns as a gradient, its lookups apart."""
    if not isinstance(gradient, tf.IndexedSlices):
        return as_merged(Gradient(gradient), variable)
    found = lookups(gradient)
    slices: dict[tuple[int, ...], tf.IndexedSlices] = {
        (i, 0): part for i, part in enumerate(found)
    }
    return as_merged(Gradient(slices=slices), variable)


def _check_gradients(traced: TracedModel) -> None:
    """Refuses what TensorFlow can differentiate once at a time."""
    new = traced.graph.get_operations()[len(traced.operations) :]
    if any(op.type == "EagerPyFunc" for op in new):
        raise ValueError(
            "Layers must not need the gradient of `tf.py_function`: it is "
            "that of its last call, which another micro-batch may have "
            "made. Received: a layer with such a call, see the warning "
            "above. Use TensorFlow's operations, or `tf.numpy_function` "
            "in a `tf.custom_gradient`."
        )


def _placed(
    traced: TracedModel, notes: Sequence[Any]
) -> tuple[dict[str, int], set[str]]:
    """The place of each operation, and which are of the backward pass."""
    operations = traced.graph.get_operations()
    count = len(traced.operations)
    places = dict(traced.places)
    late = {op.name: op for op in operations[count:]}
    _take_in_late(traced.operations, late, places)
    own: dict[str, int] = {}
    for name, start, end in notes:  # of nested ones, the inner comes first
        place = None if name is None else places.get(name)
        if place is not None:
            for op in operations[start:end]:
                own.setdefault(op.name, place)
    unknown = []
    for name, op in late.items():
        before = [
            places[t.op.name]
            for t in op.inputs
            if t.op.name in late and t.op.name in places
        ]
        if name in own:
            before.append(own[name])
        if before:
            places[name] = min(before)
        else:
            unknown.append(op)
    for op in reversed(unknown):  # where it is taken first
        users = [user for t in op.outputs for user in t.consumers()]
        places[op.name] = max(
            (places[user.name] for user in users if user.name in places),
            default=count - 1,
        )
    return places, set(late)


def _take_in_late(
    operations: Sequence[tf.Operation],
    late: dict[str, tf.Operation],
    places: dict[str, int],
) -> None:
    """Finds what the backward pass has added to the forward pass.

    To differentiate a loop, TensorFlow has the loop itself return more, and
    take lists for that, which are made behind all other operations.
    """
    for op in operations:
        if op.type not in _CALLS:
            continue
        waiting = [t.op for t in op.inputs]
        while waiting:
            found = waiting.pop()
            if late.pop(found.name, None) is not None:
                places[found.name] = places[op.name]
                waiting += [t.op for t in found.inputs]


# ---------------------------------------------------------------- side effects
def stateful_kinds(operations: Sequence[tf.Operation]) -> set[str]:
    """The types of the stateful operations, those in called functions too.

    A branch of a condition and the body of a loop are such functions.
    """
    kinds = {op.type for op in operations}
    calls = [
        op.node_def for op in operations if internals.takes_functions(op.type)
    ]
    if calls:
        library = operations[0].graph.as_graph_def().library.function
        functions = {own.signature.name: own for own in library}
        kinds |= kinds_called(calls, functions)
    return stateful(kinds)


def stateful(kinds: Iterable[str]) -> set[str]:
    """Those of some types of operations that have side effects, or draw."""
    own = {*kinds} - _CALLS - _HARMLESS
    return {kind for kind in own if internals.is_stateful(kind)}


def kinds_called(
    nodes: Iterable[Any], functions: Mapping[str, Any]
) -> set[str]:
    """The types of the operations of all functions that some nodes call.

    `functions` are the definitions of a graph's, by their names.
    """
    kinds: set[str] = set()
    known: set[str] = set()
    waiting = [name for node in nodes for name in functions_of(node)]
    while waiting:
        name = waiting.pop()
        if name not in known and name in functions:
            known.add(name)
            for own in functions[name].node_def:
                kinds.add(own.op)
                waiting += functions_of(own)
    return kinds
