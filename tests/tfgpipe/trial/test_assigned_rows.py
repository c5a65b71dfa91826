"""State that micro-batches do not make as a mini-batch would is warned of."""

import warnings

import keras
import numpy as np
from keras import layers as kl

import tfgpipe

ops = keras.ops


class Keeps(kl.Layer):
    """Assigns what a function makes of the inputs and the old value."""

    def __init__(self, function, shape=(), dtype="float32", **kwargs):
        super().__init__(**kwargs)
        self.function, self.of = function, (shape, dtype)

    def build(self, shape):
        own, dtype = self.of
        self.kept = self.add_weight(
            own, "zeros", dtype, trainable=False, name="kept"
        )

    def call(self, x):
        self.kept.assign(self.function(x, self.kept))
        return x


class Weight(Keeps):
    def build(self, shape):
        self.kept = self.add_weight((), "ones", name="kept")


class Largest(keras.metrics.Metric):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, x):
        self.value.assign(ops.maximum(self.value, ops.max(x)))

    def result(self):
        return self.value


class Measures(kl.Layer):
    def __init__(self, metric, **kwargs):
        super().__init__(**kwargs)
        self.metric = metric

    def call(self, x):
        self.metric.update_state(x)
        return x


def number(x):
    return ops.shape(x)[0]


def queue(x, old):
    return ops.concatenate([x, old])[:4]


def warned(layers, m=2, model=None, batches=1):
    """What is said of the state of layers, in `fit`."""
    layers = [keras.Input((3,)), *layers, kl.Dense(2)]
    model = model or tfgpipe.GPipe(layers, 2, m)
    model.compile("sgd", "mse")
    x = np.ones((3, 3), "float32")  # in batches of an unknown number of rows
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(batches):
            model.fit(x, x[:, :2], batch_size=2, verbose=0)
    messages = [str(w.message) for w in found]
    return [m for m in messages if "assigns" in m or "metric, '" in m]


WRONG = {
    "queue": lambda name: Keeps(queue, (4, 3), name=name),
    "rows": lambda name: Keeps(
        lambda x, old: old + ops.cast(number(x), "float32"), name=name
    ),
    "sum": lambda name: Keeps(
        lambda x, old: 0.9 * old + ops.sum(x, 0), (3,), name=name
    ),
    "codes": lambda name: Keeps(
        lambda x, old: (
            0.9 * old + ops.sum(ops.one_hot(ops.argmax(x, -1), 3), axis=0)
        ),
        (3,),
        name=name,
    ),
    "largest": lambda name: Keeps(
        lambda x, old: ops.maximum(old, ops.max(x)), name=name
    ),
}
FIRST = {
    "integer": lambda name: Keeps(
        lambda x, old: (old + number(x)) % 5, dtype="int32", name=name
    ),
    "seen": lambda name: Keeps(
        lambda x, old: ops.any(x > 0), dtype="bool", name=name
    ),
    "weight": lambda name: Weight(lambda x, old: old + ops.mean(x), name=name),
}
RIGHT = [
    lambda: Keeps(lambda x, old: 0.9 * old + 0.1 * ops.mean(x, 0), (3,)),
    lambda: Keeps(
        lambda x, old: ops.sum(x, 0) / ops.cast(number(x), x.dtype), (3,)
    ),
    lambda: Keeps(lambda x, old: old + 1, dtype="int32"),
    lambda: Keeps(lambda x, old: old + 1.0),
    lambda: Weight(lambda x, old: old * 0.5),
    lambda: Measures(keras.metrics.Mean()),
    lambda: Measures(Largest()),
    lambda: kl.BatchNormalization(),
    lambda: kl.SpectralNormalization(kl.Dense(3)),
    lambda: kl.Dropout(0.5, seed=1),
]


def test_what_micro_batches_do_not_assign_as_a_mini_batch_is_warned_of():
    layers = {n: make(n) for n, make in (WRONG | FIRST).items()}
    messages = warned([*layers.values()])
    assert len(messages) == len(layers)
    for message, name in zip(messages, layers):
        start = f"Layer '{name}' assigns 'kept' what is not seen to be a mean"
        assert message.startswith(start)
        assert "or pass num_micro_batches=1" in message
    # Python shows a text once, but another model has the same fault.
    layers = [keras.Input((3,)), WRONG["queue"]("queue"), kl.Dense(2)]
    again = tfgpipe.GPipe(layers, 2, 2)
    assert warned([], model=again, batches=2) == messages[:1]


def test_what_is_right_is_not_warned_of():
    assert not warned([make() for make in RIGHT])


def test_one_micro_batch_is_right():
    assert not warned([WRONG["queue"]("a"), FIRST["integer"]("b")], m=1)


def test_metric_that_does_not_add_up_over_replicas_is_warned_of():
    largest = Measures(Largest(), name="largest")
    with tfgpipe.PipelineStrategy(2, 2).scope():
        (message,) = warned([largest, Measures(keras.metrics.Mean())])
    assert "Layer 'largest' has a metric, 'largest'" in message
    assert "pass it to `compile`" in message
