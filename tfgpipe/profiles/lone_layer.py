"""A layer by itself, run as the pipeline runs it, and timed.

The step is made a cell by itself, whose tasks are traced, differentiated and
cut out as a pipeline's are. On one device they run one after the other, and all
of them again:

    forward -> recompute -> backward -> its two halves -> forward -> ...

Between two of them others are read that do not fit into a cache, as the other
layers of a cell come in between; what comes from the task before is read last:

    forward -> others -> inputs -> recompute -> others -> inputs, dy -> backward

Weights, state and inputs are arguments: nothing is assigned, and no variable
needs storage.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.boundary import Boundary, is_continuous
from tfgpipe.cells import Cell, LayerCall, ModelCall, Tracer
from tfgpipe.costs import behind_identities
from tfgpipe.devices import placement
from tfgpipe.graphs import (
    by_reference,
    differentiate,
    tensors,
    without_gradients,
)
from tfgpipe.run import Chain, Clock
from tfgpipe.schedules import Task

_FORWARD = ("forward", "recompute", "recompute_last")

# How often all tasks run in a call; the first time warms up.
_TURNS = 4


class LoneLayer:
    """The tasks of a step, for micro-batches of one size.

    Args:
        step: The step. Its layer is built.
        inputs: What crosses into it: tensors, or their specs.
        structure: A nest like its inputs.
        place: Where it is in the model.
        device: Where it runs.
        jit_compile: Whether XLA compiles its tasks.
        others: What is read between two tasks, a tensor there, or None.
        head: The loss, computed behind it, or None.
        labels: What that takes: specs.

    Attributes:
        weights: The trainable variables, those of others that it reads among
            them.
        state: All other variables.
        structure: A nest like its outputs.
    """

    def __init__(
        self,
        step: LayerCall,
        inputs: Boundary,
        structure: Any,
        place: GradientNeeds,
        device: str,
        jit_compile: bool,
        others: tf.Tensor | None = None,
        head: Any = None,
        labels: Any = None,
    ):
        self._place = place
        self._device = device
        self._others = others
        self._tracer = Tracer(jit_compile)

        def call(x: Any, training: bool) -> Any:
            return step(Boundary(*x).nest(structure), training)

        model = ModelCall(
            call,
            [step.layer],
            training=True,
            head=head,
            is_split=True,
            synchronizes=False,
            home=lambda *_: 0,
            around=lambda *_: contextlib.nullcontext(),
            num_cells=1,
            watches_x=place.needs_dx,
            trains_others=True,
        )
        x, y = _specs(inputs), _specs(labels)
        # What random numbers a recomputation draws is for `GPipe` to judge.
        cells = [Cell(0, [step], [device])]
        traced = self._tracer.trace(model, cells, x, y, [False])
        made = without_gradients(traced)
        if place.differentiates:
            has_gradient = [
                is_continuous(t) and head is None for t in traced.handed_out
            ]
            has_losses = [True] * len(traced.losses)
            made = differentiate(traced, has_gradient, has_losses)
        self._made = made
        repeated: list[list[bool]] = [[] for _ in traced.uses]
        self._tasks = self._tracer.tasks(made, cells, repeated)[0]
        part = self._tasks.part
        self.weights = [use.variable for use in part.uses]
        self.state = [variable for variable, _ in traced.state]
        self.structure = traced.structure
        own = {id(v) for v in step.layer.variables}
        read = {id(v) for v in [*self.weights, *self.state]}
        self.is_by_itself = read <= own
        self._is_of_weights = any(
            d.dense is not None or d.slices for d in part.dw
        )
        self._kinds: list[str] = []
        self._read: set[Any] = set()  # what gradients are computed from
        self._timed = AsWritten(self._run)
        self._outputs = AsWritten(self._forward)

    @property
    def output_bytes(self) -> int:
        """Of the outputs."""
        return _bytes(self._made.traced.handed_out)

    @property
    def kept(self) -> KeptParts:
        """What the backward pass needs of the forward pass."""
        if not self._place.differentiates:
            return KeptParts(0, 0, 0)
        cut, traced = self._tasks.graph, self._made.traced
        found = {t.ref() for t in map(behind_identities, cut.kept.tensors)}
        outputs = [t for t in traced.outputs if t is not None]
        made = {behind_identities(t).ref() for t in outputs}
        given = {t.ref() for t in tensors(traced.x)}
        return KeptParts(
            _bytes([ref.deref() for ref in given & self._read]),
            _bytes([ref.deref() for ref in found & made]),
            _bytes([ref.deref() for ref in found - made]),
        )

    def outputs(self, values: LayerValues) -> Boundary:
        """What the step returns."""
        traced = self._made.traced
        results = iter(self._outputs(values))
        flat = [None if t is None else next(results) for t in traced.handed_out]
        attached = iter(flat[len(traced.outputs) :])
        found = [{n: next(attached) for n in own} for own in traced.attached]
        masks = [internals.mask_of(own) for own in found]
        return Boundary(flat[: len(traced.outputs)], masks)

    def seconds(self, values: LayerValues) -> dict[str, list[float]]:
        """Runs all tasks some times: what each took, by its kind."""
        dy, dlosses = self._ones()
        # (2 x tasks): start and end of each, in the order of `_kinds`.
        times = self._timed(values, dy, dlosses, self._others)[0].numpy()
        found = collections.defaultdict(list)
        for kind, start, end in zip(self._kinds, times[::2], times[1::2]):
            found[kind].append(float(end - start))
        if self._tasks.graph.recomputes_in_backward and "recompute" in found:
            # It is part of the backward task, and as long for every layer.
            found["recompute_last"] = found["recompute"]
        return {kind: own[1:] for kind, own in found.items()}

    def _ones(self) -> tuple[list[Any], list[Any]]:
        """Gradients of the outputs and of the losses."""
        made = self._made

        def ones(like: Any) -> Any:
            return None if like is None else tf.ones(like.shape, like.dtype)

        with tf.device(self._device):
            return [*map(ones, made.dy)], [*map(ones, made.dlosses)]

    def _known(self, values: LayerValues) -> tuple[dict[Any, Any], Any]:
        """Values by tensors of the graph, and the packed weights."""
        traced = self._made.traced
        weights = [
            tf.cast(value, dtype)
            for value, dtype in zip(values.weights, self._tasks.weight_dtypes)
        ]
        inputs = tf.nest.flatten(self._tracer.led(values.inputs))
        state = [tensor for _, tensor in traced.state]
        labels = tf.nest.flatten(values.labels)
        return {
            **by_reference(traced.x, inputs),
            **by_reference(state, values.state),
            **by_reference(traced.labels, labels),
        }, self._tasks.pack_weights(weights)

    def _forward(self, values: LayerValues) -> list[tf.Tensor]:
        with tf.device(self._device):
            known, weights = self._known(values)
            given, _ = self._tasks.forward(known, weights, keeps=False)()
        known.update(given)
        handed_out = self._made.traced.handed_out
        return [known[t.ref()] for t in handed_out if t is not None]

    def _run(
        self,
        values: LayerValues,
        dy: list[Any],
        dlosses: list[Any],
        others: Any,
    ) -> list[tf.Tensor]:
        """All tasks, some times; returns when each started and ended."""
        clock = Clock()
        chain = Chain(clock)

        def run(kind: str, work: Any) -> Any:
            if work is None:
                return None
            if kind not in _FORWARD:
                of_graph = [t for t in work.function.inputs if tf.is_tensor(t)]
                self._read |= {t.ref() for t in of_graph}
            made = inputs if kind in _FORWARD else [inputs, dy]
            if others is not None:
                self._touch(chain, [others, *tensors(made)])
            task = Task(kind, 0, 0)
            return chain.run(task, self._device, [], work)

        with tf.device(self._device):
            known, weights = self._known(values)
            inputs = tensors(values.inputs)
            known.update(_given(self._made.dy, dy))
            known.update(_given(self._made.dlosses, dlosses))
            sums: dict[str, Any] = {}
            for _ in range(_TURNS):
                self._turn(run, (known, weights), sums)
        self._kinds = [task.kind for task, _ in clock.tasks]
        with tf.device("CPU:0"):
            return [tf.stack(clock.times)]

    def _touch(self, chain: Chain, found: list[tf.Tensor]) -> None:
        """Reads tensors after the last task, one after the other."""
        before = chain.last_op.get(self._device)
        for own in found if before is not None else ():
            if own.dtype.is_floating:
                with tf.control_dependencies([before]):
                    before = tf.reduce_sum(own).op
        chain.last_op[self._device] = before

    def _turn(
        self,
        run: Callable[[str, Any], Any],
        given: tuple[dict[Any, Any], Any],
        sums: dict[str, Any],
    ) -> None:
        """Each task once."""
        tasks = self._tasks
        _, kept = run("forward", tasks.forward(*given, keeps=False))
        if not self._place.differentiates:
            return
        facts = tasks.facts(True, self._place.needs_dx)
        if tasks.graph.can_be_split:
            _, again = run("recompute", tasks.forward(*given, keeps=True))
            if facts.recomputes:
                again = run("recompute_last", tasks.recompute(*given, kept))
            kept = kept if again is None else again
        if not (self._place.needs_dx or self._is_of_weights):
            return
        run("backward_first", tasks.backward(*given, kept, None, 0))
        work = tasks.backward(*given, kept, sums.get("backward"), 0)
        _, sums["backward"] = run("backward", work)
        if not facts.has_halves:
            return
        _, kept = run("input_gradient", tasks.input_gradient(*given, kept))
        if self._is_of_weights:
            work = tasks.weight_gradient(*given, kept, sums.get("halves"), 0)
            sums["halves"] = run("weight_gradient", work)


def _given(keys: Sequence[Any], values: Sequence[Any]) -> dict[Any, Any]:
    pairs = zip(keys, values)
    return {key.ref(): value for key, value in pairs if key is not None}


def _specs(nest: Any) -> Any:
    """Shapes and dtypes; of a boundary as a list of lists."""
    found = [*nest] if isinstance(nest, Boundary) else nest
    return tf.nest.map_structure(
        lambda t: None if t is None else _spec(t), found
    )


def _spec(like: Any) -> tf.TensorSpec:
    return tf.TensorSpec(like.shape, like.dtype)


def _bytes(found: list[Any]) -> int:
    """Of tensors whose shapes are known."""
    known = [t for t in found if t is not None and t.dtype != tf.variant]
    return sum(placement.num_bytes(t) for t in known)


class GradientNeeds(NamedTuple):
    """What the backward pass has to do for a step, by where it is.

    Attributes:
        differentiates: Whether there are weights in it, or before it.
        needs_dx: Whether there are weights before it.
    """

    differentiates: bool
    needs_dx: bool


class LayerValues(NamedTuple):
    """What a step is computed from.

    Attributes:
        inputs: What crosses into it.
        weights: Values of the trainable variables.
        state: Values of all other variables.
        labels: What the head takes, or None.
    """

    inputs: Boundary
    weights: list[tf.Tensor]
    state: list[tf.Tensor]
    labels: Any = None


class KeptParts(NamedTuple):
    """What the backward pass keeps: of inputs, of outputs, and of all else."""

    inputs: int
    outputs: int
    others: int


def start_values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """The values of variables; what they would start with, if they have none.

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
    inlined into its caller, which the optimiser does change.

    Args:
        function: Takes tensors in nests, and returns a flat list of tensors;
            it captures none.
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
        specs = tf.nest.map_structure(
            lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype),
            arguments,
        )
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
