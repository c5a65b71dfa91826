"""A model with a `call` of its own, and the same as a graph."""

import keras
from keras import layers as kl


class Residual(keras.Model):
    """Calls its layers itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = kl.Dense(4, "gelu"), kl.Dense(4, "tanh")
        self.add, self.last = kl.Add(), kl.Dense(2)

    def call(self, x):
        h = self.first(x)
        return self.last(self.add([h, self.second(h)]))


def functional():
    """The same, of a graph."""
    x = keras.Input((4,))
    return keras.Model(x, Residual().call(x))
