"""Batch normalisation: its moments, and how its statistics move.

Where there are several micro-batches, what a layer assigns to its moving mean
and variance is not kept: they move once, with the moments of the mini-batch. By
which rule is seen in what the layer assigned, old * a + new * b with a + b = 1,
and every other rule is refused. (One micro-batch is the mini-batch; then moving
statistics are state as any other.)

Moments of a micro-batch may be those over replicas.
`BatchNormalization(synchronized=True)` normalises micro-batch i by the moments
of the rows that all replicas have in their i-th micro-batches, its partners.
They follow from three sums over rows: 1, x and (x - c)^2. Each replica sums its
own rows, and the partners' sums are added up. The constant c, the same in all
replicas, is the moving mean: the nearer to the mean, the less is lost to
rounding.

The addition is a point in the model's graph, in the forward pass and, as it
is its own derivative, in the backward pass: every replica receives the sum, so
every replica sends back a gradient for it. `graphs/cut.py` cuts the
graph there, and `run/chain.py` adds up. Nothing else knows of it.

A batch normalisation that normalises one value by itself is warned of. Where a
micro-batch has one row, and each row one value of a channel, the variance is 0:
the output is `beta` whatever the input, and no gradient goes back. Plain Keras
does that, too, with one row; but here the rows are those of a micro-batch, not
those that the user sees. How many values there are is often known only when a
step runs; then the step itself warns.

Limits: masks are not looked at, nor axes whose length is unknown while tracing.

What an assignment makes of the tensors that it takes is read in the graph. A
random seed moves on by `seed + [0, 1]`, a moving statistic by `old * a + new *
b`. Whether a layer does so is seen in what it assigned: sums, differences and
products with constants are followed back to the tensors in question.

References: [Ioffe and Szegedy, 2015](https://arxiv.org/abs/1502.03167);
[Peng et al., 2018](https://arxiv.org/abs/1711.07240) on moments over devices.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import internals
from tfgpipe.graphs import sum_over_replicas
from tfgpipe.micro_batches import MicroBatches
from tfgpipe.state.rules import sum_of

_KEPT = (1.0, 0.0)

_ROUNDING = {2: 2.0**-6, 4: 2.0**-21, 8: 2.0**-50}  # by bytes of a float


class MovingStatistics:
    """The moving statistics of a model, while its layers run.

    Of the `layers`, batch normalisations, moments are recorded in place of
    moving their statistics.

    Attributes:
        layers: Those, and others that were built while layers run.
        moments: By the id of a layer a list of its calls, each a (mean,
            variance, count, few), where count is None without a mask, and few
            is that of `count_of_few`.
        rules: By the id of a layer a list of its calls, each the pairs (a, b)
            by which its mean and its variance move: old * a + new * b.
    """

    def __init__(self, layers: Sequence[keras.layers.BatchNormalization]):
        self.layers = [*layers]
        self._owners: dict[int, tuple[Any, int]] = {}
        for layer in layers:
            self._own(layer)
        self._moved: set[int] = set()
        self._stale: dict[int, str] = {}
        self._odd: dict[int, str] = {}
        self.moments: dict[int, list[Any]] = {id(v): [] for v in layers}
        self.rules: dict[int, list[Any]] = {id(v): [] for v in layers}

    def _own(self, layer: keras.layers.BatchNormalization) -> None:
        for i, v in enumerate((layer.moving_mean, layer.moving_variance)):
            if v is not None:  # it is built
                self._owners[id(v)] = layer, i

    def has(self, variable: keras.Variable) -> bool:
        """Whether a variable is one of them."""
        return id(variable) in self._owners

    def read(self, variable: keras.Variable) -> None:
        """Notes that a layer reads a variable."""
        if id(variable) in self._moved:
            self._stale[id(variable)] = variable.path

    def record(
        self, layer: Any, inputs: Any, mask: Any, mean: Any, variance: Any
    ) -> None:
        """Notes the moments by which a batch normalisation normalises."""
        if id(layer.moving_mean) not in self._owners:
            self._own(layer)
            if id(layer) not in self.moments:
                self.layers.append(layer)
                self.moments[id(layer)], self.rules[id(layer)] = [], []
        for variable in (layer.moving_mean, layer.moving_variance):
            self._stale.pop(id(variable), None)  # it was the layer itself
        count = None
        if mask is not None:
            count = tf.reduce_sum(tf.cast(mask, mean.dtype))
        few = count_of_few(layer, inputs) if mask is None else None
        self.moments[id(layer)].append((mean, variance, count, few))
        self.rules[id(layer)].append([_KEPT, _KEPT])

    def assign(
        self, variable: keras.Variable, old: tf.Tensor, value: tf.Tensor
    ) -> None:
        """Notes by which rule a layer moves a variable."""
        layer, i = self._owners[id(variable)]
        rule = None
        calls = self.rules[id(layer)]
        if calls and calls[-1][i] is _KEPT:
            new = self.moments[id(layer)][-1][i]
            rule = _rule(old, new, value)
        if rule is None:
            self._odd[id(layer)] = layer.name
        else:
            calls[-1][i] = rule
        self._moved.add(id(variable))

    def check(self) -> None:
        """Refuses what cannot be told of the mini-batch."""
        if self._stale:
            raise ValueError(
                "A layer must not read the moving statistics of a "
                "`keras.layers.BatchNormalization` after it was called with "
                "`training=True`, if there is more than one micro-batch: they "
                "move once, at the end of the mini-batch. Received: reads of "
                f"{[*self._stale.values()]}. Read them "
                "before, compute the moments that you need, or pass "
                "num_micro_batches=1."
            )
        if self._odd:
            raise ValueError(
                "A `keras.layers.BatchNormalization` must leave its moments to "
                "Keras, and move its statistics to `old * momentum + new * "
                "(1 - momentum)` with a constant momentum, if there is more "
                "than one micro-batch: they move once, with the moments of "
                f"the mini-batch. Received: {[*self._odd.values()]}, which "
                "assign something else to their moving statistics. Call "
                "`super().call`, pass num_micro_batches=1, or derive from "
                "`keras.layers.Layer`: then they are the mean over "
                "micro-batches, as other state is."
            )


def _rule(
    old: tf.Tensor, new: tf.Tensor, value: tf.Tensor
) -> tuple[Any, Any] | None:
    """The numbers (a, b) with value = old * a + new * b and a + b = 1."""
    limit = _ROUNDING[value.dtype.size]
    found = factors(value, [old, new])
    if found is None:
        return None
    a, b, constant = found
    if np.any(constant) or np.any(abs(a + b - 1) > limit):
        return None
    return a, b


def is_synchronized(layer: Any) -> bool:
    """Whether a layer asks for moments over replicas."""
    return getattr(layer, "synchronized", False) is True


def choosing_moments(graph: Any) -> Callable:
    """The moments by which each layer of a model normalises.

    Only in the model's graph, this one, can partners add up.
    """

    def moments(layer: Any, inputs: Any, mask: Any) -> Any:
        if not is_synchronized(layer):
            return internals.batch_moments(layer, inputs, mask)
        if internals.current_graph() is not graph:
            raise ValueError(
                "A batch normalisation over replicas must be called by a "
                f"layer directly. Received: layer '{layer.name}' with "
                "synchronized=True in a loop, a condition or a `tf.function`, "
                "which cannot be left in the middle. Call it outside of that, "
                "or pass synchronized=False."
            )
        return moments_over_replicas(layer, inputs, mask)

    return moments


def moments_over_replicas(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: Any,
    add_up: Callable[[tf.Tensor], tf.Tensor] = sum_over_replicas,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The mean and variance that a batch normalisation normalises by.

    `mask` says which positions count, of the shape of the inputs without the
    last dimension; None for all. `add_up` adds a tensor up over replicas.
    """
    channels = layer.axis % inputs.shape.rank
    axes = [i for i in range(inputs.shape.rank) if i != channels]
    # Squares of differences from a value that all replicas know, near the mean:
    # the sums then need one exchange, and lose little to rounding.
    near = tf.cast(tf.convert_to_tensor(layer.moving_mean), inputs.dtype)
    shape = [1] * len(axes)
    shape.insert(channels, -1)
    squares = tf.math.squared_difference(inputs, tf.reshape(near, shape))
    if mask is None:
        size = tf.size(inputs) // tf.size(near)
        count = tf.fill(tf.shape(near), tf.cast(size, inputs.dtype))
        extra = 0.0
    else:
        mask = tf.cast(mask, "bool")[..., tf.newaxis]
        zeros = tf.zeros_like(inputs)
        inputs = tf.where(mask, inputs, zeros)
        squares = tf.where(mask, squares, zeros)
        count = tf.reduce_sum(tf.cast(mask, inputs.dtype) + zeros, axes)
        extra = keras.config.epsilon()  # as in Keras
    # 3 x (channels,)
    own = [count, tf.reduce_sum(inputs, axes), tf.reduce_sum(squares, axes)]
    count, total, square = tf.unstack(add_up(tf.stack(own)))
    mean = tf.math.divide_no_nan(total, count + extra)
    # sum (x - mean)^2 = sum (x - near)^2 - 2 d sum (x - near) + d^2 sum 1
    d = mean - near
    square += d * (d * count - 2 * (total - count * near))
    variance = tf.math.divide_no_nan(square, count + extra)
    return mean, tf.maximum(variance, 0)


