"""What steps need, beside what Keras makes of them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl

import tfgpipe
from tfgpipe import internals
from tfgpipe.costs import Placed, layer_sizes, num_params
from tfgpipe.sequence.source import source_of


def sizes_of(layers, spec=None):
    source = source_of(layers)
    spec = source.input_spec if spec is None else spec
    placed = Placed(source, spec)
    # Two slots, in float32.
    sizes = layer_sizes(placed, lambda v: 8 * int(np.prod(v.shape)))
    return sizes, placed.output


def test_layer_by_hand():
    [size], output = sizes_of([keras.Input((3,)), kl.Dense(4, "relu")])
    assert output.shape == (None, 4)
    assert size.num_params == size.num_values == 3 * 4 + 4
    assert size.weight_bytes == size.gradient_bytes == 4 * 16
    assert size.slot_bytes == 2 * 4 * 16
    assert size.live_bytes == 4 * 3
    (x,), (h,) = size.memory.inputs, size.memory.made
    assert (x.by, x.size.at(5)) == (0, 5 * 4 * 3)
    assert (h.by, h.size.at(5)) == (0, 5 * 4 * 4)


def test_equal_layers_are_built_without_values():
    layers = [kl.Dense(3, name=f"dense_{i}") for i in range(4)]
    sizes, _ = sizes_of([keras.Input((3,)), *layers])
    assert all(layer.built for layer in layers)
    assert not internals.is_created(layers[0].kernel)
    assert [size.name for size in sizes] == [layer.name for layer in layers]
    assert len({size._replace(name="") for size in sizes[1:]}) == 1
    model = tfgpipe.GPipe([keras.Input((3,)), *layers], num_partitions=1)
    assert len(model.weights) == 8
    assert model.predict(np.ones((2, 3)), verbose=0).shape == (2, 3)


def test_tied_weights_count_in_the_first_layer():
    other, shared = kl.Dense(3, name="a"), kl.Dense(3, name="b")
    sizes, _ = sizes_of([keras.Input((3,)), other, shared, kl.ReLU(), shared])
    assert [size.num_values for size in sizes] == [12, 12, 0, 0]
    source = source_of([other, shared, shared])
    assert num_params(Placed(source, keras.KerasTensor((None, 3)))) == 24


def test_weights_frozen_in_one_of_equal_layers_are_those_of_that_one():
    """What is frozen inside, the configuration does not tell."""

    class Around(kl.Layer):
        def __init__(self):
            super().__init__()
            self.inner = kl.Dense(3)

        def build(self, shape):
            self.inner.build(shape)

        def call(self, x):
            return tf.matmul(x, self.inner.kernel)

    x, first, second = keras.Input((3,)), Around(), Around()
    model = keras.Model(x, second(first(x)))
    second.inner.trainable = False
    sizes, _ = sizes_of(model)
    assert [size.num_params for size in sizes] == [12, 0]
    assert [size.num_values for size in sizes] == [12, 12]


def test_weights_of_no_layer_count_where_they_are_read():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = kl.Dense(4), kl.Dense(2)
            self.scale = self.add_weight(shape=(4,), name="scale")

        def call(self, x):
            return self.last(self.first(x) * self.scale)

    sizes, _ = sizes_of(Own(), keras.KerasTensor((None, 3)))
    assert [size.num_params for size in sizes] == [16 + 4, 10]


def test_what_passes_by_is_alive():
    ids = keras.Input((5,), dtype="int32")
    first = kl.Embedding(7, 2)(ids)
    second = kl.Dense(2)(first)
    model = keras.Model(ids, kl.Add()([first, second]))
    sizes, _ = sizes_of(model)
    assert [s.name.split("_")[0] for s in sizes] == [
        "embedding",
        "dense",
        "add",
    ]
    assert [s.live_bytes for s in sizes] == [4 * 5, 4 * 10, 2 * 4 * 10]
