"""Caches of attention that stay on the devices of their layers.

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
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfgpipe import internals
from tfgpipe.devices import names

_zeros = internals.Replaceable(keras.ops, "zeros")


class LayerCaches:
    """A tensor (rows, layers, ...) in parts (rows, ...), one a layer.

    `parts` may be a function of a layer's index that makes one; `shape` is that
    of the whole.
    """

    def __init__(self, parts: Any, shape: Sequence[Any], dtype: Any):
        self._parts = parts
        self.shape = tf.TensorShape(shape)
        self.dtype = tf.as_dtype(dtype)

    def __getitem__(self, key: Any) -> tf.Tensor:
        """What indexing the tensor would give."""
        # cache[:, i, ...] is the part of layer i; all else needs the whole.
        rest = key[2:] if isinstance(key, tuple) else ()
        if len(key if isinstance(key, tuple) else ()) < 2 or not isinstance(
            key[1], int
        ):
            return tf.convert_to_tensor(self)[key]
        part = self._part(key[1] % self.shape[1])
        is_whole = key[0] == slice(None) and all(k is Ellipsis for k in rest)
        return part if is_whole else part[(key[0], *rest)]

    def _part(self, i: int) -> tf.Tensor:
        return self._parts(i) if callable(self._parts) else self._parts[i]

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        """The whole, for whoever needs it."""
        parts = [self._part(i) for i in range(self.shape[1])]
        return tf.convert_to_tensor(tf.stack(parts, 1), dtype, name=name)


@contextlib.contextmanager
def zeros_apart() -> Iterator[None]:
    """Inside, caches that begin as zeros do so on the devices that use them.

    A task makes them for all layers at once, which one device would hold.
    """
    made: list[tf.Tensor] = []

    def zeros(shape: Any, dtype: Any = None) -> Any:
        sizes = [int(n) for n in shape] if _is_known(shape) else []
        if len(sizes) < 4:
            return _zeros.original(shape, dtype=dtype)
        if len(sizes) == 4:  # of one layer already
            made.append(_zeros.original(sizes, dtype=dtype))
            return made[-1]

        def part(i: int) -> tf.Tensor:
            own = [sizes[0], *sizes[2:]]
            made.append(_zeros.original(own, dtype=dtype))
            return made[-1]

        return LayerCaches(part, sizes, dtype or keras.config.floatx())

    with _zeros.by(zeros):
        yield
    for tensor in made:
        device = next(_devices_of_users(tensor), None)
        if device is not None and not tensor.op.device:
            internals.put_on(tensor.op, device)


def _is_known(shape: Any) -> bool:
    return isinstance(shape, (list, tuple)) and all(
        isinstance(n, int) for n in shape
    )


def _devices_of_users(tensor: tf.Tensor) -> Iterator[str]:
    """Devices of what is computed from a tensor, the nearest first."""
    nearest = [tensor.op]
    for _ in range(4):
        nearest = [
            u for op in nearest for t in op.outputs for u in t.consumers()
        ]
        yield from (op.device for op in nearest if op.device)


class CacheGroups:
    """Groups of rows, each with variables for its caches.

    One call at a time may use them, and has to hold `lock` while it runs.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._variables: dict[Any, tf.Variable] = {}
        self._zero: tf.Variable | None = None

    def run(self, function: Callable, rows: Any, num_groups: int) -> Any:
        """Computes something of each group, in the graph that is traced.

        Args:
            function: Takes the numbers of a group, of its first row and of the
                one behind its last. Returns a nest of tensors (rows, ...).
            rows: How many there are. If fewer than groups, some have none.
            num_groups: How many groups.

        Returns:
            What `function` returns, of all rows.
        """
        ends = [rows * m // num_groups for m in range(num_groups + 1)]
        found = [function(m, *ends[m : m + 2]) for m in range(num_groups)]
        self._release()
        return tree.map_structure(_joined, *found)

    def variable(self, of: Any, n: int, i: int, part: Any) -> tf.Variable:
        """The variable of a cache, a leaf of it, and a layer."""
        key = of, n, i, part.op.device, part.dtype
        if key not in self._variables:
            with internals.making_variables(), tf.device(part.op.device):
                self._variables[key] = tf.Variable(
                    _nothing(part.dtype),
                    trainable=False,
                    shape=tf.TensorShape(None),
                )
        return self._variables[key]

    def lengthened(self, part: tf.Tensor) -> tf.Tensor:
        """A part of a cache, which steps may lengthen if it is of length 0.

        TensorFlow's optimiser of graphs (2.21) takes the shape of what is
        assigned first for that of all values of the variable. So a length that
        grows begins with one that it cannot know: what a variable says.
        """
        if part.shape[1:2] != [0]:
            return part
        if self._zero is None:
            with internals.making_variables(), tf.device("CPU:0"):
                self._zero = tf.Variable(0, trainable=False)
        with tf.device(part.op.device):
            return part[:, : self._zero.read_value()]

    def _release(self) -> None:
        """Frees the memory of caches, after the loops have used them."""
        for variable in self._variables.values():
            with tf.device(variable.device):
                variable.assign(_nothing(variable.dtype))


def _joined(*parts: Any) -> Any:
    return None if parts[0] is None else tf.concat(parts, 0)


def _nothing(dtype: Any) -> tf.Tensor:
    return tf.zeros((0,), dtype)


class HeldCache:
    """The cache of one group of prompts, in variables.

    Args:
        groups: All groups.
        of: Which of them this is, and which cache of it, if there are several.
        reorders: Whether the sampler repeats or permutes rows.
    """

    def __init__(self, groups: CacheGroups, of: Any, reorders: bool):
        self._groups = groups
        self._of = of
        self._reorders = reorders
        self._leaves: list[_Leaf | None] = []

    def hold(self, cache: Any) -> Any:
        """Puts a cache into variables.

        Returns:
            A nest like it, of the numbers of rows; other tensors as they are,
            and those on devices that only compile, which the loop has to carry.
        """
        kept = []
        for n, tensor in enumerate(tree.flatten(cache)):
            parts = _parts(tensor)
            leaf = None
            if parts is not None:
                parts = [*map(self._groups.lengthened, parts)]
                leaf = _Leaf(
                    [
                        self._groups.variable(self._of, n, i, part)
                        for i, part in enumerate(parts)
                    ],
                    parts,
                    _is_stack(tensor),
                    self._reorders,
                )
                # (rows,): the loop reorders these in the cache's place.
                tensor = tf.range(tf.shape(parts[0])[0])
                tensor.set_shape(parts[0].shape[:1])
            self._leaves.append(leaf)
            kept.append(tensor)
        return tree.pack_sequence_as(cache, kept)

    def read(self, kept: Any) -> Any:
        """The cache, of what the loop has carried in its place."""
        return tree.pack_sequence_as(
            kept,
            [
                tensor if leaf is None else leaf.read(tensor)
                for leaf, tensor in zip(self._leaves, tree.flatten(kept))
            ],
        )

    def write(self, kept: Any, cache: Any) -> Any:
        """Writes what a step has made of the cache that it has read.

        `kept` is what the loop carried before the step; returns what it carries
        on.
        """
        return tree.pack_sequence_as(
            kept,
            [
                new if leaf is None else leaf.write(rows, new)
                for leaf, rows, new in zip(
                    self._leaves, tree.flatten(kept), tree.flatten(cache)
                )
            ],
        )


class _Leaf:
    """One tensor of a cache, or one stack of them, in variables."""

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        parts: Sequence[tf.Tensor],
        is_stack: bool,
        reorders: bool,
    ):
        self._variables = variables
        self._shapes = [part.shape for part in parts]
        self._is_stack = is_stack
        self._reorders = reorders
        self._read: Any = None
        for variable, part in zip(variables, parts):
            with tf.device(variable.device):
                variable.assign(part)

    def read(self, rows: tf.Tensor) -> Any:
        tensors = []
        for variable, shape in zip(self._variables, self._shapes):
            with tf.device(variable.device):
                value = variable.read_value()
                if self._reorders:
                    value = tf.gather(value, rows)
                value.set_shape([rows.shape[0], *shape[1:]])
            tensors.append(value)
        first = tensors[0]
        if self._is_stack:
            shape = [first.shape[0], len(tensors), *first.shape[1:]]
            self._read = LayerCaches(tensors, shape, first.dtype)
        else:
            self._read = first
        return self._read

    def write(self, rows: tf.Tensor, new: Any) -> tf.Tensor:
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
        numbers = tf.range(tf.shape(parts[0])[0])
        numbers.set_shape(rows.shape)
        return numbers


def _is_stack(tensor: Any) -> bool:
    """Whether a tensor of a graph is a stack along its axis 1."""
    return tensor.op.type == "Pack" and tensor.op.get_attr("axis") == 1


def _parts(tensor: Any) -> list[tf.Tensor] | None:
    """What of a cache a device can hold by itself; None if nothing."""
    if not isinstance(tensor, tf.Tensor):
        return None
    if _is_stack(tensor) and all(map(_can_be_held, tensor.op.inputs)):
        return [*tensor.op.inputs]
    is_held = tensor.dtype.is_floating and _can_be_held(tensor)
    return [tensor] if is_held else None


def _can_be_held(tensor: tf.Tensor) -> bool:
    """Whether a tensor has a device, whose variables may change their shape."""
    device = tensor.op.device
    return bool(device) and not names.only_compiles([device])