_warned: weakref.WeakSet[keras.layers.Layer] = weakref.WeakSet()


def count_of_few(layer: Any, inputs: tf.Tensor) -> tf.Tensor | None:
    """How many values of each channel there are, or None if surely several."""
    channels = layer.axis % inputs.shape.rank
    rows, *others = [n for i, n in enumerate(inputs.shape) if i != channels]
    if rows not in (None, 1) or any(n != 1 for n in others):
        return None
    return tf.shape(inputs)[0]


class SingleValues:
    """Finds batch normalisations of single values in one mini-batch."""

    def __init__(self, micro_batches: MicroBatches):
        self._micro_batches = micro_batches
        self._layers: list[Any] = []
        self._found: list[tf.Tensor] = []

    def look(
        self, layer: Any, counts: list[list[Any]], groups: Sequence[list[int]]
    ) -> None:
        """Looks at a layer that takes moments of `groups` of micro-batches.

        `counts` are, for each micro-batch, what `count_of_few` returned, call
        by call.
        """
        select = self._micro_batches.select
        found = []
        for own in groups:
            for call in zip(*(counts[m] for m in own)):
                if None not in call:
                    here = [select(m, n, 0) for m, n in zip(own, call)]
                    found.append(tf.equal(tf.add_n(here), 1))
        if found and self._micro_batches.count > 1 and layer not in _warned:
            self._layers.append(layer)
            self._found.append(tf.reduce_any(tf.stack(found)))

    def warn(self) -> None:
        """Warns of what was found, of each layer once."""
        if not self._layers:
            return
        rows = self._micro_batches.num_rows
        with tf.device(None):  # Python runs here
            values = [tf.stack(self._found), tf.convert_to_tensor(rows)]
            op = tf.numpy_function(self._warn, values, [])
            internals.run_independently(op)

    def _warn(self, found: Any, rows: Any) -> None:
        if rows == 1:  # as in plain Keras
            return
        count = min(rows, self._micro_batches.count)
        for layer, is_single in zip(self._layers, found):
            if is_single and layer not in _warned:
                _warned.add(layer)
                warnings.warn(
                    f"Layer '{layer.name}' normalises single values: a mini-"
                    f"batch of {rows} rows in {count} micro-batches has "
                    "micro-batches of one row. Its output for them is `beta`, "
                    "whatever its input, and they do not train the layers "
                    "before it. Pass a smaller `num_micro_batches`, or make "
                    "mini-batches larger, of at least two rows a micro-batch; "
                    "if only the last one of an epoch is smaller, drop it.",
                    stacklevel=1,
                )


