r"""Functions that are cut out of a graph, and what goes in and out of them.

The function of a task has hundreds of arguments and results: weights, what the
backward pass needs, sums of gradients. Each costs time in every call, while
TensorFlow makes the step's graph, prepares it, and runs it. In a `Bundle` they
are one tensor, or a few: a `tf.experimental.Optional`, which refers to them and
copies nothing.

    w0, w1, ... w63, w64, ... w99, ids     100 floats of any shape, an integer
     \____________/  \__________/   |
       Optional       Optional      ids    three arguments: two scalars of
                                           dtype variant, and ids itself

Python unpacks them inside the function, where they are tensors again.

The failure of a function cancels what else waits on its device, before its
caller hears of it: then the caller only knows that it was cancelled. Functions
that run in turn, one after the other, share what they wait at with the step
instead (see `internals.share_rendezvous`), and all devices get the error
itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfgpipe import internals
from tfgpipe.failures import setting
from tfgpipe.internals import Nest

# What is known of a micro-batch: values by the references of tensors of the
# model's graph; of a `Bundle`, packed, by the bundle.
Values: TypeAlias = dict[Hashable, Any]

# TensorFlow notes their types with the one, and takes time that grows with the
# square of their number.
_MOST = 64


class Bundle:
    """Some tensors of a graph; a list stands for one: they are the same.

    With `together`, they are put into one, or few. XLA cannot.

    Attributes:
        slots: The tensors, a list of equal ones each.
        maxima: Of sums, the slots of those that are maxima.
    """

    maxima: Collection[int] = ()

    def __init__(self, tensors: Sequence[Any], together: bool):
        self.slots = [t if isinstance(t, list) else [t] for t in tensors]
        self.tensors: list[tf.Tensor] = [slot[0] for slot in self.slots]
        joined = []
        for i, kind in enumerate(t.dtype for t in self.tensors if together):
            # Integers are often in the host's memory: they would be copied.
            if kind.is_floating or kind.is_complex or kind.is_bool:
                joined.append(i)
        if len(joined) < 2:
            joined = []
        self._groups = [
            joined[i : i + _MOST] for i in range(0, len(joined), _MOST)
        ]
        self._alone = sorted({*range(len(self.slots))} - {*joined})

    @functools.cached_property
    def specs(self) -> list[tf.TensorSpec]:
        """Shapes and dtypes of what `pack` returns."""
        alone = [self.tensors[i] for i in self._alone]
        return [tf.TensorSpec([], tf.variant) for _ in self._groups] + [
            tf.TensorSpec(t.shape, t.dtype) for t in alone
        ]

    @property
    def aliases(self) -> list[tf.Tensor]:
        """All tensors of all slots."""
        return [t for slot in self.slots for t in slot]

    def pack(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Puts a value for each slot together."""
        # a, b, c, d -> (a, c), b, d: the groups, and then those alone.
        if not self._groups:
            return list(values)
        joined = [
            tf.raw_ops.OptionalFromValue(components=[values[i] for i in group])
            for group in self._groups
        ]
        # TensorFlow notes with an Optional the types of all that is in it, see
        # `_MOST`. Behind this operation they are not: `unpack` knows them.
        joined = tf.raw_ops.IdentityN(input=joined)
        return [*joined, *(values[i] for i in self._alone)]

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The values that `pack` was given."""
        values = dict(zip(self._alone, packed[len(self._groups) :]))
        for group, one in zip(self._groups, packed):
            components = tf.raw_ops.OptionalGetValue(
                optional=one,
                output_types=[self.tensors[i].dtype for i in group],
                output_shapes=[self.tensors[i].shape for i in group],
            )
            values.update(zip(group, components))
        return [values[i] for i in range(len(self.slots))]

    def add(
        self, so_far: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Sums that have grown by a value for each slot."""
        return [
            tf.maximum(total, value)
            if i in self.maxima
            else tf.raw_ops.AddV2(x=total, y=value)
            for i, (total, value) in enumerate(zip(so_far, values))
        ]


