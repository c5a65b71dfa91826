"""Models in which Keras does something that only a run of them shows.

Each is what people write: Python beside the tensors, what hangs on a tensor, a
layer that is set before it is called.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras import ops

RNG = np.random.default_rng(0)
ROWS, NUMBERS = RNG.normal(size=(8, 4)), RNG.normal(size=(8, 3))
IDS = RNG.integers(0, 6, (8, 5))
ONE_HOT = np.eye(3)[RNG.integers(0, 3, 8)]


@dataclasses.dataclass(frozen=True)
class Cause:
    """How to train one model."""

    make: Callable[[], Any]  # returns new layers, or a model
    x: Any
    y: Any
    loss: Any
    metrics: Any = None
    cut: list[int] | None = None  # layers of two cells; None for halves
    later: Callable[[Any], None] | None = None  # called after the first step
    then: tuple[Any, ...] | None = None  # what further steps get


CAUSES: dict[str, Cause] = {}


def cause(x=ROWS, y=NUMBERS, loss="mse", **kwargs):
    def add(make):
        CAUSES[make.__name__] = Cause(make, x, y, loss, **kwargs)
        return make

    return add


def functional(*layers):
    """A functional model of a chain."""
    x = y = keras.Input((4,))
    for layer in layers:
        y = layer(y)
    return keras.Model(x, y)


# ------------------------------------------------- logits that hang on outputs
def own_loss(y, p):
    return keras.losses.categorical_crossentropy(y, p)


def sure(activation="softmax", **kwargs):
    """Probabilities of 0 and 1, of which only the logits say more."""
    wide = keras.initializers.RandomNormal(stddev=40.0, seed=2)
    return kl.Dense(3, activation, kernel_initializer=wide, **kwargs)


@cause(y=ONE_HOT, loss=own_loss, metrics=[own_loss])
def softmax_and_own_loss():
    return [kl.Dense(4, "tanh"), sure()]


@cause(y=ONE_HOT, loss=own_loss, metrics=[own_loss])
def softmax_of_tensorflow():
    """Keras finds its logits by the operation."""
    return [kl.Dense(4, "tanh"), sure(None), kl.Activation(tf.nn.softmax)]


@cause(y=ONE_HOT, loss=own_loss, cut=[2, 1])
def softmax_in_an_earlier_cell():
    return [kl.Dense(4, "tanh"), sure(), kl.Activation("linear")]


@cause(y=(ONE_HOT, ONE_HOT[::-1]), loss=[own_loss, "categorical_crossentropy"])
def auxiliary_head():
    x = keras.Input((4,))
    h = kl.Dense(4, "tanh")(x)
    early = kl.Activation("linear")(sure(name="early")(h))
    return keras.Model(x, [early, sure(name="late")(kl.Dense(4, "tanh")(h))])


# ----------------------------------------------- layers that set other layers
class Inner(kl.Layer):
    """What it computes is set from outside."""

    flag, factor, rows = False, 1.0, None

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="uniform")

    def call(self, x):
        if self.rows is not None:
            x = ops.reshape(x, (self.rows, -1))
        return self.factor * (ops.tanh(x) if self.flag else x) + self.w

    def compute_output_shape(self, shape):
        return shape


class Outer(kl.Layer):
    """Sets an attribute of the layer inside, calls it, and sets it back."""

    def __init__(self, inner, attribute, value):
        super().__init__()
        self.inner, self.attribute, self.value = inner, attribute, value

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x, training=False):
        before = getattr(self.inner, self.attribute)
        setattr(self.inner, self.attribute, self.value(x, training))
        x = self.inner(x)
        setattr(self.inner, self.attribute, before)
        return x

    def compute_output_shape(self, shape):
        return shape


def around_outer(*arguments):
    return functional(kl.Dense(4), Outer(*arguments), kl.Dense(3))


@cause()
def sets_a_flag():
    return around_outer(Inner(), "flag", lambda x, training: training)


@cause()
def sets_the_number_of_rows():
    return around_outer(Inner(), "rows", lambda x, _: ops.shape(x)[0])


@cause()
class OwnCallThatSetsItsLayers(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = kl.Dense(4), Inner(), kl.Dense(3)

    def call(self, x, training=False):
        self.inner.flag = training
        x = self.inner(self.first(x))
        self.inner.factor = 2.0
        x = self.inner(x)
        self.inner.factor = 1.0
        return self.last(x)


# ------------------------------------------------ modes that other layers set
class Run(kl.Layer):
    """Calls a function of its input and of `training`."""

    def __init__(self, run, **kwargs):
        super().__init__(**kwargs)
        self.run = run

    def call(self, x, training=False):
        return self.run(x, training)

    def compute_output_shape(self, shape):
        return shape


@cause()
def mode_of_a_shared_object():
    """Two layers around another; the second goes by what the first has set."""
    mode = types.SimpleNamespace(factor=1.0)

    def write(x, training):
        mode.factor = 2.0 if training else 3.0
        return x

    def read(x, training):
        factor, mode.factor = mode.factor, 0.5
        return factor * x

    return [kl.Dense(4), Run(write), kl.Dense(4), Run(read), kl.Dense(3)]


def counted(calls):
    """Decorates a `call`: each takes the number of calls before it."""

    def decorate(call):
        @functools.wraps(call)
        def wrapped(self, x):
            calls.append(self)
            self.factor = 1.0 + len(calls) % 3
            return call(self, x)

        return wrapped

    return decorate


@cause()
def wrapped_calls_in_branches():
    """Keras calls the branches in the order of their making."""
    calls = []

    class Branch(Inner):
        call = counted(calls)(Inner.call)

    def begin(x, training):
        calls.clear()
        return x

    x = keras.Input((4,))
    h = kl.Dense(4)(Run(begin)(x))
    a, b, c = Branch(), Branch(), Branch()
    left, right = a(h), b(kl.Dense(4)(h))
    y = kl.Add()([kl.Dense(4)(right), c(left)])
    return keras.Model(x, kl.Dense(3)(y))


@cause()
def call_of_an_object_that_is_wrapped():
    """Keras calls what the object has."""
    dense, calls = kl.Dense(4), []
    call = dense.call

    @functools.wraps(call)
    def twice(x, *args, **kwargs):
        calls.append(x)
        return call(call(x, *args, **kwargs), *args, **kwargs)

    dense.call = twice
    return [kl.Dense(4), dense, kl.Dense(3)]


# --------------------------------------------------------- inference by values
@cause(x=5.0 * ROWS)
def clips_in_inference():
    def clip(x, training):
        return x if training else ops.clip(x, -1.0, 1.0)

    return [Run(clip), kl.Dense(4), Run(clip), kl.Dense(3)]


# ---------------------------------------------- attributes changed after a step
class Scaled(kl.Layer):
    factor = 1.0

    def call(self, x):
        return self.factor * x


def scale_by_three(made):
    made[1].factor = 3.0


@cause(later=scale_by_three, then=(ROWS, NUMBERS, np.arange(8.0)))
def attribute_changed_before_sample_weights():
    return [kl.Dense(4), Scaled(), kl.Dense(3)]


# ------------------------------------------------------- Python about the graph
@cause()
def asks_whether_it_is_in_a_function():
    def ask(x, training):
        is_in_function = tf.inside_function()
        is_symbolic = not hasattr(x, "numpy")
        return (1.0 + is_in_function + 2.0 * is_symbolic) * x

    return [kl.Dense(4), Run(ask), kl.Dense(3)]


# --------------------------------------------------------------------- tensors
@cause()
def lambda_of_another_dtype():
    """It says float64, and returns float32, which the model inside casts."""
    x = keras.Input((4,))
    inside = keras.Model(x, kl.Dense(4, "tanh")(x))
    return [
        kl.Dense(4),
        kl.Lambda(lambda x: ops.cast(x, "float32"), output_shape=(4,)),
        inside,
        kl.Dense(3),
    ]


@cause()
def attributes_of_a_users_on_tensors():
    def write(x, training):
        y = ops.tanh(x)
        y.before = x
        return y

    def read(x, training):
        return x + getattr(x, "before", 0.0)

    return [kl.Dense(4), Run(write), Run(read), kl.Dense(3)]


LEFT = types.SimpleNamespace(tensor=None)


def loss_of_what_is_left(y, p):
    return ops.mean((y - p) ** 2 * LEFT.tensor**2, axis=-1)


@cause(loss=loss_of_what_is_left)
def loss_of_what_a_layer_left():
    def leave(x, training):
        LEFT.tensor = x
        return ops.tanh(x)

    return [kl.Dense(4), kl.Dense(3), Run(leave)]


@cause()
def gradients_across_layers():
    seen = []

    def write(x, training):
        seen[:] = [x]
        return x

    def read(x, training):
        return x + tf.gradients(ops.sum(x**3), seen[0])[0]

    layers = [kl.Dense(4), Run(write), kl.Dense(4, "tanh"), Run(read)]
    return [*layers, kl.Dense(3)]


# --------------------------------------------------------------- false refusals
class Holds(kl.Layer):
    """Converts what it has, of one kind or another, in each call."""

    def __init__(self, t):
        super().__init__()
        self.t = t

    def call(self, x):
        return x * ops.convert_to_tensor(self.t)


@cause()
def converts_what_it_holds():
    eager = tf.constant([1.0, 2.0, 3.0, 4.0], "float64")
    return [
        kl.Dense(4),
        Holds(eager),
        kl.Dense(4),
        Holds(np.ones(4)),
        Holds(keras.Variable(2.0 * np.ones(4))),
        kl.Dense(3),
    ]


@cause()
def converts_what_another_layer_left():
    holder = Holds(np.ones(4))

    def leave(x, training):
        holder.t = ops.tanh(x)
        return x

    return [kl.Dense(4), Run(leave), kl.Dense(4), holder, kl.Dense(3)]


# ----------------------------------------------------------------------- masks
class OtherMask(kl.Layer):
    """Returns what it takes; has a mask of its own."""

    supports_masking = True

    def call(self, x):
        return x

    def compute_mask(self, x, mask):
        return ops.logical_not(mask)


@cause(x=IDS)
def mask_of_a_layer_that_returns_what_it_takes():
    embedding = kl.Embedding(6, 4, mask_zero=True)
    return [embedding, OtherMask(), kl.GlobalAveragePooling1D(), kl.Dense(3)]