_SAME = {"EnsureShape", "Identity", "StopGradient"}

_PRODUCTS = {"Mul", "MulNoNan"}

_SUMS = {"Add": 1, "AddV2": 1, "Sub": -1}


def factors(tensor: tf.Tensor, sources: Sequence[tf.Tensor]) -> Any:
    """The numbers a and c with tensor = sum of a[i] * sources[i], + c.

    The sources are of the tensor's graph, or of those around it. An array of
    the a[i], and then c; None if it cannot be told.
    """
    places = {source.ref(): i for i, source in enumerate(sources)}
    return _Reader(places).of(tensor)


class _Reader:
    """Reads one formula; `places` has a source's index by its reference."""

    def __init__(self, places: dict[Any, int]):
        self._places = places
        self._found: dict[Any, Any] = {}

    def of(self, tensor: tf.Tensor) -> Any:
        """The factors of a tensor of the formula, see `factors`."""
        ref = tensor.ref()
        if ref not in self._found:
            self._found[ref] = self._read(tensor)
        return self._found[ref]

    def _read(self, tensor: tf.Tensor) -> Any:
        # [a of each source, ..., c]. A sum of two such lists is one, as is the
        # product with a constant; of anything else nothing is known.
        place = self._places.get(tensor.ref())
        if place is not None:
            return self._unit(place, 1)
        if internals.is_eager(tensor):
            if tensor.dtype == tf.resource:
                return None
            return self._unit(-1, tensor.numpy())
        op = tensor.op
        if op.type == "Const":
            return self._unit(-1, tf.get_static_value(tensor))
        if op.type == "Placeholder":  # of a function inside, or an argument
            for outer, inner in tensor.graph.captures:
                if inner is tensor:
                    return self.of(outer)
            return None
        if op.type in _SAME:
            return self.of(op.inputs[0])
        if op.type == "Cast":
            given = op.inputs[0].dtype
            is_same = given.is_floating == tensor.dtype.is_floating
            return self.of(op.inputs[0]) if is_same else None
        if op.type in _SUMS or op.type in _PRODUCTS:
            a, b = (self.of(t) for t in op.inputs)
            if a is None or b is None:
                return None
            if op.type in _SUMS:
                return [x + _SUMS[op.type] * y for x, y in zip(a, b)]
            if not _is_constant(b):
                a, b = b, a
            return [x * b[-1] for x in a] if _is_constant(b) else None
        return None

    def _unit(self, place: int, value: Any) -> list[Any]:
        """Nothing but one of the numbers."""
        found: list[Any] = [0] * (len(self._places) + 1)
        found[place] = np.asarray(value)
        return found