def as_bundle(one: tf.Tensor | Bundle) -> Bundle:
    """A bundle as it is, a tensor as a bundle of one."""
    return one if isinstance(one, Bundle) else Bundle([one], together=False)


def tensors(nest: Nest) -> list[tf.Tensor]:
    """All tensors of a nest, those in sparse gradients too."""
    flat = tf.nest.flatten(nest, expand_composites=True)
    return [t for t in flat if t is not None]


def by_reference(
    keys: Sequence[Any], values: Sequence[Any]
) -> dict[Hashable, Any]:
    """Values by the references of tensors; None are skipped."""
    return {t.ref(): v for t, v in zip(keys, values) if t is not None}


@dataclasses.dataclass(eq=False)
class OutsideValue:
    """The value of a variable that is not of the model, a `tf.Variable`.

    It is read once in a step, before what the step assigns, and all cells take
    it: whenever they run, and run again, it is the same.
    """

    handle: tf.Tensor
    dtype: tf.DType
    _read: tuple[Any, Any] = (None, None)

    def read(self) -> tf.Tensor:
        """The value, in the graph of a step; where that has it already, that.

        It is read where the variable is.
        """
        graph = internals.current_graph()
        known, value = self._read
        if graph is None or known is not graph:
            with tf.control_dependencies(None), tf.device(None):
                value = tf.raw_ops.ReadVariableOp(
                    resource=self.handle, dtype=self.dtype
                )
            self._read = graph, value
        return value


class Subfunction:
    """A function cut out of a graph.

    `captures` are tensors outside of the graph, by the references of the
    graph's own.

    Attributes:
        inputs: Tensors of the graph, and bundles, that it takes.
    """

    def __init__(
        self,
        concrete: Any,
        inputs: list[tf.Tensor | Bundle],
        fetches: Sequence[tf.Tensor | Bundle],
        captures: Mapping[Any, Any],
    ):
        self._call = internals.FunctionCall(concrete)
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
            list(itertools.islice(results, len(fetch.specs)))
            if isinstance(fetch, Bundle)
            else next(results)
            for fetch in self._fetches
        ]


# ------------------------------------------------- functions that run in turn
_in_turn = contextvars.ContextVar("in_turn", default=False)

_with_step: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def in_turn(is_alone: bool) -> contextlib.AbstractContextManager[None]:
    """Inside, functions are traced; `is_alone` if no others run meanwhile."""
    return setting(_in_turn, is_alone)


def traced(
    function: Callable,
    specs: Sequence[Any],
    options: dict[str, Any],
    definition: tf.compat.v1.GraphDef,
) -> Any:
    """Traces a function, whose caller gets its errors if it runs in turn.

    And if it runs where it is called: on another host, some operations would
    wait for tensors for ever.

    Args:
        function: What it does.
        specs: Of its arguments.
        options: Of `tf.function`.
        definition: Of the graph with its operations.
    """
    traced_later = tf.function(function, **options)
    library = definition.library.function
    bodies = [definition.node, *(f.node_def for f in library)]
    if _in_turn.get() and not (
        any(spec.dtype == tf.resource for spec in specs)
        or any(node.device for nodes in bodies for node in nodes)
    ):
        internals.share_rendezvous(traced_later)
    return traced_later.get_concrete_function(*specs)


def one_step(function: Callable) -> Callable:
    """Runs a mini-batch; in turn, if no other one runs at the same time.

    Steps of one graph, or of a loop, may not wait for each other.
    """

    @functools.wraps(function)
    def running(*args: object) -> Any:
        graph = internals.current_graph()
        if graph is None:
            return function(*args)
        is_alone = graph not in _with_step
        _with_step.add(graph)
        in_loop = internals.in_control_flow(graph, None)
        with setting(_in_turn, _in_turn.get() and is_alone and not in_loop):
            return function(*args)

    return running
