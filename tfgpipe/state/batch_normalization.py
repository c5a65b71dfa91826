"""Batch normalisation: its moments, and how its statistics move.

With several micro-batches, moving mean and variance move once, with the moments
of the mini-batch, and not as a layer assigns them. The rule is read off what
the layer assigned, old * a + new * b with a + b = 1, and every other rule is
refused: sums, differences and products with constants are followed back in the
graph. (One micro-batch is the mini-batch; then moving statistics are state as
any other.)

The moments of a mini-batch follow exactly from its micro-batches'
([Chan et al., 1979](http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773)):
mean = sum w_m mean_m, variance = sum w_m (variance_m + (mean_m - mean)^2),
where w_m is the share of the rows (of the unmasked positions) of micro-batch m.

Limits: masks are not looked at, nor axes whose length is unknown while tracing.

Reference: [Ioffe and Szegedy, 2015](https://arxiv.org/abs/1502.03167).
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfgpipe import failures, internals
from tfgpipe.inputs import MicroBatches

# Of one call of a layer: mean, variance, and count: None without a mask.
CallMoments = tuple[Any, ...]
# Numbers (a, b): a statistic becomes old * a + new * b.
Rule = tuple[Any, Any]

_KEPT = (1.0, 0.0)

_ROUNDING = {2: 2.0**-6, 4: 2.0**-21, 8: 2.0**-50}  # by bytes of a float


class MovingStatistics:
    """The moving statistics of a model, while its layers run.

    They do not move: moments and rules of `layers` are recorded.

    Attributes:
        layers: These batch normalisations, and those that are built later.
        moments: By the id of a layer the moments of each call.
        rules: By the id of a layer the rules of each call, for its mean and
            its variance.
        of_rows: Names of layers that see one value of a channel in a row.
    """

    def __init__(self, layers: Sequence[keras.layers.BatchNormalization]):
        self.layers = [*layers]
        # By the id of a statistic, its layer, and 0 for a mean.
        self._owners: dict[int, tuple[Any, int]] = {}
        for layer in layers:
            self._note(layer)
        self._moved: set[int] = set()
        self._stale: dict[int, str] = {}
        self._odd: dict[int, str] = {}
        self.moments = collections.defaultdict[int, list[CallMoments]](list)
        self.rules: dict[int, list[list[Rule]]] = collections.defaultdict(list)
        self.of_rows: set[str] = set()

    def _note(self, layer: keras.layers.BatchNormalization) -> None:
        if layer.moving_mean is not None:  # it is built
            self._owners[id(layer.moving_mean)] = layer, 0
            self._owners[id(layer.moving_variance)] = layer, 1

    def has(self, variable: keras.Variable) -> bool:
        """Returns whether a variable is one of them."""
        return id(variable) in self._owners

    def read(self, variable: keras.Variable) -> None:
        """Notes that a layer reads a variable."""
        if id(variable) in self._moved:
            self._stale[id(variable)] = variable.path

    def record(
        self,
        layer: keras.layers.BatchNormalization,
        inputs: tf.Tensor,
        mask: tf.Tensor | None,
        mean: tf.Tensor,
        variance: tf.Tensor,
    ) -> None:
        """Notes the moments by which a batch normalisation normalises."""
        if id(layer.moving_mean) not in self._owners:
            self._note(layer)
            if layer not in self.layers:
                self.layers.append(layer)
        for variable in (layer.moving_mean, layer.moving_variance):
            self._stale.pop(id(variable), None)  # it was the layer itself
        count = None
        others = {0, layer.axis % inputs.shape.rank}
        if all(n == 1 for i, n in enumerate(inputs.shape) if i not in others):
            self.of_rows.add(layer.name)
        if mask is not None:
            count = tf.reduce_sum(tf.cast(mask, mean.dtype))
        self.moments[id(layer)].append((mean, variance, count))
        self.rules[id(layer)].append([_KEPT, _KEPT])

    def assign(
        self, variable: keras.Variable, old: tf.Tensor, value: tf.Tensor
    ) -> None:
        """Notes the rule by which a layer moves a variable."""
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
        """Refuses reads and rules for which the mini-batch has no moments."""
        odd = [*self._stale.values(), *self._odd.values()]
        if odd:
            raise ValueError(
                "A `keras.layers.BatchNormalization` must leave its moments to "
                "Keras and move its statistics to `old * momentum + new * (1 - "
                "momentum)` with a constant momentum, and nobody may read them "
                f"after. Received: {odd}. Call `super().call` and read them "
                "before, pass num_micro_batches=1, or derive from "
                "`keras.layers.Layer`: then they are a mean, as other state is."
            )


def _rule(old: tf.Tensor, new: tf.Tensor, value: tf.Tensor) -> Rule | None:
    """Returns numbers (a, b) with value = old * a + new * b and a + b = 1."""
    limit = _ROUNDING[value.dtype.size]
    numbers = factors(value, [old, new])
    if numbers is None:
        return None
    a, b, constant = numbers
    if np.any(constant) or np.any(abs(a + b - 1) > limit):
        return None
    return a, b


def warn_of_single_values(
    layers: Collection[str], micro_batches: MicroBatches
) -> None:
    """Has a step warn, once, of layers that normalise single values."""
    told: list[int] = []

    def warn(rows: int) -> None:
        # One row is normalised so in plain Keras, too.
        if not told and 1 < rows < 2 * micro_batches.count:
            told.append(rows)
            failures.warn(
                f"Layers {sorted(layers)} normalise micro-batches of one row, "
                f"in a mini-batch of {rows} rows: the output is `beta`, and "
                "trains no layer before. Pass a smaller `num_micro_batches`, "
                "or make mini-batches larger; if only the last one of an epoch "
                "is smaller, drop it."
            )

    if isinstance(micro_batches.num_rows, int):
        warn(micro_batches.num_rows)
        return
    with tf.device(None):  # Python runs here
        op = tf.numpy_function(warn, [micro_batches.num_rows], [])
        internals.run_independently(op)


def is_synchronized(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer asks for moments over replicas."""
    return getattr(layer, "synchronized", False) is True


