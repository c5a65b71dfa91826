"""What one run of a model in a graph shows."""

import keras
import pytest
import tensorflow as tf
from keras import layers as kl
from traces import traced

SPEC = tf.TensorSpec([None, 4])


def test_output_that_came_in_is_made_by_the_model():
    model = traced([kl.Lambda(lambda x: (x, tf.sin(x)))], SPEC)
    assert [t.op.type for t in model.outputs] == ["Identity", "Sin"]


class Adds(kl.Layer):
    """Adds what a function makes of the inputs to the loss."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


def test_added_losses_are_numbers_of_the_layers_alone():
    other = Adds(keras.ops.mean)
    layers = [
        Adds(lambda x: keras.ops.mean(x, 1)),  # Keras adds up such a vector
        kl.Lambda(lambda x: other(x)),  # which Keras does not track
        Adds(keras.ops.mean),
    ]
    model = traced(layers, SPEC)
    assert [loss.shape for loss in model.losses] == [(), ()]
    assert model.num_head_losses == 0


@pytest.mark.parametrize("rows", [None, 6])
def test_losses_of_rows_are_refused_where_rows_are_split(rows):
    layer = Adds(lambda x: keras.ops.mean(x, 1))
    with pytest.raises(ValueError, match="must be given a scalar"):
        traced([layer], tf.TensorSpec([rows, 4]), is_split=True)


def test_tensor_of_another_step_is_refused():
    class Keeps(kl.Layer):
        kept = 0.0

        def call(self, x):
            y = x + self.kept
            self.kept = x
            return y

    layer = Keeps()
    traced([layer], SPEC)
    with pytest.raises((ValueError, TypeError), match=r"step|scope|graph"):
        traced([layer], SPEC)


def test_operations_of_layers_have_them_in_their_names():
    """`failures.py` reads there which layer of which cell failed."""
    names = ["one", "two"]
    model = traced([kl.ReLU(name=name) for name in names], SPEC)
    found = [op.name for op in model.operations if op.type == "Relu"]
    assert [name.split("/")[:2] for name in found] == [
        ["cell_0", "layer_0"],
        ["cell_1", "layer_0"],
    ]
