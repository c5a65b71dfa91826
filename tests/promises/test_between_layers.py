"""What layers do to each other besides handing on tensors.

One reads a variable of another, assigns one, or changes `training`: the numbers
must be Keras's wherever a cell ends.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from beside_keras import ROWS, assert_close, check, normal, pipeline, trained
from keras import layers as kl
from kinds import (
    Steps,
    built,
)
from own_layers import Fixed, Hidden
from quick import quick
from sharing_layers import Tied
from weight_layers import MomentsReader

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


# ----------------------------------------------------------- added losses
class AddsLoss(kl.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


def test_training_does_not_leak_in_a_plain_call():
    layers = [kl.Dense(4), Fixed(kl.Dropout(0.1), False), kl.Dropout(0.5)]
    model = tfgpipe.GPipe([keras.Input((4,)), *layers], 2)
    assert np.any(model(np.ones((8, 4)), training=True) == 0)


@keras.saving.register_keras_serializable("between")
class Penalised(keras.losses.Loss):
    """A loss of rows that reads a weight of the model."""

    is_row_wise = True

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def call(self, y_true, y_pred):
        penalty = keras.ops.mean(self.layer.kernel**2)
        return keras.ops.mean((y_true - y_pred) ** 2, -1) + penalty


def test_weights_read_by_a_loss_of_rows_are_trained():
    def model(make):
        def made(layers):
            model = make(layers)
            loss = Penalised(layers[1])
            compile_ = model.compile
            model.compile = lambda *a, **k: compile_(*a, **{**k, "loss": loss})
            return model

        return made

    def make():
        return [keras.Input((3,)), kl.Dense(4, "tanh"), kl.Dense(2)]

    data = normal(3), normal(2)
    expected = trained(make, model(keras.Sequential), *data)
    for k in (1, 2):
        assert_close(trained(make, model(pipeline(k, 2)), *data), expected)


@pytest.mark.parametrize(("k", "eagerly"), [(1, False), (3, False), (3, True)])
def test_moving_statistics_read_after_they_moved_are_refused(k, eagerly):
    """They move at the end of the mini-batch, and would be the old ones."""
    norm = kl.BatchNormalization()
    layers = [norm, kl.Activation("tanh"), MomentsReader(norm)]
    model = pipeline(k, 2)([keras.Input((2,)), *layers])
    model.compile("sgd", "mse", run_eagerly=eagerly)
    with pytest.raises(ValueError, match="must not read the moving statistics"):
        model.train_on_batch(normal(2), normal(2))
    model.predict(normal(2), verbose=0)


# ---------------------------------------------- functions inside of layers
class Recomputed(kl.Layer):
    """Runs in a function that has its own gradient."""

    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.how = how

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 4))

    def call(self, x):
        return self.how(lambda t: keras.ops.tanh(t @ self.kernel))(x)


def check_note(error, expected):
    """The first note of an error says so; Python 3.10 has no notes."""
    assert expected in getattr(error.value, "__notes__", [expected])[0]


def custom(function):
    def with_gradient(x):
        y = function(x)

        def gradient(dy, variables=()):
            return dy @ tf.ones((4, 3), dy.dtype), [
                tf.zeros(v.shape, dy.dtype) for v in variables
            ]

        return y, gradient

    return tf.custom_gradient(with_gradient)


@pytest.mark.parametrize("how", [keras.remat, tf.recompute_grad, custom])
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eagerly"])
def test_weights_in_a_function_with_its_own_gradient_are_refused(how, eagerly):
    """They were never trained."""
    model = pipeline(2, 2)([keras.Input((3,)), Recomputed(how), kl.Dense(2)])
    model.compile("sgd", "mse", run_eagerly=eagerly)
    with pytest.raises(ValueError, match="a gradient of its own") as error:
        model.train_on_batch(normal(3), normal(2))
    check_note(error, "In layer 'recomputed")
    model.predict(normal(3), verbose=0)


@tf.custom_gradient
def straight_through(x):
    return tf.round(x), lambda dy: dy


class Rounded(Recomputed):
    def call(self, x):
        return x @ straight_through(4 * self.kernel) + straight_through(
            self.kernel
        )


class Sometimes(kl.Layer):
    """Has a layer in a branch."""

    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x, training=False):
        return keras.ops.cond(
            keras.ops.sum(x) > -1e9,
            lambda: self.layer(x, training=training),
            lambda: x,
        )


@pytest.mark.filterwarnings("ignore:.*by a scalar that follows from rows")
@pytest.mark.parametrize("layer", [kl.Dropout, kl.BatchNormalization, Steps])
def test_state_in_a_branch_is_refused(layer):
    """TensorFlow's error named a tensor, not the layer."""
    args = [0.5] if layer is kl.Dropout else []
    layers = [keras.Input((3,)), Sometimes(layer(*args)), kl.Dense(2)]
    model = pipeline(2, 2)(layers)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="in a branch of a condition") as error:
        model.train_on_batch(normal(3), normal(2))
    check_note(error, "In layer 'sometimes")
    model.predict(normal(3), verbose=0)


