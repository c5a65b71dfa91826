"""Losses, metrics and layers that look like Keras's, and look at other rows."""

from __future__ import annotations

import functools

import keras
from keras import layers as kl
from keras import ops

MSE, MSE_METRIC = keras.losses.MeanSquaredError, keras.metrics.MeanSquaredError


def hard(values):
    """The two largest of a batch."""
    return ops.top_k(ops.reshape(values, (-1,)), 2)[0]


def hard_rows(y, p):
    """Values of rows, of which the hard ones count more."""
    error = ops.mean((y - p) ** 2, axis=-1)
    return error * ops.softmax(3.0 * error, axis=0)


def over_rows(x):
    return x - ops.mean(x, axis=0)


def like(original):
    """Decorates what is to look like something of Keras."""
    return functools.wraps(original, updated=())


def changed(made, name, function):
    """Sets a method of an object, which looks like the one before."""
    before = getattr(made, name)
    setattr(made, name, like(before)(functools.partial(function, before)))
    return made


# --------------------------------------------------------------------- losses
class Noisy(MSE):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(4)

    def call(self, y, p):
        noise = keras.random.normal(ops.shape(p), dtype=p.dtype, seed=self.seed)
        return super().call(y, p + noise)


class Mining(MSE):
    def call(self, y, p):
        return hard(super().call(y, p))


class OverRows(keras.losses.CategoricalCrossentropy):
    def call(self, y, p):
        return super().call(ops.softmax(y, 0), ops.softmax(p, 0))


@like(MSE)
class LikeKeras(MSE):
    def call(self, y, p):
        return hard_rows(y, p)


class CallLikeKeras(MSE):
    @like(MSE.call)
    def call(self, y, p):
        return hard_rows(y, p)


class CalledInItsOwnWay(MSE):
    @like(MSE.__call__)
    def __call__(self, y, p, sample_weight=None):
        return ops.sum(hard_rows(y, p))


def of_hard_rows(before, y, p):
    return hard_rows(y, p)


# By the name: what makes them.
LOSSES = {
    "draws noise": Noisy,
    "mines hard rows": Mining,
    "softmax over rows": OverRows,
    "class that wraps Keras's": LikeKeras,
    "class whose call wraps Keras's": CallLikeKeras,
    "class that is called in its own way": CalledInItsOwnWay,
    "function that wraps Keras's": lambda: like(
        keras.losses.mean_squared_error
    )(hard_rows),
    "object with another call": lambda: changed(MSE(), "call", of_hard_rows),
    "object with another function": lambda: changed(MSE(), "fn", of_hard_rows),
}


# -------------------------------------------------------------------- metrics
class Hard(MSE_METRIC):
    """Takes the largest error of a batch alone."""

    def update_state(self, y, p, sample_weight=None):
        return super().update_state(hard(y), hard(p))


@like(MSE_METRIC)
class HardLikeKeras(Hard):
    pass


def updates(before, y, p, sample_weight=None):
    return before(hard(y), hard(p))


METRICS = {
    "mean with another update": lambda: changed(
        MSE_METRIC(), "update_state", updates
    ),
    "counter with another update": lambda: changed(
        keras.metrics.Recall(0.1), "update_state", updates
    ),
    "object with another function": lambda: changed(
        MSE_METRIC(), "_fn", of_hard_rows
    ),
    "class with another update": Hard,
    "class that wraps Keras's": HardLikeKeras,
    "function that wraps Keras's": lambda: like(
        keras.metrics.mean_squared_error
    )(hard_rows),
}


# --------------------------------------------------------------------- layers
def odd(*args, **kwargs):
    return kl.Dense(4, *args, name="odd", **kwargs)


@like(keras.regularizers.L2.__call__)
def largest(x):
    return 10.0 * ops.max(x**2)


def of_an_axis():
    """One of matrices, whose first axis is the rows here. In float32 only."""
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    columns = keras.regularizers.OrthogonalRegularizer(0.1, "columns")
    return odd(activity_regularizer=columns)


@like(kl.Dense)
class DenseLikeKeras(kl.Dense):
    def call(self, x, training=None):
        return over_rows(super().call(x))


class Cell:
    """A cell of a recurrent layer that is no layer."""

    state_size = output_size = 4
    compute_dtype = "float64"

    def __call__(self, x, states, **kwargs):
        h = ops.tanh(over_rows(x) + states[0])
        return h, [h]

    def get_initial_state(self, batch_size=None):
        return [ops.zeros((batch_size, 4), "float64")]

    call = __call__


def unit():
    return keras.constraints.UnitNorm(axis=0)


LAYERS = {
    "flip": lambda: [kl.Activation(ops.flip, name="odd")],
    "activation that is a constraint": lambda: [odd(unit())],
    "activation that wraps Keras's": lambda: [
        odd(like(keras.activations.relu)(over_rows))
    ],
    "activity regularizer that wraps Keras's": lambda: [
        odd(activity_regularizer=largest)
    ],
    "activity regularizer of an axis": lambda: [of_an_axis()],
    "call that wraps the layer's": lambda: [
        changed(odd(), "call", lambda call, x, **_: over_rows(call(x)))
    ],
    "class that wraps Keras's": lambda: [DenseLikeKeras(4, name="odd")],
    "plain cell": lambda: [kl.Reshape((1, 4)), kl.RNN(Cell(), name="odd")],
    # They look at no rows: the numbers are Keras's, and nothing is said.
    "constraints and regularizers of weights": lambda: [
        kl.Dense(4, kernel_constraint=unit(), kernel_regularizer="l1")
    ],
}
