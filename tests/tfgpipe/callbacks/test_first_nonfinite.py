import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as kl
from quick import quick

import tfgpipe
from tfgpipe.callbacks.stop_on_nonfinite import first_nonfinite

ROWS = 8


class Root(kl.Layer):
    """Square roots, whose gradient at 0 is infinite."""

    def call(self, x):
        return tf.sqrt(tf.abs(x))


class Weighted(kl.Layer):
    """Adds a weight, whose gradient alone can be infinite."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(), initializer="zeros", name="w")

    def call(self, x):
        return x + tf.sqrt(self.weight)


def model_of(layers, k=3, m=2, loss="mse", **options):
    keras.utils.set_random_seed(1)
    model = tfgpipe.GPipe(layers, k, m, **options)
    model.compile("sgd", loss)
    model.build((None, 4))
    return model


def data(x=1.0, y=1.0):
    inputs, labels = np.ones((ROWS, 4)), np.ones((ROWS, 4))
    inputs[-1], labels[-1] = x, y  # in the last micro-batch
    return tf.constant(inputs, "float32"), tf.constant(labels, "float32")


def dense(name, **options):
    return kl.Dense(4, name=name, **options)


def test_inputs_come_first():
    model = model_of([dense("a"), kl.Rescaling(np.inf), dense("b")])
    found = first_nonfinite(model, data(np.nan))
    assert found == "The inputs of the mini-batch are not finite."


def test_first_layer_with_such_outputs_is_named():
    logarithm = kl.Lambda(keras.ops.log, name="logarithm")
    model = model_of([kl.ReLU(), logarithm, dense("b"), dense("c")])
    found = first_nonfinite(model, data(-1.0))
    assert found.startswith("The outputs of layer 'logarithm' of cell 0 on")


def test_layers_are_named_where_replicas_normalise_together():
    together = kl.BatchNormalization(synchronized=True)
    logarithm = kl.Lambda(keras.ops.log, name="logarithm")
    with tfgpipe.PipelineStrategy(2, 2).scope():
        layers = [keras.Input((4,)), dense("a"), together, logarithm]
        model = model_of(layers, k=2, schedule="1f1b")
    x, y = data()
    found = first_nonfinite(model, (tf.random.normal(x.shape, seed=1), y))
    assert found.startswith("The outputs of layer 'logarithm' of cell 1 on")


def test_labels_are_told_from_outputs():
    model = model_of([dense("a"), dense("b"), dense("c")])
    found = first_nonfinite(model, data(y=np.inf))
    assert found.startswith("The loss is not finite, and the outputs of all")


def test_layer_is_named_by_the_gradients_that_it_hands_on():
    zeros = dense("b", kernel_initializer="zeros")  # and so its outputs
    model = model_of([dense("a"), zeros, Root(name="root"), dense("c")], k=4)
    found = first_nonfinite(model, data())
    assert found.startswith(
        "The gradient with respect to the inputs of layer 'root' of"
    )


def test_weight_is_named_whose_gradient_is_the_first():
    model = model_of([dense("a"), Weighted(name="sum"), dense("c")])
    found = first_nonfinite(model, data())
    assert "The gradient of the weight 'g_pipe/sum/w' of layer 'sum'" in found


def test_gradient_of_the_loss_is_told():
    def loss(y, p):
        return tf.reduce_mean(tf.sqrt(tf.abs(y - p)), axis=-1)

    model = model_of([dense("a"), kl.Rescaling(0.0)], k=2, loss=loss)
    found = first_nonfinite(model, data(y=0.0))
    assert found.startswith(
        "The gradient of the loss with respect to the outputs"
    )


def test_what_is_finite_is_told():
    model = model_of([dense("a"), dense("b")], k=2)
    assert "all its values are finite" in first_nonfinite(model, data())


@pytest.mark.parametrize("is_functional", quick([False, True], [True]))
def test_nothing_changes(is_functional):
    def layers():
        made = [
            dense("a"),
            kl.BatchNormalization(name="normal"),
            kl.Dropout(0.5, seed=1, name="drop"),
            dense("c"),
        ]
        if not is_functional:
            return made
        inputs = keras.Input((4,))
        outputs = inputs
        for layer in made:
            outputs = layer(outputs)
        return keras.Model(inputs, kl.Add(name="skip")([outputs, inputs]))

    model = model_of(layers(), k=2, schedule="1f1b", skip_nonfinite=True)
    before = [v.numpy() for v in [*model.variables, *model.metrics_variables]]
    assert "'drop'" not in first_nonfinite(model, data(y=np.nan))
    after = [v.numpy() for v in [*model.variables, *model.metrics_variables]]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.skipped_in_a_row == 0
    logs = model.train_on_batch(*data(), return_dict=True)
    assert np.isfinite(logs["loss"])
    assert logs["skipped_steps"] == 0


def test_what_only_overflows_when_it_is_kept_is_told():
    """All values are finite; a square of a gradient, or state, is not."""
    model = model_of([dense("a"), dense("b")], k=2, loss="mae")
    x, y = data(y=3.0)
    weight = tf.constant([1.0] * (ROWS - 1) + [1e25])
    found = first_nonfinite(model, (x, y, weight))
    assert "is finite, and the sum of its squares is not" in found
    model = model_of([kl.BatchNormalization(), dense("b")], k=2)
    found = first_nonfinite(model, data(x=1e20))
    assert "state that it would leave, such as a moving variance" in found