_SAME = {"EnsureShape", "Identity", "StopGradient"}

_PRODUCTS = {"Mul", "MulNoNan"}

_SUMS = {"Add": 1, "AddV2": 1, "Sub": -1}


def factors(
    tensor: tf.Tensor, sources: Sequence[tf.Tensor]
) -> list[Any] | None:
    """Returns numbers a and c with tensor = sum of a[i] * sources[i], + c.

    The sources are of the tensor's graph, or of those around it.

    Returns:
        The a[i], and then c; None if they cannot be told.
    """
    indexes = {source.ref(): i for i, source in enumerate(sources)}

    def only(index: int, value: Any) -> list[Any]:
        numbers: list[Any] = [0] * (len(sources) + 1)
        numbers[index] = np.asarray(value)
        return numbers

    # A sum of two such lists is one, as is the product with a constant; of
    # anything else nothing is known.
    @functools.cache
    def factors_of(ref: Any) -> list[Any] | None:
        tensor = ref.deref()
        if ref in indexes:
            return only(indexes[ref], 1)
        if internals.is_eager(tensor):
            is_known = tensor.dtype != tf.resource
            return only(-1, tensor.numpy()) if is_known else None
        op = tensor.op
        if op.type == "Const":
            return only(-1, tf.get_static_value(tensor))
        if op.type == "Placeholder":  # of a function inside, or an argument
            for outer, inner in tensor.graph.captures:
                if inner is tensor:
                    return factors_of(outer.ref())
            return None
        is_cast = (
            op.type == "Cast"
            and op.inputs[0].dtype.is_floating == tensor.dtype.is_floating
        )
        if op.type in _SAME or is_cast:
            return factors_of(op.inputs[0].ref())
        if op.type in _SUMS or op.type in _PRODUCTS:
            a, b = (factors_of(t.ref()) for t in op.inputs)
            if a is None or b is None:
                return None
            if op.type in _SUMS:
                return [x + _SUMS[op.type] * y for x, y in zip(a, b)]
            if not _is_constant(b):
                a, b = b, a
            return [x * b[-1] for x in a] if _is_constant(b) else None
        return None

    return factors_of(tensor.ref())


def _is_constant(numbers: Sequence[Any]) -> bool:
    return not any(np.any(a) for a in numbers[:-1])


def moving_statistics(
    rules: Sequence[Sequence[Rule]],
    initial: Sequence[tf.Tensor],
    moments: Sequence[Sequence[CallMoments]],
    micro_batches: MicroBatches,
) -> Sequence[tf.Tensor]:
    """Moves mean and variance once, by the moments of a mini-batch.

    Args:
        rules: The rules of a layer, by call.
        initial: Mean and variance before the mini-batch.
        moments: The layer's moments, by micro-batch and call.
        micro_batches: How the rows fall into micro-batches.
    """

    def updated(old: tf.Tensor, new: tf.Tensor, rule: Rule) -> tf.Tensor:
        a, b = (tf.constant(factor, new.dtype) for factor in rule)
        return tf.cast(tf.cast(old, new.dtype) * a + new * b, old.dtype)

    moving = initial
    # A layer may be called more than once.
    for call, pair in zip(zip(*moments), rules, strict=True):
        combined = combine_moments(call, micro_batches)
        moving = [*map(updated, moving, combined, pair)]
    return moving


def combine_moments(
    moments: Sequence[CallMoments], micro_batches: MicroBatches
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance of a mini-batch, by micro-batches."""
    means, variances, unmasked = zip(*moments)
    if len(moments) == 1:
        return means[0], variances[0]
    counts = []
    for m, count in enumerate(unmasked):
        rows = micro_batches.size(m) if count is None else count
        rows = tf.cast(rows, means[0].dtype)
        counts.append(micro_batches.select(m, rows, tf.zeros_like(rows)))
    total = sum_of(counts)
    shares = [tf.math.divide_no_nan(count, total) for count in counts]
    mean = sum_of([w * m for w, m in zip(shares, means)])
    # The variance within micro-batches, and between their means.
    squares = [v + tf.square(m - mean) for v, m in zip(variances, means)]
    variance = sum_of([w * square for w, square in zip(shares, squares)])
    return mean, variance


def sum_of(values: list[tf.Tensor]) -> tf.Tensor:
    """Returns the sum, always rounded alike, which a sum by AddN is not."""
    return tf.reduce_sum(tf.stack(values), axis=0)
