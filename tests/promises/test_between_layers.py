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
from kinds import Steps, built
from own_layers import Fixed, Hidden
from quick import quick
from sharing_layers import Tied
from weight_layers import MomentsReader

import tfgpipe

pytestmark = pytest.mark.usefixtures("float64")


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
    def found(make):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((3,)), kl.Dense(4, "tanh"), kl.Dense(2)]
        told = {"loss": Penalised(layers[1])}
        return trained(lambda: layers, make, normal(3), normal(2), **told)

    expected = found(keras.Sequential)
    for k in (1, 2):
        assert_close(found(pipeline(k, 2)), expected)


# ------------------------------------------------------------------- refusals
class Recomputed(kl.Layer):
    """Runs in a function that has its own gradient."""

    def __init__(self, how, **kwargs):
        super().__init__(**kwargs)
        self.how = how

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 4))

    def call(self, x):
        return self.how(lambda t: keras.ops.tanh(t @ self.kernel))(x)


def custom(function):
    def with_gradient(x):
        y = function(x)

        def gradient(dy, variables=()):
            return dy @ tf.ones((4, 3), dy.dtype), [
                tf.zeros(v.shape, dy.dtype) for v in variables
            ]

        return y, gradient

    return tf.custom_gradient(with_gradient)


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


def reads_moments():
    """They move at the end of the mini-batch, and would be the old ones."""
    norm = kl.BatchNormalization()
    return [norm, kl.Activation("tanh"), MomentsReader(norm)]


OF_ITS_OWN = "a gradient of its own", "In layer 'recomputed"
BRANCH = "by a layer directly", "In layer 'sometimes"
# Layers, what is said, and the note of where.
REFUSED = {
    "moving statistics": (
        reads_moments,
        ("nobody may read them after", ""),
    ),
    # They were never trained.
    "keras.remat": (lambda: [Recomputed(keras.remat)], OF_ITS_OWN),
    "recompute_grad": (lambda: [Recomputed(tf.recompute_grad)], OF_ITS_OWN),
    "custom gradient": (lambda: [Recomputed(custom)], OF_ITS_OWN),
    # TensorFlow's error named a tensor, not the layer.
    "seed": (lambda: [Sometimes(kl.Dropout(0.5))], BRANCH),
    "moments": (lambda: [Sometimes(kl.BatchNormalization())], BRANCH),
    "counts": (lambda: [Sometimes(Steps())], BRANCH),
}


@pytest.mark.filterwarnings("ignore:.*by a scalar that follows from rows")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cells_cannot_hand_on_is_refused(name):
    made, (words, where) = REFUSED[name]
    model = pipeline(2, 2)([keras.Input((3,)), *made(), kl.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=words) as error:
        model.train_on_batch(normal(3), normal(2))
    # Python 3.10 has no notes.
    assert where in getattr(error.value, "__notes__", [where])[0]
    model.predict(normal(3), verbose=0)


# ------------------------------------------------------------------- one table
@tf.custom_gradient
def straight_through(x):
    return tf.round(x), lambda dy: dy


class Rounded(Recomputed):
    def call(self, x):
        return x @ straight_through(4 * self.kernel) + straight_through(
            self.kernel
        )


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


class AddsLoss(kl.Layer):
    """Adds a loss, and keeps what it is given."""

    def call(self, x):
        self.kept = x
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


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
    keeps = AddsLoss()
    uses = kl.Lambda(lambda x: x + keeps.kept)
    return [keras.Input((3,)), kl.Dense(2), keeps, kl.Dense(2), uses]


# Layers, and points of K and M.
TABLE = {
    adds_by_a_closure: [(1, 1), (3, 2)],
    draws_in_a_function: [(3, 1)],
    inside_a_frozen_block: [(4, 3)],
    keeps_in_attributes: [(1, 1), (4, 2)],
    straight_through_weights: [(3, 1)],
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "make",
    # A quick model of the matrix, "between", has most of the others.
    quick(TABLE, [keeps_in_attributes]),
)
def test_layers_train_as_in_keras(make):
    rows = 4 if make is straight_through_weights else ROWS
    x, y = (normal(n)[:rows] for n in (make()[0].shape[-1], 2))
    check(make, x, y, TABLE[make])
