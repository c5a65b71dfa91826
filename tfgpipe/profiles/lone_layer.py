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
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.cells import (
    Cell,
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
from tfgpipe.profiles.profile_record import (
    MEASURED,
    Spread,
    TaskSeconds,
)
from tfgpipe.run import Chain, Clock
from tfgpipe.schedules import Task

_FORWARD = ("forward", "recompute", "recompute_last")

# How often all tasks run in a call; the first time warms up.
_TURNS = 4


# More than what an accelerator's caches hold.
_CACHE_BYTES = 64 * 2**20


_MOST_CALLS = 40


class LayersAlone:
    """The layers of a model as cells, for micro-batches of one size.

    Behind them is a cell for the loss, or what else follows. They are measured
    one after the other, on what those before have made of the data.

    Attributes:
        device: Where they run.
        tasks: The tasks of each.
        first: The first of them that is trained.
    """

    def __init__(
        self,
        placed: Placed,
        data: tuple[Nest, Nest],
        device: str,
        jit_compile: bool,
        head: Head | None = None,
    ):
        self.device = device
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
            _specs(data[0]),
            _specs(data[1]),
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
        self._live = alive(parts)
        trained = (k for k, part in enumerate(parts) if part.uses)
        self.first = next(trained, len(parts))
        self._variables = {t.ref(): v for v, t in traced.state}
        # By what layers have in common that are measured once.
        self._timed: dict[Hashable, tuple[LoneLayer, dict[str, Spread]]] = {}
        # By the references of the graph's tensors.
        self._known: Values = by_reference(
            [*traced.x, *traced.labels], tree.flatten(data)
        )
        self._rows = next(t.shape[0] for t in traced.x if t is not None)
        # What others use between two tasks: weights, unless single rows of them
        # are looked up, outputs, and the gradients of both.
        weights = sum(
            placement.tensor_bytes(use.variable)
            for part in parts
            for use, gradient in zip(part.uses, part.dw)
            if not gradient.slices
        )
        others = 2 * (weights + sum(map(self._output_bytes, range(count - 1))))
        with tf.device(device):
            self._others = tf.zeros([min(others, _CACHE_BYTES) // 4])

    def num_kinds(self, count: int) -> int:
        """Returns how many of the first layers are to be measured."""
        return len({*map(self._kind, range(count))} - {None})

    def _kind(self, k: int) -> Hashable:
        """Returns what equal layers in equal places share; None for no task."""
        if not self.tasks[k].part.forward_outputs:
            return None
        return id(self.tasks[k].functions), (k > self.first) - (k < self.first)

    def measured(
        self, k: int, seconds: float, call_seconds: float
    ) -> TaskSeconds:
        """Measures the next layer, for some time; then others may follow."""
        kind, outputs = self._kind(k), []
        spreads: dict[str, Any] = dict.fromkeys(MEASURED)
        spreads["forward"] = Spread(*[call_seconds] * 3)
        if kind is not None:
            values = self.values(k)
            if kind not in self._timed:
                layer = LoneLayer(self, k, values)
                self._timed[kind] = layer, layer.sampled(values, seconds)
            layer, measured = self._timed[kind]
            spreads |= measured
            outputs = layer.outputs(values)
        self._go_on(k, outputs)
        return TaskSeconds(
            self._rows, self._output_bytes(k), self._kept_bytes[k], **spreads
        )

    def values(self, k: int) -> LayerValues:
        """Returns the values that a layer is computed from."""
        part, known = self.tasks[k].part, self._known
        variables = [use.variable for use in part.uses]
        count = len(variables)
        variables += [self._variables[t.ref()] for t in part.state]
        with tf.device(self.device):
            values = start_values(variables)
            back = [
                known[t.ref()] if t.ref() in known else self._ones(t)
                for t in part.gradient_inputs
            ]
        known = known | by_reference(part.state, values[count:])
        return LayerValues(
            self._others,
            [known[t.ref()] for t in part.inputs],
            [known[t.ref()] for t in part.forward_inputs],
            values[:count],
            back,
        )

    def _ones(self, like: tf.Tensor) -> tf.Tensor:
        shape = [self._rows if n is None else n for n in like.shape]
        return tf.ones(shape, like.dtype)

    def _go_on(self, k: int, outputs: Sequence[tf.Tensor]) -> None:
        """Goes on behind a layer, which has made these outputs."""
        part = self.tasks[k].part
        known = self._known | by_reference(part.forward_outputs, outputs)
        taken = {
            t.ref()
            for tasks in self.tasks[k + 1 :]
            for t in [*tasks.part.forward_inputs, *tasks.part.gradient_inputs]
        }
        self._known = {ref: v for ref, v in known.items() if ref in taken}

    def _output_bytes(self, k: int) -> int:
        """Returns the bytes of what is alive behind a layer."""
        return sum(
            placement.tensor_bytes(t)
            for t in self._live[k + 1]
            if t.dtype != tf.variant and t.shape.is_fully_defined()
        )

    @functools.cached_property
    def _kept_bytes(self) -> list[int]:
        """The bytes that each layer makes and a backward pass takes."""
        memory = memory_of_steps([tasks.part for tasks in self.tasks])
        return [*map(sum, kept_sizes(memory))]


class LoneLayer:
    """The tasks of a layer, for micro-batches of one size."""

    def __init__(self, model: LayersAlone, k: int, values: LayerValues):
        self._model = model
        self._tasks = model.tasks[k]
        self._facts = self._tasks.facts(k >= model.first, k > model.first)
        self._is_of_weights = any(
            d.dense is not None or d.slices for d in self._tasks.part.dw
        )
        self._kinds: list[str] = []
        self._timed = as_written(self._run, values)
        self._outputs = as_written(self._forward, values)

    def outputs(self, values: LayerValues) -> list[tf.Tensor]:
        """Computes the outputs of the layer."""
        results: list[tf.Tensor] = self._outputs(*tensors(values))
        return results

    def sampled(self, values: LayerValues, seconds: float) -> dict[str, Spread]:
        """Measures tasks for some time, by kind."""
        self._seconds(values)  # traces and compiles
        by_kind: dict[str, list[float]] = collections.defaultdict(list)
        start = time.perf_counter()
        for _ in range(_MOST_CALLS):
            for kind, samples in self._seconds(values).items():
                by_kind[kind] += samples
            if time.perf_counter() - start >= seconds:
                break
        return {kind: _spread(own) for kind, own in by_kind.items()}

    def _seconds(self, values: LayerValues) -> dict[str, list[float]]:
        """Runs all tasks some times: what each took, by its kind."""
        # (2 x tasks): start and end of each, in the order of `_kinds`.
        times = self._timed(*tensors(values))[0].numpy()
        by_kind = collections.defaultdict(list)
        for kind, start, end in zip(self._kinds, times[::2], times[1::2]):
            by_kind[kind].append(float(end - start))
        if self._tasks.functions.options.jit_compile and "recompute" in by_kind:
            # It is part of the backward task, and as long for every layer.
            by_kind["recompute_last"] = by_kind["recompute"]
        return {kind: samples[1:] for kind, samples in by_kind.items()}

    def _known(self, values: LayerValues) -> Values:
        """Values by tensors of the graph, and the packed weights."""
        tasks, part = self._tasks, self._tasks.part
        packed = tasks.functions.weights
        dtypes = [t.dtype for t in packed.tensors]
        taken = values.forward_inputs
        if not tasks.functions.options.jit_compile:
            taken = unanalysed(taken)
        known = by_reference(part.forward_inputs, taken)
        known |= by_reference(part.gradient_inputs, values.gradient_inputs)
        known[packed] = packed.pack([*map(tf.cast, values.weights, dtypes)])
        return known

    def _forward(self, values: LayerValues) -> list[tf.Tensor]:
        with tf.device(self._model.device):
            known = self._known(values)
            outputs, _ = self._tasks.forward(known, keeps=False)()
        return [outputs[t.ref()] for t in self._tasks.part.forward_outputs]

    def _run(self, values: LayerValues) -> list[tf.Tensor]:
        """Runs all tasks some times; returns when each started and ended."""
        clock = Clock()
        chain = Chain(clock)
        device = self._model.device

        def run(kind: str, work: Any) -> Any:
            if work is None:
                return None
            read = [values.others, *values.inputs]
            if kind not in _FORWARD:
                read += values.gradient_inputs
            # They are read after the last task, one after the other.
            before = chain.last_op.get(device)
            for value in read if before is not None else ():
                if value.dtype.is_floating:
                    with tf.control_dependencies([before]):
                        before = tf.reduce_sum(value).op
            chain.last_op[device] = before
            return chain.run(Task(kind, 0, 0), device, [], work)

        with tf.device(device):
            known = self._known(values)
            sums: dict[str, Any] = {}
            for _ in range(_TURNS):
                self._turn(run, known, sums)
        self._kinds = [task.kind for task, _ in clock.tasks]
        with tf.device("CPU:0"):
            return [tf.stack(clock.times)]

    def _turn(
        self,
        run: Callable[[str, Any], Any],
        known: Values,
        sums: dict[str, Any],
    ) -> None:
        """Runs each task once."""
        tasks = self._tasks
        _, kept = run("forward", tasks.forward(known, keeps=False))
        facts = self._facts
        if not facts.has_backward:
            return
        if tasks.functions.can_be_split:
            _, again = run("recompute", tasks.forward(known, keeps=True))
            if facts.recomputes:
                again = run("recompute_last", tasks.recompute(known, kept))
            kept = kept if again is None else again
        if not (tasks.part.gradient_outputs or self._is_of_weights):
            return
        run("backward_first", tasks.backward(known, kept, None, 0))
        work = tasks.backward(known, kept, sums.get("backward"), 0)
        _, sums["backward"] = run("backward", work)
        if not facts.has_halves:
            return
        _, kept = run("input_gradient", tasks.input_gradient(known, kept))
        if self._is_of_weights:
            work = tasks.backward(known, kept, sums.get("halves"), 0, False)
            _, sums["halves"] = run("weight_gradient", work)


def _specs(nest: Nest) -> Any:
    """Shapes and dtypes."""
    return tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), nest
    )


def _spread(samples: list[float]) -> Spread:
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high)


class LayerValues(NamedTuple):
    """The values that a layer is computed from.

    Attributes:
        others: A tensor on the device that is read between two tasks.
        inputs: What crosses into it.
        forward_inputs: For each of `Part.forward_inputs`: inputs, and state.
        weights: Values of the trainable variables.
        gradient_inputs: For each of `Part.gradient_inputs`.
    """

    others: tf.Tensor
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


def as_written(function: Callable, values: LayerValues) -> Any:
    """Traces a function, which TensorFlow's graph optimiser leaves as it is.

    It would take out tasks whose results are not used. The function is not
    inlined into its caller, which the optimiser does change.
    """
    specs = _specs(values)
    inner = tf.function(
        function,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )
    call = internals.FunctionCall(inner.get_concrete_function(specs))
    outer = tf.function(lambda *flat: call(list(flat)), autograph=False)
    return outer.get_concrete_function(*tensors(specs))
