"""One run of a model in one TensorFlow graph, and its backward pass.

Python runs model, loss and metrics once, as Keras does: `TracedModel`. A tape
adds the backward pass to the same graph. What follows only takes that graph
apart, see `parts.py`.

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
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.failures import add_note
from tfgpipe.graphs.cut import SIZES, called_functions
from tfgpipe.graphs.gradient_sums import Gradient, of_tape
from tfgpipe.internals import Nest

# What they do is what the functions do that they call.
_CALLS = set(
    "Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf "
    "StatelessWhile While".split()
)

# Reading a variable or a table has no effect; cuDNN's recurrent kernels are
# stateful for the sake of their dropout, which Keras does not use. What nobody
# needs any more, Python destroys when it comes to it. A gradient of CTC begins
# with memory of any values; what checks values fails, or does nothing.
_HARMLESS = internals.READS | set(
    "Assert CheckNumerics CheckNumericsV2 CudnnRNN CudnnRNNBackprop "
    "CudnnRNNBackpropV2 CudnnRNNBackpropV3 CudnnRNNV2 CudnnRNNV3 "
    "DestroyResourceOp Empty VarHandleOp".split()
)

# Their sizes follow from values, not only from sizes.
_SIZED_BY_VALUES = {"RaggedTensorToTensor", "Unique", "UniqueV2", "Where"}
_SIZED_BY_VALUES |= _CALLS


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """How graphs are made, and what is cut out of them.

    Attributes:
        jit_compile: Whether XLA compiles what is cut out.
        gradient_dtype: In which gradients of weights are summed; None for that
            of each weight.
        begins_sums: Whether the function that adds to sums of gradients also
            begins them, so that XLA compiles one where there would be two.
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


