"""A layer by itself, run as the pipeline runs it, and timed.

The model is traced, differentiated and cut as a pipeline of as many cells as
there are layers. The tasks of one of them run on one device one after the
other, and all of them again:

    forward -> recompute -> backward -> its two halves -> forward -> ...

Between two of them others are read that do not fit into a cache, as the other
layers of a cell come in between; what comes from the task before is read last:

    forward -> others -> inputs -> recompute -> others -> inputs, dy -> backward

Weights, state and inputs are arguments: nothing is assigned, and no variable
needs storage.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import (
    Cell,
    CellTasks,
    Head,
    ModelCall,
    tasks_of,
    trace_cells,
    unanalysed,
)
from tfgpipe.costs import Placed, kept_sizes, memory_of_steps
from tfgpipe.devices import placement
from tfgpipe.graphs import (
    Indices,
    TraceOptions,
    Values,
    alive,
    by_reference,
    differentiate,
    is_continuous,
    tensors,
)
from tfgpipe.internals import Nest
from tfgpipe.run import Chain, Clock, ReadyTask
from tfgpipe.schedules import CellFacts, Task

_FORWARD = ("forward", "recompute", "recompute_last")

# How often all tasks run in a call; the first time warms up.
_TURNS = 4


class LayersAlone:
    """The layers of a model as cells, for micro-batches of one size.

    Behind them is a cell for the loss, or what else follows.

    Attributes:
        tasks: The tasks of each.
        first: The first of them that is trained.
        live: The tensors that are alive before each.
    """

    def __init__(
        self,
        placed: Placed,
        x: Nest,
        device: str,
        jit_compile: bool,
        head: Head | None = None,
        labels: Nest = None,
    ):
        self._device = device
        count = len(placed.layers) + 1
        cells = [Cell(k, [], (device,)) for k in range(count)]
        model = ModelCall(
            placed.source.call,
            placed.source.layers,
            training=True,
            is_split=True,
            head=head,
            home=placed.home,
            around=lambda layer, k: cells[k].naming(layer),
            num_cells=count,
        )
        # What random numbers a recomputation draws is for `GPipe` to judge.
        traced = trace_cells(
            model,
            cells,
            _specs(x),
            _specs(labels),
            [False] * len(cells),
            TraceOptions(jit_compile),
        )
        ends = [head is None and is_continuous(t) for t in traced.handed_out]
        differentiated = differentiate(
            traced, ends, [True] * len(traced.losses)
        )
        unknown: list[list[Indices]] = [[] for _ in traced.uses]
        self.tasks = tasks_of(differentiated, cells, unknown)
        parts = [tasks.part for tasks in self.tasks]
        self.live = alive(parts)
        trained = (k for k, part in enumerate(parts) if part.uses)
        self.first = next(trained, len(parts))
        self._variables = {t.ref(): v for v, t in traced.state}
        self.start = by_reference(
            [*traced.x, *traced.labels], tree.flatten([x, labels])
        )
        self._rows = next(t.shape[0] for t in traced.x if t is not None)

    def is_empty(self, k: int) -> bool:
        """Returns whether a layer computes nothing."""
        return not self.tasks[k].part.forward_outputs

    def alike(self, k: int) -> Hashable:
        """Returns a key that equal layers in equal places share."""
        return self.is_empty(k) or (
            id(self.tasks[k].functions),
            (k > self.first) - (k < self.first),
        )

    def alone(self, k: int, others: tf.Tensor | None) -> LoneLayer:
        """Returns a layer by itself, see `LoneLayer`."""
        tasks = self.tasks[k]
        facts = tasks.facts(k >= self.first, k > self.first)
        return LoneLayer(tasks, facts, self._device, others)

    def values(self, k: int, known: Values) -> LayerValues:
        """Returns the values that a layer is computed from.

        `known` are values by the references of the graph's tensors.
        """
        part = self.tasks[k].part
        inputs, state = part.inputs, part.state
        variables = [use.variable for use in part.uses]
        variables += [self._variables[t.ref()] for t in state]
        with tf.device(self._device):
            values = start_values(variables)
            back = [
                known[t.ref()] if t.ref() in known else self._ones(t)
                for t in part.gradient_inputs
            ]
        count = len(part.uses)
        by_state = by_reference(state, values[count:])
        return LayerValues(
            [known[t.ref()] for t in inputs],
            [(known | by_state)[t.ref()] for t in part.forward_inputs],
            values[:count],
            back,
        )

    def _ones(self, like: tf.Tensor) -> tf.Tensor:
        shape = [self._rows if n is None else n for n in like.shape]
        return tf.ones(shape, like.dtype)

    def behind(
        self, k: int, known: Values, outputs: Sequence[tf.Tensor]
    ) -> Values:
        """Returns the values that are known behind a layer."""
        known = known | by_reference(
            self.tasks[k].part.forward_outputs, outputs
        )
        later = [tasks.part for tasks in self.tasks[k + 1 :]]
        taken = {
            t.ref()
            for p in later
            for t in [*p.forward_inputs, *p.gradient_inputs]
        }
        return {ref: value for ref, value in known.items() if ref in taken}

    def output_bytes(self, k: int) -> int:
        """Returns the bytes of what is alive behind a layer."""
        return _bytes(self.live[k + 1])

    @functools.cached_property
    def kept_bytes(self) -> list[int]:
        """The bytes that each layer makes and a backward pass takes."""
        memory = memory_of_steps([tasks.part for tasks in self.tasks])
        return [*map(sum, kept_sizes(memory))]


class LoneLayer:
    """The tasks of a layer, for micro-batches of one size.

    `facts` follow from its place in the model; `others` is a tensor on the
    device that is read between two tasks, or None.
    """

    def __init__(
        self,
        tasks: CellTasks,
        facts: CellFacts,
        device: str,
        others: tf.Tensor | None = None,
    ):
        self._tasks = tasks
        self._facts = facts
        self._device = device
        self._others = others
        self._is_of_weights = any(
            d.dense is not None or d.slices for d in tasks.part.dw
        )
        self._kinds: list[str] = []
        self._timed = AsWritten(self._run)
        self._outputs = AsWritten(self._forward)

    def outputs(self, values: LayerValues) -> list[tf.Tensor]:
        """Computes the outputs of the layer."""
        return self._outputs(values)

    def seconds(self, values: LayerValues) -> dict[str, list[float]]:
        """Runs all tasks some times: what each took, by its kind."""
        # (2 x tasks): start and end of each, in the order of `_kinds`.
        times = self._timed(values, self._others)[0].numpy()
        by_kind = collections.defaultdict(list)
        for kind, start, end in zip(self._kinds, times[::2], times[1::2]):
            by_kind[kind].append(float(end - start))
        if self._tasks.functions.options.jit_compile and "recompute" in by_kind:
            # It is part of the backward task, and as long for every layer.
            by_kind["recompute_last"] = by_kind["recompute"]
        return {kind: samples[1:] for kind, samples in by_kind.items()}

    def _known(self, values: LayerValues) -> tuple[Values, Any]:
        """Values by tensors of the graph, and the packed weights."""
        tasks, part = self._tasks, self._tasks.part
        weights = [
            tf.cast(value, dtype)
            for value, dtype in zip(values.weights, tasks.weight_dtypes)
        ]
        inputs = values.forward_inputs
        if not tasks.functions.options.jit_compile:
            inputs = unanalysed(inputs)
        return {
            **by_reference(part.forward_inputs, inputs),
            **by_reference(part.gradient_inputs, values.gradient_inputs),
        }, tasks.pack_weights(weights)

    def _forward(self, values: LayerValues) -> list[tf.Tensor]:
        with tf.device(self._device):
            known = self._known(values)
            outputs, _ = self._tasks.forward(*known, keeps=False)()
        return [outputs[t.ref()] for t in self._tasks.part.forward_outputs]

    def _run(
        self, values: LayerValues, others: tf.Tensor | None
    ) -> list[tf.Tensor]:
        """Runs all tasks some times; returns when each started and ended."""
        clock = Clock()
        chain = Chain(clock)

        def run(kind: str, work: Any) -> Any:
            if work is None:
                return None
            taken = values.inputs
            if kind not in _FORWARD:
                taken = [*taken, *values.gradient_inputs]
            if others is not None:
                self._touch(chain, [others, *taken])
            task = Task(kind, 0, 0)
            return chain.run(ReadyTask(task, self._device, [], work))

        with tf.device(self._device):
            known = self._known(values)
            sums: dict[str, Any] = {}
            for _ in range(_TURNS):
                self._turn(run, known, sums)
        self._kinds = [task.kind for task, _ in clock.tasks]
        with tf.device("CPU:0"):
            return [tf.stack(clock.times)]

    def _touch(self, chain: Chain, values: list[tf.Tensor]) -> None:
        """Reads tensors after the last task, one after the other."""
        before = chain.last_op.get(self._device)
        for value in values if before is not None else ():
            if value.dtype.is_floating:
                with tf.control_dependencies([before]):
                    before = tf.reduce_sum(value).op
        chain.last_op[self._device] = before

    def _turn(
        self,
        run: Callable[[str, Any], Any],
        known: tuple[Values, Any],
        sums: dict[str, Any],
    ) -> None:
        """Runs each task once."""
        tasks = self._tasks
        _, kept = run("forward", tasks.forward(*known, keeps=False))
        facts = self._facts
        if not facts.has_backward:
            return
        if tasks.functions.can_be_split:
            _, again = run("recompute", tasks.forward(*known, keeps=True))
            if facts.recomputes:
                again = run("recompute_last", tasks.recompute(*known, kept))
            kept = kept if again is None else again
        if not (tasks.part.gradient_outputs or self._is_of_weights):
            return
        run("backward_first", tasks.backward(*known, kept, None, 0))
        work = tasks.backward(*known, kept, sums.get("backward"), 0)
        _, sums["backward"] = run("backward", work)
        if not facts.has_halves:
            return
        _, kept = run("input_gradient", tasks.input_gradient(*known, kept))
        if self._is_of_weights:
            work = tasks.backward(*known, kept, sums.get("halves"), 0, False)
            _, sums["halves"] = run("weight_gradient", work)


def _specs(nest: Nest) -> Any:
    """Shapes and dtypes."""
    return tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), nest
    )


def _bytes(some: Sequence[tf.Tensor]) -> int:
    """Adds up the bytes of tensors whose shapes are known."""
    known = [
        t for t in some if t.dtype != tf.variant and t.shape.is_fully_defined()
    ]
    return sum(placement.tensor_bytes(t) for t in known)


class LayerValues(NamedTuple):
    """The values that a layer is computed from.

    Attributes:
        inputs: What crosses into it.
        forward_inputs: For each of `Part.forward_inputs`: inputs, and state.
        weights: Values of the trainable variables.
        gradient_inputs: For each of `Part.gradient_inputs`.
    """

    inputs: list[tf.Tensor]
    forward_inputs: list[tf.Tensor]
    weights: list[tf.Tensor]
    gradient_inputs: list[tf.Tensor]


def start_values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Returns the values of variables, or those with which they would start.

    On the current device, without a draw from what others draw from.
    """
    waiting = [v for v in variables if not internals.is_created(v)]
    drawn: dict[int, tf.Tensor] = {}
    if waiting:

        def draw() -> list[tf.Tensor]:
            return [internals.initial_value(v) for v in waiting]

        results = tf.function(draw, autograph=False).get_concrete_function()()
        drawn = {id(v): value for v, value in zip(waiting, results)}
    return [
        drawn[id(v)] if id(v) in drawn else placement.read_variable(v)
        for v in variables
    ]


class AsWritten:
    """Calls a function, which TensorFlow's graph optimiser leaves as it is.

    It would take out tasks whose results are not used. The function is not
    inlined into its caller, which the optimiser does change. It takes tensors
    in nests, returns a flat list of tensors, and captures none.
    """

    def __init__(self, function: Callable):
        self._function = function
        self._concrete: Any = None

    def __call__(self, *arguments: Any) -> list[tf.Tensor]:
        """Calls the function; traces it in the first call."""
        if self._concrete is None:
            self._concrete = self._made(arguments)
        return self._concrete(*tensors(arguments))

    def _made(self, arguments: Any) -> Any:
        specs = _specs(arguments)
        inner = tf.function(
            self._function,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )
        call = internals.FunctionCall(
            inner.get_concrete_function(*specs), as_written=True
        )
        outer = tf.function(lambda *flat: call(list(flat)), autograph=False)
        return outer.get_concrete_function(*tensors(specs))