def _is_constant(numbers: Any) -> bool:
    return not any(np.any(a) for a in numbers[:-1])


def moving_statistics(
    rules: Sequence[Any],
    initial: tuple[tf.Tensor, tf.Tensor],
    moments: Sequence[Sequence[Any]],
    micro_batches: MicroBatches,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The moving mean and variance, moved once by a mini-batch's moments.

    `initial` are those before the mini-batch; `rules` those of the layer, call
    by call, and `moments` by micro-batch, as `MovingStatistics` has them.
    """

    def updated(old: tf.Tensor, new: tf.Tensor, rule: Any) -> tf.Tensor:
        a, b = (tf.constant(factor, new.dtype) for factor in rule)
        return tf.cast(tf.cast(old, new.dtype) * a + new * b, old.dtype)

    moving_mean, moving_variance = initial
    # A layer may be called more than once.
    for call, (of_mean, of_variance) in zip(zip(*moments), rules, strict=True):
        mean, variance = combine_moments(list(call), micro_batches)
        moving_mean = updated(moving_mean, mean, of_mean)
        moving_variance = updated(moving_variance, variance, of_variance)
    return moving_mean, moving_variance


def combine_moments(
    moments: list[Any], micro_batches: MicroBatches
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance of a mini-batch from those of its micro-batches."""
    means, variances, unmasked, _ = zip(*moments)
    if len(moments) == 1:
        return means[0], variances[0]
    dtype = means[0].dtype
    counts = []
    for m, count in enumerate(unmasked):
        rows = micro_batches.size(m) if count is None else count
        counts.append(
            micro_batches.select(m, tf.cast(rows, dtype), tf.zeros([], dtype))
        )
    total = sum_of(counts)
    shares = [tf.math.divide_no_nan(count, total) for count in counts]
    # The variance is that within micro-batches, and that between their means.
    mean = sum_of([w * m for w, m in zip(shares, means)])
    variance = sum_of(
        [
            w * (v + tf.square(m - mean))
            for w, v, m in zip(shares, variances, means)
        ]
    )
    return mean, variance