@dataclasses.dataclass(frozen=True, eq=False)
class TracedModel:
    """The graph of one run of a model, its loss and metrics, differentiated.

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
        of_rows: Names of those that see one value of a channel in a row.
        draws: By the id of a seed, how often it is drawn; None for one that
            got another value than the next one.
        places: For each operation by its name, the place in the forward pass to
            which it belongs.
        dw: The gradients of `uses`.
        dy: Gradients of `handed_out`, which come from outside; None where there
            is none.
        dlosses: Those of the losses, scalars.
        backward: The names of the backward pass's operations.
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
    of_rows: Collection[str]
    draws: Mapping[int, int | None]
    places: Mapping[str, int]
    dw: Sequence[Gradient]
    dy: Sequence[tf.Tensor | None] = ()
    dlosses: Sequence[tf.Tensor | None] = ()
    backward: Collection[str] = ()

    @property
    def trained_uses(self) -> list[Any]:
        """Those of `uses` that may have a gradient."""
        return [use for use in self.uses if use.is_trained]

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [section.start for section in self.sections]

    def cells_by(self, home: Callable[[Any, int], int | None]) -> list[int]:
        """The cell of each section, if calls have other homes than here."""
        cells = [0]
        for section in self.sections[1:]:
            cell = home(section.operation, section.call)
            cells.append(max(cells[-1], cell or 0))
        return cells

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
        self, rows: int, size: int = 1
    ) -> dict[str, tf.Operation]:
        """The operations by their names, in a copy for so many rows.

        A graph for any number of rows says little behind operations that turn
        one row into several. Where inputs have sizes, TensorFlow infers all
        others: nothing runs, and no Python of the model.

        Other sizes that are not known become `size`, or stay unknown if the
        operations do not take that; none if they do not take the rows either.
        """
        # With what Python said of shapes, by `set_shape`.
        definition = self.graph.as_graph_def(add_shapes=True)
        x = [t for t in self.x if t is not None and t.shape.rank]
        for other in (size, None):
            graph = tf.Graph()
            given = {}
            try:
                with graph.as_default():
                    for t in x:
                        first, *others = t.shape.as_list()
                        shape = [first or rows, *(n or other for n in others)]
                        with tf.name_scope("inputs_with_sizes"):
                            given[t.name] = tf.compat.v1.placeholder(
                                t.dtype, shape
                            )
                    internals.import_definition(definition, given)
            except Exception:  # no training fails for what it costs
                continue
            return {op.name: op for op in graph.get_operations()}
        return {}

    def varying(self) -> Callable[[tf.Tensor], bool]:
        """Tells whether a tensor follows from what micro-batches differ in.

        That is their rows, what is assigned, and what is drawn; not the number
        of rows, nor other sizes, if these do not follow from such things.
        """
        assigned = {id(variable) for variable, _ in self.new_state}
        given = [*self.x, *self.labels]
        given += [t for v, t in self.state if id(v) in assigned]
        starts = {t.op.name for t in given if t is not None}
        values: dict[str, bool] = {}
        sizes: dict[str, bool] = {}
        for op in self.graph.get_operations():
            before = [t.op.name for t in op.inputs]
            by_size = any(sizes.get(name) for name in before)
            by_value = any(values.get(name) for name in before)
            by_value |= by_size or internals.is_stateful(op.type)
            values[op.name] = by_size if op.type in SIZES else by_value
            is_known = all(
                t.shape.rank is not None and None not in t.shape[1:]
                for t in op.outputs
            )
            sizes[op.name] = not is_known and (
                by_size or _is_sized_by_values(op, values)
            )
            if op.name in starts:
                values[op.name], sizes[op.name] = True, False
        return lambda tensor: values[tensor.op.name]

    def all_lookups(self) -> list[tuple[tuple[int, int], Any, tf.Operation]]:
        """Where rows of weights are looked up.

        The id of the weight and which of its lookups it is, its use, and the
        operation.
        """
        counts: collections.Counter[int] = collections.Counter()
        lookups = []
        for use in self.uses:
            key = id(use.variable)
            for op in _lookups(use.tensor):
                lookups.append(((key, counts[key]), use, op))
                counts[key] += 1
        return lookups

    @property
    def tables(self) -> list[keras.Variable]:
        """The variables of which rows are looked up, trained or not."""
        trained = [use.variable for _, use, _ in self.all_lookups()]
        return trained + [v for v, t in self.state if _lookups(t)]

    @property
    def handed_out(self) -> list[tf.Tensor | None]:
        """The outputs, and then all that hangs on them."""
        attached = [[*tensors.values()] for tensors in self.attached]
        return [*self.outputs, *itertools.chain(*attached)]

    @property
    def results(self) -> list[tf.Tensor]:
        """All that the step takes of it."""
        results = [*self.handed_out, *self.losses, *self.counts]
        results += [tensor for _, tensor in self.new_state]
        results += tf.nest.flatten(self.moments)
        return [t for t in results if t is not None]


def _lookups(table: tf.Tensor) -> list[tf.Operation]:
    lookups = []
    for op in table.consumers():
        if op.type in ("Identity", "Cast"):
            lookups += _lookups(op.outputs[0])
        elif op.type == "GatherV2" and op.inputs[0] is table:
            lookups.append(op)
    return lookups


def _is_sized_by_values(op: tf.Operation, varies: Mapping[str, bool]) -> bool:
    """Returns whether sizes of what it makes may follow from values that vary.

    Those are given as a few whole numbers, such as the end of a slice; `varies`
    says of operations, by their names, whether what they make does.
    """
    varying = [t for t in op.inputs if varies.get(t.op.name)]
    if op.type in _SIZED_BY_VALUES:
        return bool(varying)
    return op.type not in ("Gather", "GatherV2", "ResourceGather") and any(
        t.dtype.is_integer and t.shape.rank in (0, 1) for t in varying
    )


def differentiate(
    traced: TracedModel,
    has_gradient: Sequence[bool],
    has_losses: Sequence[bool],
) -> TracedModel:
    """Adds the backward pass to a graph, which must have none yet.

    It is told of all that is handed out, and of each loss, whether it will have
    a gradient.
    """
    graph = traced.graph
    # Loops are differentiated as XLA needs it.
    compiled = traced.options.jit_compile
    for_xla = internals.in_xla() if compiled else contextlib.nullcontext()
    with graph.as_default(), for_xla:
        dy = _placeholders(traced.handed_out, has_gradient)
        dlosses = _placeholders(traced.losses, has_losses)
        given = zip([*traced.handed_out, *traced.losses], [*dy, *dlosses])
        pairs = [(t, d) for t, d in given if d is not None]
        sources = [use.tensor for use in traced.uses]
        gradients: list[Any] = [None] * len(sources)
        with internals.noting_gradients(graph) as notes:
            if pairs and sources and traced.tape is not None:
                try:
                    gradients = traced.tape.gradient(
                        [t for t, _ in pairs], sources, [d for _, d in pairs]
                    )
                except Exception as error:
                    name = notes[-1][0] if notes else None
                    if name is not None and name in traced.places:
                        words = traced.section_of(traced.places[name]).words
                        add_note(error, f"In the gradient of {words}.")
                    raise
        dw = [
            of_tape(d, use.variable, traced.options.gradient_dtype)
            for d, use in zip(gradients, traced.uses)
        ]
    late = graph.get_operations()[len(traced.operations) :]
    if any(op.type == "EagerPyFunc" for op in late):
        raise ValueError(
            "Layers must not need the gradient of `tf.py_function`. Use "
            "TensorFlow, or `tf.numpy_function` in a `tf.custom_gradient`."
        )
    places, backward = _placed(traced, notes)
    return dataclasses.replace(
        traced, places=places, dw=dw, dy=dy, dlosses=dlosses, backward=backward
    )


def _placeholders(
    tensors: Sequence[tf.Tensor | None], has: Sequence[bool]
) -> list[tf.Tensor | None]:
    return [
        tf.compat.v1.placeholder(t.dtype, t.shape)
        if t is not None and has_one
        else None
        for t, has_one in zip(tensors, has)
    ]


def _placed(
    traced: TracedModel, notes: Sequence[Any]
) -> tuple[dict[str, int], set[str]]:
    """The place of each operation, and which are of the backward pass."""
    operations = traced.graph.get_operations()
    count = len(traced.operations)
    places = dict(traced.places)
    late = {op.name: op for op in operations[count:]}
    # To differentiate a loop, TensorFlow has the loop itself return more, and
    # take lists for that, which are made behind all other operations.
    for op in traced.operations:
        if op.type in _CALLS:
            new = internals.ancestors(
                op.inputs, lambda t: t.op.name not in late
            )
            for name in new:
                del late[name]
                places[name] = places[op.name]
    noted: dict[str, int] = {}
    for name, start, end in notes:  # of nested ones, the inner comes first
        if name is not None and name in places:
            for op in operations[start:end]:
                noted.setdefault(op.name, places[name])
    unknown = []
    for name, op in late.items():
        makers = [t.op.name for t in op.inputs if t.op.name in late]
        before = [places[maker] for maker in makers if maker in places]
        if name in noted:
            before.append(noted[name])
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


# ---------------------------------------------------------------- side effects
def stateful_kinds(
    operations: Sequence[tf.Operation],
    functions: Mapping[str, Any] | None = None,
) -> set[str]:
    """The types of the operations that have side effects, or draw.

    Those in called functions too, such as a branch of a condition and the body
    of a loop. `functions` are the definitions of the graph's, by their names.
    """
    kinds = {op.type for op in operations}
    calls = [
        op.node_def for op in operations if internals.takes_functions(op.type)
    ]
    if calls and functions is None:
        library = operations[0].graph.as_graph_def().library.function
        functions = {function.signature.name: function for function in library}
    for function in called_functions(calls, functions or {}).values():
        kinds |= {node.op for node in function.node_def}
    return {
        kind
        for kind in kinds - _CALLS - _HARMLESS
        if internals.is_stateful(kind)
    }
