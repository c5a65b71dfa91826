"""What one run of a model in a graph shows."""

import keras
import pytest
import tensorflow as tf
from keras import layers as kl
from traces import traced

SPEC = tf.TensorSpec([None, 4])


class Adds(kl.Layer):
    """Adds what a function makes of the inputs to the loss."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


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
