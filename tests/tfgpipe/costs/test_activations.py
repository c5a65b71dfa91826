"""What layers keep for their backward passes, counted by hand."""

import keras
import pytest
import tensorflow as tf
from keras import layers as kl

from tfgpipe.costs import Placed, memory_of_steps
from tfgpipe.sequence import source_of, steps

ROWS = 2


class Scaled(kl.Layer):
    """A weight before all others, so that these have gradients of inputs."""

    def build(self, shape):
        self.scale = self.add_weight(shape=())

    def call(self, x):
        return x * self.scale


def memory(layers, inputs):
    placed = Placed(source_of(layers), inputs)
    return memory_of_steps(placed.differentiated(ROWS))


def behind_weights(layer, inputs):
    """What a layer keeps behind another one that has weights."""
    first = [] if inputs.dtype == "int32" else [Scaled()]
    return memory([*first, layer], inputs)[-1]


def spec(*shape, dtype="float32"):
    return keras.KerasTensor((ROWS, *shape), dtype)


@pytest.fixture
def whole(monkeypatch):
    """Layers are not gone into."""
    monkeypatch.setattr(steps, "SHARE", 1.0)


@pytest.mark.parametrize(
    ("layer", "inputs", "expected"),
    [
        (kl.Dense(4), spec(3), (3, 0)),  # its input, for the kernel
        (kl.Dense(4, trainable=False), spec(3), (0, 0)),
        (kl.Dense(4, "relu"), spec(3), (3, 4)),
        (kl.Embedding(9, 4), spec(5, dtype="int32"), (0, 5)),
        (kl.Identity(), spec(3), (0, 0)),
        (kl.Flatten(), spec(3, 4), (0, 0)),
        (kl.Reshape((12,)), spec(3, 4), (0, 0)),
        (kl.ReLU(), spec(3), (0, 3)),
        (kl.Conv2D(4, 3, use_bias=False), spec(5, 5, 2), (50, 0)),
        # Of the exponential, what is divided by the sum.
        (kl.Softmax(), spec(3), (0, 3)),
    ],
)
def test_layer_keeps_what_its_gradient_reads(layer, inputs, expected):
    found = behind_weights(layer, inputs)
    kept = [
        sum(own.size for own in activations if own.by == 0)
        for activations in (found.inputs, found.made)
    ]
    assert kept == [4 * ROWS * count for count in expected]


def test_what_cannot_be_differentiated_keeps_nothing():
    """No `predict` fails for what it costs."""

    @tf.custom_gradient
    def refusing(x):
        return tf.exp(x), lambda dy: dy.gone

    layers = [kl.Dense(3), kl.Lambda(refusing)]
    assert not any(own.inputs for own in memory(layers, spec(3)))


def test_tensors_are_of_the_step_that_makes_them():
    """Whichever steps take them, and the loss behind the last one."""
    x = keras.Input((3,), batch_size=ROWS)
    h = kl.Dense(4, "relu")(x)
    flat = kl.Reshape((4,))(h)
    y = kl.Multiply()([h, kl.Dense(4)(flat)])
    found = memory(keras.Model(x, y), x)
    made = [[(own.by, own.size) for own in step.made] for step in found]
    inputs = [[own.by for own in step.inputs] for step in found]
    assert made == [[(0, 32)], [], [(1, 32)], [(1, 32)]]
    assert inputs == [[0], [1], [0], [0, 0]]
    assert [step.reaches for step in found] == [0, 1, 1, 2]


@pytest.mark.usefixtures("whole")
def test_gradients_of_weights_wait_for_those_of_inputs():
    """Of two dense layers: dy, and the gradient between them."""
    layer = keras.Sequential([kl.Dense(5, use_bias=False), kl.Dense(7)])
    assert behind_weights(layer, spec(3)).crossing == 4 * ROWS * (5 + 7)


def test_slices_of_embeddings_are_not_added_up():
    found = behind_weights(kl.Embedding(9, 4), spec(5, dtype="int32"))
    # Values, indices, and the two sizes of the table.
    assert found.sparse == 4 * ROWS * 5 * 4 + 4 * ROWS * 5 + 2 * 4


@pytest.mark.usefixtures("whole")
def test_what_runs_needs_what_lives_at_the_same_time():
    """A wide tensor between two layers, which the backward pass takes."""
    layer = keras.Sequential([kl.Dense(50, use_bias=False), kl.Dense(2)])
    found = behind_weights(layer, spec(3))
    assert found.forward >= 4 * ROWS * (50 + 2)
    assert found.forward < 4 * ROWS * (50 + 2) * 2
    assert 4 * ROWS * 50 <= found.backward < 4 * ROWS * 50 * 2