class InFunction(kl.Layer):
    """Draws in a `tf.function`, twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dropout = kl.Dropout(0.4, seed=2)
        self.function = tf.function(
            lambda x: self.dropout(self.dropout(x, training=True))
        )

    def call(self, x, training=False):
        return self.function(x) if training else x


class Keeps(kl.Layer):
    def call(self, x):
        self.kept = x
        return keras.ops.tanh(x)


class Uses(kl.Layer):
    def __init__(self, keeps, **kwargs):
        super().__init__(**kwargs)
        self.keeps = keeps

    def call(self, x):
        return x + self.keeps.kept


# ------------------------------------------------------------------- one table
def adds_by_a_closure():
    """Keras does not find the layer; it does where it is in the list, too."""
    dense = built(3, 3, activity_regularizer="l1")
    listed, hidden = AddsLoss(), AddsLoss()
    return [
        keras.Input((3,)),
        kl.Lambda(lambda x: dense(x)),
        listed,
        kl.Lambda(lambda x: hidden(listed(x))),
        kl.Dense(2),
    ]


def inside_a_frozen_block():
    """Keras looks at the variables: `trainable=False` came before them."""
    block = Hidden(kl.Dense(4, "tanh"), trainable=False)
    later = Hidden(kl.Dense(4, "tanh"))
    later.trainable = False
    tied = Tied(block.inner, trainable=False)
    return [keras.Input((3,)), block, later, tied, kl.Dense(2)]


def straight_through_weights():
    return [keras.Input((4,)), kl.Dense(4), Rounded(None), kl.Dense(2)]


def draws_in_a_function():
    return [keras.Input((3,)), kl.Dense(3), InFunction(), kl.Dense(2)]


def keeps_in_attributes():
    keeps = Keeps()
    return [keras.Input((3,)), kl.Dense(2), keeps, kl.Dense(2), Uses(keeps)]


# Layers, and points of K and M.
TABLE = {
    adds_by_a_closure: [(1, 1), (3, 2)],
    draws_in_a_function: [(3, 1)],
    inside_a_frozen_block: [(4, 3)],
    keeps_in_attributes: [(1, 1), (4, 2)],
    straight_through_weights: [(3, 1)],
}
# Keras's own variables are none to such a gradient then.
NOT_EAGERLY = (straight_through_weights,)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("make", "eagerly"),
    quick(
        [
            *((make, False) for make in TABLE),
            *((make, True) for make in TABLE if make not in NOT_EAGERLY),
        ],
        # A quick model of the matrix, "between", has most of the others.
        [(keeps_in_attributes, True)],
    ),
)
def test_layers_train_as_in_keras(make, eagerly):
    rows = 4 if make in NOT_EAGERLY else ROWS
    x, y = (normal(n)[:rows] for n in (make()[0].shape[-1], 2))
    check(make, x, y, TABLE[make], run_eagerly=eagerly)
