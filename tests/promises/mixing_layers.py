"""Layers whose numbers follow from several rows.

With more than one micro-batch they are Keras's, or the layer is warned of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers as kl
from keras import ops
from own_layers import Holder, register
from row_operations import MIXING, PLACES
from state_layers import Average, Kept

SIZE = 16  # of the table


@register
class Mixed(Holder):
    """Mixes rows."""

    HELD = ("how", "place")
    place = "plain"

    def call(self, x):
        found = PLACES[self.place](MIXING[self.how], x)
        return 0.5 * x + 0.5 * tf.ensure_shape(found, x.shape)

    def compute_output_shape(self, shape):
        return shape


def _rows(x: Any) -> Any:
    """A vector for each row."""
    return ops.mean(x, axis=tuple(range(1, len(x.shape) - 1)))


def _pairs(x: Any) -> Any:
    return tf.math.segment_mean(x, tf.range(tf.shape(x)[0]) // 2)


STATES: dict[str, Callable[[Any, Any], Any]] = {
    "bank": lambda x, bank: ops.mean(ops.concatenate([x, bank]), axis=0),
    "pad": lambda x, _: ops.mean(tf.pad(x, ((0, 2), (0, 0))), axis=0),
    "segment": lambda x, _: tf.reduce_sum(_pairs(x)[:1], axis=0),
    "largest": lambda x, bank: ops.max(ops.concatenate([x, bank]), axis=0),
    "last": lambda x, bank: ops.concatenate([bank, x])[-1],
    "sum": lambda x, _: ops.sum(x, axis=0),
    "squared": lambda x, _: ops.mean(x, axis=0) ** 2,
    "mean": lambda x, _: ops.mean(x, axis=0),
}


@register
class OddState(Kept):
    """State that is no mean over rows."""

    HELD = ("rule", "reads")

    def build(self, shape):
        options = {"trainable": False, "initializer": "zeros"}
        self.state = self.add_weight(shape=(shape[-1],), **options)
        self.bank = self.add_weight(shape=(3, shape[-1]), **options)

    def update(self, x):
        new = STATES[self.rule](_rows(x), ops.convert_to_tensor(self.bank))
        self.state.assign(0.5 * self.state + 0.5 * new)


@register
class DrawnState(Average):
    """State that is drawn."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(5)

    def update(self, x):
        drawn = keras.random.normal(
            self.state.shape, dtype=self.state.dtype, seed=self.seed_generator
        )
        self.state.assign(drawn)


PENALTIES: dict[str, Callable[[Any], Any]] = {
    "every other": lambda x: ops.mean(x[::2] ** 2),
    "taken": lambda x: ops.sum(x[:1] ** 2),
    "masked": lambda x: (
        ops.sum(tf.boolean_mask(x, x[..., 0] > 0) ** 2)
        / (1.0 + ops.sum(ops.cast(x[..., 0] > 0, x.dtype)))
    ),
    "pooled": lambda x: ops.mean(MIXING["neighbours"](x) ** 2),
    "scanned": lambda x: ops.mean(MIXING["scan"](x) ** 2),
    "sum": lambda x: ops.sum(x**2),
    "largest": lambda x: ops.max(x**2, initial=0.0),
    "deviation": lambda x: ops.std(x),
    "mean": lambda x: ops.mean(x**2),
}


@register
class OddPenalty(Holder):
    """Adds what is no mean over rows to the loss; see `PENALTIES`."""

    HELD = ("rule",)

    def call(self, x):
        self.add_loss(0.1 * PENALTIES[self.rule](x))
        return x


METRICS: dict[str, Callable[[Any, Any], None]] = {
    "mean": lambda metric, x: metric.update_state(ops.mean(x)),
    "deviation": lambda metric, x: metric.update_state(ops.std(x)),
    "calls": lambda metric, x: metric.update_state(1.0),
    "sum": lambda metric, x: metric.update_state(ops.sum(x)),
    "rows": lambda metric, x: metric.update_state(ops.mean(x, axis=-1)),
}


@register
class OddMetric(Holder):
    """Updates a metric."""

    HELD = ("rule", "adds")
    adds = False

    def __init__(self, *held, **kwargs):
        super().__init__(*held, **kwargs)
        cls = keras.metrics.Sum if self.adds else keras.metrics.Mean
        self.metric = cls(name=f"{self.name}_metric")

    def call(self, x):
        if self.rule == "reset":
            self.metric.reset_state()
        METRICS["rows" if self.rule == "reset" else self.rule](self.metric, x)
        return x


@register
class Router(Holder):
    """Adds a loss that balances experts over all rows."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3))

    def call(self, x):
        p = ops.softmax(ops.matmul(x, self.kernel))
        p = ops.reshape(p, (-1, 3))
        chosen = ops.cast(ops.one_hot(ops.argmax(p, -1), 3), p.dtype)
        balance = ops.mean(p, axis=0) * ops.mean(chosen, axis=0)
        self.add_loss(3.0 * ops.sum(balance))
        return x


LENGTHS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda x: ops.shape(x)[1],
    "split": lambda x: tf.split(tf.shape(x), 3)[1][0],
    "transposed": lambda x: tf.shape(tf.transpose(x, (1, 0, 2)))[0],
}


@register
class Positions(Holder):
    """Adds rows of a table by positions, whose length is found somehow."""

    HELD = ("by",)

    def build(self, shape):
        self.table = self.add_weight(shape=(SIZE, shape[-1]))

    def call(self, x):
        positions = tf.range(LENGTHS[self.by](x))
        return ops.tanh(x + ops.take(self.table, positions, axis=0))

    def compute_output_shape(self, shape):
        return shape


@register
class OwnMoments(kl.BatchNormalization):
    """Normalises by moments of its own."""

    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return 0.5 * mean, variance + 0.25 * mean**2


CLASSES: dict[str, Any] = {
    "drawn_state": DrawnState,
    "mixed": Mixed,
    "odd_metric": OddMetric,
    "odd_penalty": OddPenalty,
    "odd_state": OddState,
    "own_moments": OwnMoments,
    "positions": Positions,
    "router": Router,
}
