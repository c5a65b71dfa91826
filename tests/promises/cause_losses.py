"""Losses, metrics and layers that look like Keras's, and look at other rows."""

from __future__ import annotations

import functools

import keras
from keras import layers as kl
from keras import ops

LOSSES, METRICS, LAYERS = {}, {}, {}


def add(to):
    def added(make):
        to[make.__name__] = make
        return make

    return added


def hard(values):
    """The two largest of a batch."""
    return ops.top_k(ops.reshape(values, (-1,)), 2)[0]


def hard_rows(y, p):
    """Values of rows, of which the hard ones count more."""
    error = ops.mean((y - p) ** 2, axis=-1)
    return error * ops.softmax(3.0 * error, axis=0)


# --------------------------------------------------------------------- losses
@add(LOSSES)
def draws_noise():
    class Noisy(keras.losses.MeanSquaredError):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(4)

        def call(self, y, p):
            noise = keras.random.normal(
                ops.shape(p), dtype=p.dtype, seed=self.seed
            )
            return super().call(y, p + noise)

    return Noisy()


@add(LOSSES)
def mines_hard_rows():
    class Mining(keras.losses.MeanSquaredError):
        def call(self, y, p):
            return hard(super().call(y, p))

    return Mining()


@add(LOSSES)
def softmax_over_rows():
    class OverRows(keras.losses.CategoricalCrossentropy):
        def call(self, y, p):
            return super().call(ops.softmax(y, 0), ops.softmax(p, 0))

    return OverRows()


@add(LOSSES)
def loss_class_that_wraps_keras_s():
    @functools.wraps(keras.losses.MeanSquaredError, updated=())
    class Wrapping(keras.losses.MeanSquaredError):
        def call(self, y, p):
            return hard_rows(y, p)

    return Wrapping()


@add(LOSSES)
def loss_class_whose_call_wraps_keras_s():
    class Wrapping(keras.losses.MeanSquaredError):
        @functools.wraps(keras.losses.MeanSquaredError.call)
        def call(self, y, p):
            return hard_rows(y, p)

    return Wrapping()


@add(LOSSES)
def loss_class_that_is_called_in_its_own_way():
    class Wrapping(keras.losses.MeanSquaredError):
        @functools.wraps(keras.losses.MeanSquaredError.__call__)
        def __call__(self, y, p, sample_weight=None):
            return ops.sum(hard_rows(y, p))

    return Wrapping()


@add(LOSSES)
def loss_function_that_wraps_keras_s():
    @functools.wraps(keras.losses.mean_squared_error)
    def wrapping(y, p):
        return hard_rows(y, p)

    return wrapping


@add(LOSSES)
def loss_object_with_another_call():
    loss = keras.losses.MeanSquaredError()
    loss.call = functools.wraps(loss.call)(hard_rows)
    return loss


@add(LOSSES)
def loss_object_with_another_function():
    loss = keras.losses.MeanSquaredError()
    loss.fn = functools.wraps(loss.fn)(hard_rows)
    return loss


# -------------------------------------------------------------------- metrics
def updating(metric):
    """Has a metric's object take the largest error of a batch alone."""
    update = metric.update_state

    @functools.wraps(update)
    def of_hard(y, p, sample_weight=None):
        return update(hard(y), hard(p))

    metric.update_state = of_hard
    return metric


@add(METRICS)
def mean_with_another_update():
    return updating(keras.metrics.MeanSquaredError())


@add(METRICS)
def counter_with_another_update():
    return updating(keras.metrics.Recall(0.1))


@add(METRICS)
def metric_with_another_function():
    metric = keras.metrics.MeanSquaredError()
    metric._fn = functools.wraps(metric._fn)(hard_rows)
    return metric


@add(METRICS)
def metric_class_with_another_update():
    class Hard(keras.metrics.MeanSquaredError):
        def update_state(self, y, p, sample_weight=None):
            return super().update_state(hard(y), hard(p))

    return Hard()


@add(METRICS)
def metric_class_that_wraps_keras_s():
    @functools.wraps(keras.metrics.MeanSquaredError, updated=())
    class Hard(keras.metrics.MeanSquaredError):
        def update_state(self, y, p, sample_weight=None):
            return super().update_state(hard(y), hard(p))

    return Hard()


@add(METRICS)
def metric_function_that_wraps_keras_s():
    return functools.wraps(keras.metrics.mean_squared_error)(hard_rows)


# --------------------------------------------------------------------- layers
def over_rows(x):
    return x - ops.mean(x, axis=0)


@add(LAYERS)
def flip():
    return [kl.Activation(ops.flip, name="odd")]


@add(LAYERS)
def activation_that_is_a_constraint():
    return [kl.Dense(4, keras.constraints.UnitNorm(axis=0), name="odd")]


@add(LAYERS)
def activation_that_wraps_keras_s():
    wrapping = functools.wraps(keras.activations.relu)(over_rows)
    return [kl.Dense(4, wrapping, name="odd")]


@add(LAYERS)
def activity_regularizer_that_wraps_keras_s():
    @functools.wraps(keras.regularizers.L2.__call__)
    def largest(x):
        return 10.0 * ops.max(x**2)

    return [kl.Dense(4, activity_regularizer=largest, name="odd")]


@add(LAYERS)
def activity_regularizer_of_an_axis():
    """One of matrices, whose first axis is the rows here. In float32 only."""
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    regularizer = keras.regularizers.OrthogonalRegularizer(0.1, "columns")
    return [kl.Dense(4, activity_regularizer=regularizer, name="odd")]


@add(LAYERS)
def call_that_wraps_the_layer_s():
    layer = kl.Dense(4, name="odd")
    call = layer.call

    @functools.wraps(call)
    def wrapping(x, *args, **kwargs):
        return over_rows(call(x, *args, **kwargs))

    layer.call = wrapping
    return [layer]


@add(LAYERS)
def class_that_wraps_keras_s():
    @functools.wraps(kl.Dense, updated=())
    class Wrapping(kl.Dense):
        def call(self, x, training=None):
            return over_rows(super().call(x))

    return [Wrapping(4, name="odd")]


@add(LAYERS)
def plain_cell():
    """A cell of a recurrent layer that is no layer."""

    class Cell:
        state_size = output_size = 4
        compute_dtype = "float64"

        def __call__(self, x, states, **kwargs):
            h = ops.tanh(over_rows(x) + states[0])
            return h, [h]

        def get_initial_state(self, batch_size=None):
            return [ops.zeros((batch_size, 4), "float64")]

        call = __call__

    return [kl.Reshape((1, 4)), kl.RNN(Cell(), name="odd")]


@add(LAYERS)
def constraints_and_regularizers_of_weights():
    """They look at no rows: the numbers are Keras's, and nothing is said."""
    unit = keras.constraints.UnitNorm(axis=0)
    return [kl.Dense(4, kernel_constraint=unit, kernel_regularizer="l1")]
