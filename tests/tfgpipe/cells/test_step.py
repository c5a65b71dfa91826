"""Calls of layers and operations on what is alive."""

import keras
import tensorflow as tf
from keras import layers as kl

from tfgpipe import internals
from tfgpipe.cells import CallOutput, LayerCall, LiveCall, LiveInput


def operation_of(function):
    x = keras.Input((1,))
    (call,) = internals.graph_calls(keras.Model(x, function(x)))
    return call.operation


def test_step_calls_its_layer_and_keeps_masks():
    x = tf.ones((2, 3))
    internals.set_mask(x, tf.constant([True, False]))

    class Sees(kl.Layer):
        supports_masking = True

        def call(self, inputs, mask=None, training=None):
            return inputs if mask is None or not training else -inputs

    step = LayerCall(Sees())
    assert float(step(x, training=True)[0, 0]) == -1
    assert float(step(x, training=False)[0, 0]) == 1


def test_step_of_a_graph_takes_and_gives_by_position():
    dense = kl.Dense(2, use_bias=False, kernel_initializer="ones")
    step = LiveCall(dense, (LiveInput(1),), {}, (LiveInput(0), CallOutput(0)))
    first, made = step((tf.zeros((1, 4)), tf.ones((1, 3))), training=False)
    assert first.shape == (1, 4)
    assert made.numpy().tolist() == [[3.0, 3.0]]
    assert step.uses == [1]
    assert step.layer is dense


def test_gradients_of_a_tensor_that_goes_on_are_added():
    operation = operation_of(keras.ops.square)
    step = LiveCall(
        operation, (LiveInput(0),), {}, (CallOutput(0), LiveInput(0))
    )
    x = tf.constant([[3.0]])
    with tf.GradientTape() as tape:
        tape.watch(x)
        squared, handed_on = step((x,), training=True)
        total = squared + 10.0 * handed_on
    assert tape.gradient(total, x).numpy().item() == 2 * 3.0 + 10.0


def test_operation_has_a_layer_with_the_variables_that_it_reads():
    weight = keras.Variable([2.0])
    operation = operation_of(lambda x: x * weight)
    step = LiveCall(operation, (LiveInput(0), weight), {}, CallOutput(0))
    assert [id(v) for v in step.layer.variables] == [id(weight)]
    product = step((tf.constant([[3.0]]),), training=False)
    assert product.numpy().item() == 6.0
