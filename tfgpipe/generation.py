"""Tasks of KerasHub generate on several devices, in groups of prompts.

Each group has a loop over tokens, and loops do not wait for each other: while
one group is in the second cell, another is in the first.

    device 0    group 0   group 1   group 0   group 1   ...
    device 1              group 0   group 1   group 0   ...

A group runs the task's `generate_step`. With more groups than devices, weights
would be read more often for nothing: a device reads all of its weights for each
token of each group.

A sampler of KerasHub draws for all rows in each turn of its loop, and moves its
seed on. A group does as well, and keeps its rows of what was drawn:

    seed of turn s = seed at the start + s

so that tokens do not depend on groups. A seed that each loop moves on would
also make TensorFlow run the loops one after the other: here it is moved on
once, at the end, by the turns of the longest loop.

What a loop carries, TensorFlow places on the first device: each token would
send the caches of all other devices there and back. Here variables have them,
and the loop carries the numbers of their rows, an integer a row, which a
sampler repeats and gathers as it would do with the caches:

    plain    loop(prompt, cache)          cache: (rows, layers, 2, length, ...)
    here     loop(prompt, [0, 1, ...])    variables: (rows, 2, length, ...),
                                          one a layer, on its device

A task reads `cache[:, i]` and stacks what its layers return: so a cache that is
read can be a list, and a stack is taken apart by its operation in the graph.

A layer returns all of its cache, of which it has made a copy with one position
overwritten. That becomes the variable's memory, without another copy; to write
the position alone takes longer, as a variable that is written in part is copied
wherever it is read (48 positions, 8 layers of Llama: 0.24 s beside 0.19 s).

On a device that only compiles, such as a TPU, no variable changes its shape:
caches there are carried by the loop.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.devices import names
from tfgpipe.inputs import as_tensors
from tfgpipe.internals import Nest

# Samplers of KerasHub that leave rows where they are.
_IN_PLACE = {"GreedySampler", "RandomSampler", "TopKSampler", "TopPSampler"}
_REORDERING = {"BeamSampler", "ContrastiveSampler"}


def install(task: Any, num_groups: int) -> GroupedGeneration | None:
    """Has a task generate in at most `num_groups` groups from now on.

    Returns what it generates by; None for a model that does not generate, to
    which it does nothing.
    """
    names = ("generate", "generate_step", "make_generate_function")
    if not all(callable(getattr(task, name, None)) for name in names):
        return None
    grouped = GroupedGeneration(task, num_groups)
    object.__setattr__(task, "make_generate_function", grouped.function)
    return grouped


class GroupedGeneration:
    """Generates by a task, in groups of prompts.

    Attributes:
        num_groups: How many groups, at most.
    """

    def __init__(self, task: Any, num_groups: int):
        self._task = task
        self.num_groups = num_groups
        self._make = type(task).make_generate_function
        self._lock = threading.Lock()  # of one set of caches
        self._variables: dict[Hashable, tf.Variable] = {}
        self._zero: tf.Variable | None = None

    def function(self) -> Callable:
        """Returns what the task calls with inputs and the tokens to stop at."""
        task = self._task
        if task.run_eagerly:
            return self._make(task)
        if task.generate_function is None:
            run = tf.function(self._run, autograph=False)

            @functools.wraps(task.generate_step)
            def generate(inputs: Nest, stop_token_ids: Nest = None) -> Nest:
                inputs, _ = as_tensors(inputs, None)
                if stop_token_ids is not None:
                    stop_token_ids = tuple(stop_token_ids)
                with self._lock:
                    groups = self._groups_of(inputs)
                    return run(inputs, stop_token_ids, groups)

            task.generate_function = generate
        return task.generate_function

    def in_groups(
        self, num_groups: int | None
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, there are as many groups, if it is not None."""
        count = self.num_groups if num_groups is None else num_groups
        return internals.replaced(self, "num_groups", count)

    def _groups_of(self, inputs: Nest) -> int:
        """Returns the number of groups: each has a prompt, or more."""
        # Samplers of a user's may draw in other ways.
        if _kind(self._task.sampler) is None or _start(inputs) is None:
            return 1
        counts = {t.shape[0] if t.shape.rank else None for t in _flat(inputs)}
        (rows,) = counts if len(counts) == 1 else (None,)
        return min(self.num_groups, rows or 1)

    def _run(self, inputs: Nest, stop_token_ids: Nest, groups: int) -> Nest:
        """All groups, in one graph."""
        task, sampler = self._task, self._task.sampler
        rows, draws = _flat(inputs)[0].shape[0], None
        if groups > 1:
            draws = Draws(sampler, rows, _start(inputs))
        results = []
        for m in range(groups):
            of_group = inputs
            with contextlib.ExitStack() as stack:
                enter = stack.enter_context
                sampling = _Sampling(sampler, self.variable, m, draws)
                enter(internals.replaced(task, "sampler", sampling))
                enter(zeros_apart())
                if draws is not None:
                    first, last = (rows * i // groups for i in (m, m + 1))
                    enter(draws.of_rows(first, last))
                    of_group = tree.map_structure(
                        lambda t, rows=slice(first, last): (
                            None if t is None else t[rows]
                        ),
                        inputs,
                    )
                results.append(task.generate_step(of_group, stop_token_ids))
        for variable in self._variables.values():  # which are used no more
            with tf.device(variable.device):
                variable.assign(tf.zeros((0,), variable.dtype))
        if draws is not None:
            draws.move_on()
        return tree.map_structure(
            lambda *parts: None if parts[0] is None else tf.concat(parts, 0),
            *results,
        )

    def variable(self, key: Hashable, part: tf.Tensor) -> tf.Variable:
        """Returns a variable on the device of a part of a cache, which it gets.

        TensorFlow's optimiser of graphs (2.21) takes the shape of what is
        assigned first for the shape of all values of the variable. So a length
        that grows from 0 begins with one that it cannot know: what a variable
        says.
        """
        device = part.op.device
        key = key, device, part.dtype
        with internals.outside_functions():
            if key not in self._variables:
                with tf.device(device):
                    self._variables[key] = tf.Variable(
                        tf.zeros((0,), part.dtype),
                        trainable=False,
                        shape=tf.TensorShape(None),
                    )
            if self._zero is None:
                with tf.device("CPU:0"):
                    self._zero = tf.Variable(0, trainable=False)
        with tf.device(device):
            if part.shape[1:2] == [0]:
                part = part[:, : self._zero.read_value()]
            self._variables[key].assign(part)
        return self._variables[key]


class _Sampling:
    """Stands for the sampler of a task, with a cache that stays.

    Args:
        sampler: The sampler.
        variable: Puts a part of a cache, with a key, into a variable.
        group: The number of the group of prompts.
        draws: Draws for it, if there are several.
    """

    def __init__(
        self,
        sampler: Any,
        variable: Callable[[Hashable, tf.Tensor], tf.Variable],
        group: int,
        draws: Draws | None,
    ):
        self._sampler = sampler
        self._variable = variable
        self._group = group
        self._draws = draws
        self._leaves: list[_Leaf | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(
        self,
        next: Callable,
        prompt: Nest,
        cache: Nest = None,
        index: tf.Tensor | int = 0,
        **kwargs: object,
    ) -> Nest:
        draws = self._draws

        def step(prompt: Nest, kept: Nest, index: tf.Tensor) -> Nest:
            if draws is not None:
                draws.index = index
            *others, cache = next(prompt, self._read(kept), index)
            return *others, self._write(kept, cache)

        kept = None if cache is None else self._hold(cache)
        if draws is None:
            return self._sampler(step, prompt, kept, index, **kwargs)
        run_loop = type(self._sampler).run_loop

        def counted(*args: object, **kwargs: object) -> Any:
            end = run_loop(self._sampler, *args, **kwargs)
            draws.note_end(end[2])
            return end

        with internals.replaced(self._sampler, "run_loop", counted):
            # All groups begin where all rows together would.
            index = draws.begin(index)
            return self._sampler(step, prompt, kept, index, **kwargs)

    def _hold(self, cache: Nest) -> Nest:
        """Puts a cache into variables.

        Returns:
            A nest like it, of the numbers of rows, which the loop reorders in
            the cache's place; other tensors as they are, and those on devices
            that only compile, which the loop has to carry.
        """
        kept: list[Any] = []
        for tensor in tree.flatten(cache):
            parts, leaf = _parts(tensor), None
            if parts is not None:
                key = self._group, len(kept)
                leaf = _Leaf(
                    [self._variable((*key, i), p) for i, p in enumerate(parts)],
                    [part.shape for part in parts],
                    _is_stack(tensor),
                    _kind(self._sampler) is not _IN_PLACE,
                )
                tensor = _numbers(parts[0], parts[0].shape[:1])
            self._leaves.append(leaf)
            kept.append(tensor)
        return tree.pack_sequence_as(cache, kept)

    def _read(self, kept: Nest) -> Nest:
        """Returns the cache for what the loop has carried instead."""
        tensors = [
            tensor if leaf is None else leaf.read(tensor)
            for leaf, tensor in zip(self._leaves, tree.flatten(kept))
        ]
        return tree.pack_sequence_as(kept, tensors)

    def _write(self, kept: Nest, cache: Nest) -> Nest:
        """Writes what a step made of the cache; returns what is carried on.

        `kept` is what the loop carried before the step.
        """
        tensors = [
            new if leaf is None else leaf.write(rows, new)
            for leaf, rows, new in zip(
                self._leaves, tree.flatten(kept), tree.flatten(cache)
            )
        ]
        return tree.pack_sequence_as(kept, tensors)


def _kind(sampler: Any) -> set[str] | None:
    """Returns what a sampler does with rows; None if it is not KerasHub's."""
    if not type(sampler).__module__.startswith("keras_hub."):
        return None
    name = type(sampler).__name__
    return next((k for k in (_IN_PLACE, _REORDERING) if name in k), None)


def _flat(inputs: Nest) -> list[tf.Tensor]:
    return [t for t in tree.flatten(inputs) if t is not None]


def _numbers(tensor: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Returns the numbers of a tensor's rows."""
    numbers = tf.range(tf.shape(tensor)[0])
    numbers.set_shape(shape)
    return numbers


def _start(inputs: Nest) -> tf.Tensor | None:
    """Returns where the first token goes: behind the shortest prompt."""
    if not isinstance(inputs, dict):
        return None
    names = ("decoder_padding_mask", "padding_mask")
    mask = next((inputs[name] for name in names if name in inputs), None)
    if mask is None:
        return None
    return tf.reduce_min(tf.reduce_sum(tf.cast(mask, tf.int32), -1))


_categorical = internals.Replaceable(keras.random, "categorical")


# ------------------------------------------------ draws of groups, as of all
class Draws:
    """The draws of a sampler in one call of `generate`.

    `num_rows` are the prompts of all groups; `start` is the position of the
    first token that is generated, if tasks ask for the one behind the shortest
    prompt.

    Attributes:
        index: The position of the token of this turn.
    """

    def __init__(self, sampler: Any, num_rows: int, start: tf.Tensor):
        generators = [
            value
            for value in vars(sampler).values()
            if isinstance(value, keras.random.SeedGenerator)
        ]
        self._base = [(g, tf.identity(g.state.value)) for g in generators]
        self._num_rows = num_rows
        self._start = start
        self._begins: list[tf.Tensor] = []
        self._turns: list[tf.Tensor] = []
        self.index: Any = None

    @contextlib.contextmanager
    def of_rows(self, first: int, last: int) -> Iterator[None]:
        """Inside, a group of rows draws."""

        def categorical(
            logits: tf.Tensor,
            num_samples: int,
            dtype: str = "int32",
            seed: keras.random.SeedGenerator | None = None,
        ) -> tf.Tensor:
            base = next((b for g, b in self._base if g is seed), None)
            if base is None:
                return _categorical.original(logits, num_samples, dtype, seed)
            turn = tf.cast(self.index - self._start, base.dtype)
            # (rows of the group, ids) -> (all rows, ids): what a row draws
            # depends on how many there are. So all draw, and the group's are
            # taken.
            paddings = [[first, self._num_rows - last], [0, 0]]
            drawn = _categorical.original(
                tf.pad(logits, paddings),
                num_samples,
                dtype,
                _Known(base + tf.stack([0 * turn, turn])),
            )
            return drawn[first:last]

        with _categorical.by(categorical):
            yield

    def begin(self, index: tf.Tensor | int) -> tf.Tensor:
        """Returns where a group begins that alone would begin at `index`."""
        if not isinstance(index, tf.Tensor):  # the same for all groups
            self._start = tf.convert_to_tensor(index, tf.int32)
        self._begins.append(tf.cast(index, tf.int32))
        return self._start

    def note_end(self, index: tf.Tensor) -> None:
        """Notes the position at which a group's loop has ended."""
        self._turns.append(tf.cast(index, tf.int32) - self._start)

    def move_on(self) -> None:
        """Moves the seeds on, as one loop over all rows would."""
        tf.debugging.assert_equal(
            tf.reduce_min(tf.stack(self._begins)),
            self._start,
            "A task must begin to generate behind its shortest prompt, if "
            "prompts go through in several groups. Pass num_groups=1.",
        )
        for generator, base in self._base:
            turns = tf.cast(tf.reduce_max(tf.stack(self._turns)), base.dtype)
            generator.state.assign(base + tf.stack([0 * turns, turns]))


class _Known(keras.random.SeedGenerator):
    """A seed that is known."""

    def __init__(self, value: tf.Tensor):
        self.__dict__["known"] = value

    def next(self, ordered: bool = True) -> tf.Tensor:
        return self.__dict__["known"]


# ------------------------------------- caches that stay on their devices
_zeros = internals.Replaceable(keras.ops, "zeros")


class LayerCaches:
    """A tensor (rows, layers, ...) in parts (rows, ...), one a layer.

    `part` makes the one of a layer by its index; `shape` is the shape of the
    whole.
    """

    def __init__(
        self, part: Callable[[int], tf.Tensor], shape: Sequence[Any], dtype: Any
    ):
        self._part = part
        self.shape = tf.TensorShape(shape)
        self.dtype = tf.as_dtype(dtype)

    def __getitem__(self, key: Any) -> tf.Tensor:
        """Returns what indexing the tensor would give."""
        # cache[:, i, ...] is the part of layer i; all else needs the whole.
        keys = key if isinstance(key, tuple) else ()
        if len(keys) < 2 or not isinstance(keys[1], int):
            return tf.convert_to_tensor(self)[key]
        part, rest = self._part(keys[1] % self.shape[1]), keys[2:]
        is_whole = keys[0] == slice(None) and all(k is Ellipsis for k in rest)
        return part if is_whole else part[(keys[0], *rest)]

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        """Returns the whole tensor."""
        parts = [*map(self._part, range(self.shape[1]))]
        return tf.convert_to_tensor(tf.stack(parts, 1), dtype, name=name)


@contextlib.contextmanager
def zeros_apart() -> Iterator[None]:
    """Inside, caches that begin as zeros do so on the devices that use them.

    A task makes them for all layers at once, which one device would hold.
    """
    zero_tensors: list[tf.Tensor] = []

    def noted(shape: Sequence[int], dtype: Any) -> tf.Tensor:
        zero_tensors.append(_zeros.original(shape, dtype=dtype))
        return zero_tensors[-1]

    def zeros(shape: Any, dtype: Any = None) -> Any:
        is_list = isinstance(shape, (list, tuple))
        is_known = is_list and all(isinstance(n, int) for n in shape)
        if not is_known or len(shape) < 4:
            return _zeros.original(shape, dtype=dtype)
        if len(shape) == 4:  # of one layer already
            return noted(shape, dtype)
        rows, _, *others = shape
        return LayerCaches(
            lambda i: noted([rows, *others], dtype),
            shape,
            dtype or keras.config.floatx(),
        )

    with _zeros.by(zeros):
        yield
    for tensor in zero_tensors:
        device = next(_devices_of_users(tensor), None)
        if device is not None and not tensor.op.device:
            internals.put_on(tensor.op, device)


def _devices_of_users(tensor: tf.Tensor) -> Iterator[str]:
    """Yields devices of what is computed from a tensor, the nearest first."""
    nearest = [tensor.op]
    for _ in range(4):
        nearest = [
            u for op in nearest for t in op.outputs for u in t.consumers()
        ]
        yield from (op.device for op in nearest if op.device)


class _Leaf:
    """One tensor of a cache, or one stack of them, in variables.

    Args:
        variables: Of each layer.
        shapes: Of what they have at first.
        is_stack: Whether it is a stack of them.
        reorders: Whether the sampler repeats or permutes rows.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        shapes: Sequence[tf.TensorShape],
        is_stack: bool,
        reorders: bool,
    ):
        self._variables = variables
        self._shapes = shapes
        self._is_stack = is_stack
        self._reorders = reorders
        self._read: tf.Tensor | LayerCaches | None = None

    def read(self, rows: tf.Tensor) -> tf.Tensor | LayerCaches:
        tensors = []
        for variable, shape in zip(self._variables, self._shapes):
            with tf.device(variable.device):
                value = variable.read_value()
                if self._reorders:
                    value = tf.gather(value, rows)
                # Of none, a length that grows.
                sizes = [size or None for size in shape[1:]]
                value.set_shape([rows.shape[0], *sizes])
            tensors.append(value)
        first = self._read = tensors[0]
        if self._is_stack:
            shape = [first.shape[0], len(tensors), *first.shape[1:]]
            part = tensors.__getitem__
            self._read = LayerCaches(part, shape, first.dtype)
        return self._read

    def write(self, rows: tf.Tensor, new: object) -> tf.Tensor:
        if new is self._read:
            return rows  # of the same variables
        parts = _parts(new)
        if parts is None or len(parts) != len(self._variables):
            raise ValueError(
                "A cache must be returned as it was taken: a stack of what the "
                "layers return, or a tensor of one layer. Received: "
                f"{new!r} for {len(self._variables)} layers. Stack them by "
                "`keras.ops.stack(caches, axis=1)` in `call_with_cache`."
            )
        for variable, part in zip(self._variables, parts):
            with tf.device(variable.device):
                variable.assign(part)  # takes the memory over, copies nothing
        return _numbers(parts[0], rows.shape)


def _is_stack(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor of a graph is a stack along its axis 1."""
    return tensor.op.type == "Pack" and tensor.op.get_attr("axis") == 1


def _parts(tensor: object) -> list[tf.Tensor] | None:
    """Returns what of a cache devices can hold; None if nothing."""
    if not isinstance(tensor, tf.Tensor):
        return None
    if _is_stack(tensor) and all(map(_can_be_held, tensor.op.inputs)):
        return [*tensor.op.inputs]
    is_held = tensor.dtype.is_floating and _can_be_held(tensor)
    return [tensor] if is_held else None


def _can_be_held(tensor: tf.Tensor) -> bool:
    """Returns whether variables of a tensor's device may change their shape."""
    device = tensor.op.device
    return bool(device) and not names.only_compiles([device])
